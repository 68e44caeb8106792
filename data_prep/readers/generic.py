r"""Read any table by a mapping of its columns: a YAML file, or what `vlm-rl prepare PATH` guesses.

# my_set.yaml;  vlm-rl prepare my_set.yaml --out data/my_set
path: raw/my_set              # Parquet, JSON lines, JSON, CSV, TSV, tars, a datasets folder, or a hub id
revision: 0123abc...          # of a hub id: its commit
files: [train-*.parquet]      # optional: the tables in a folder that has several; globs
source: my_set                # the name that rows carry
columns:                      # ours: theirs; a.b is the key b of the column a
  question: prompt            # a text, or a conversation
  answer: gold                # may be left out where there is a box
  images: picture             # optional: a path, bytes, base64, datasets' struct, a list of them; or several columns
  choices: options            # optional: a list, an object with their labels, a text that lists them, several columns
  difficulty: pass_rate       # optional: a number in [0, 1]
  hint: hint                  # optional: a text that stands above the question, as in VLMEvalKit's tables
  category: topic             # optional
  frames: clip                # optional: the frames of the row's only video: a list of images, or a folder of images
  times: seconds              # with frames, unless fps says it: a list with the time of each frame in seconds
  box: bbox                   # optional: the gold box of the row's only image, four numbers
  tests: tests                # optional: the answer is a program, and these are its tests (docs/code.md)
  time_limit: seconds         # optional, beside tests: of one test; also memory_limit, in MiB
  response: trace             # optional: a whole response to learn from (`vlm-rl sft`), a text or a conversation
  id: uid                     # optional: without it, a hash of question, answer, response and the named images
image_folder: images          # optional: where paths of images begin, relative to path (default: beside the table)
fps: 2                        # optional: frames a second of all videos, the first at 0 seconds
answer_form: plain            # optional: plain, box, hashes (####), tag, option_text, option_number (from 0),
                              # option_number_from_1, any_of or all_of (of a list of answers)
answer_type: expression       # optional: for all rows; without it each gold's form decides
encoding: cp1252              # optional: of text tables; without it UTF-8, or what a mark at their beginning says
test_only: false              # optional: mark as a benchmark
box_format: xyxy              # optional: or xywh; of x and y the smallest, then the largest, or the size
box_unit: pixels              # optional: pixels of the image as it is in the file, upright; or thousandths, fractions
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from vlm_rl.config import ConfigSection, parse_tree, read_tree
from vlm_rl.data.golds import infer_answer_type, parse_choices, with_choices
from vlm_rl.data_prep.gold_boxes import read_raw_boxes
from vlm_rl.data_prep.readers.cells import answer_of, cell, images_of, question_of, system_text, video_of
from vlm_rl.data_prep.readers.hub import locate
from vlm_rl.data_prep.readers.image_files import ImageBytes, ImageRef, ImageStore
from vlm_rl.data_prep.readers.numbered_images import place_images
from vlm_rl.data_prep.readers.option_cells import RowOptions, options_of
from vlm_rl.data_prep.readers.program_tests import tests_in
from vlm_rl.data_prep.readers.row_golds import gold_of, golds_in
from vlm_rl.data_prep.readers.sample import SAMPLE_ROWS
from vlm_rl.data_prep.readers.table_files import find_tables, read_tables
from vlm_rl.data_prep.readers.written_values import is_missing, unwritten
from vlm_rl.data_prep.records import (
    Converted,
    DroppedRow,
    Fields,
    RowError,
    UsableRow,
    convert_rows,
    id_of,
    pass_rate_of,
    text_of,
)
from vlm_rl.errors import UserError
from vlm_rl.types import IMAGE_MARKER, VIDEO_MARKER, AnswerType, Problem

_PATTERNS = (
    "*.parquet",
    "data/*.parquet",
    "*.jsonl",
    "*.arrow",
    "*.json",
    "*.csv",
    "*.tsv",
    "*.xlsx",
    "*.tar",
    "*.gz",
)


AnswerForm = Literal[
    "plain", "box", "hashes", "tag", "option_number", "option_number_from_1", "option_text", "any_of", "all_of"
]


class Columns(ConfigSection):
    """The table's name for each of our columns; "" if it has none."""

    question: str
    answer: str = ""
    images: str | list[str] = ""
    choices: str | list[str] = ""
    difficulty: str = ""
    hint: str = ""
    category: str = ""
    box: str = ""
    response: str = ""
    tests: str = ""
    time_limit: str = ""
    memory_limit: str = ""
    frames: str = ""
    times: str = ""
    id: str = ""

    def conflicts(self) -> Iterator[str]:
        if not self.answer and not self.box and not self.tests:
            yield "answer is missing: name the column of the gold, or that of the gold box as box"
        if self.tests and (self.answer or self.box or self.choices):
            yield "tests say what a right program is: leave out answer, box and choices"
        if (self.time_limit or self.memory_limit) and not self.tests:
            yield "time_limit and memory_limit are of programs: name the column of their tests too"


class GenericSet(ConfigSection):
    """A mapping: where a table is, and what its columns are to us."""

    path: str
    source: str
    columns: Columns
    revision: str = ""
    files: list[str] = Field(default=[])
    image_folder: str = ""
    encoding: str = ""
    fps: float | None = Field(default=None, gt=0)
    answer_form: AnswerForm = "plain"
    answer_type: Literal["choice", "integer", "float", "expression", "text", "list"] | None = None
    test_only: bool = False
    box_format: Literal["xyxy", "xywh"] = "xyxy"
    box_unit: Literal["pixels", "thousandths", "fractions"] = "pixels"

    def conflicts(self) -> Iterator[str]:
        times = [name for name, given in (("columns.times", self.columns.times), ("fps", self.fps)) if given]
        if self.columns.frames and len(times) != 1:
            yield "columns.frames needs the times of the frames: either columns.times or fps"
        if times and not self.columns.frames:
            yield f"{times[0]} is of the frames of videos, and columns.frames is missing"

    def text(self) -> str:
        """Return the mapping as the YAML file that says the same."""
        tree = self.model_dump(exclude_defaults=True)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)


def read_generic(path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
    """Yield the rows of the table that the YAML file `path` describes."""
    mapping = load_mapping(path)
    return read_mapped(data_path(path, mapping), mapping, named=path)


def read_mapped(data: Path, mapping: GenericSet, *, named: Path) -> Iterator[UsableRow | DroppedRow]:
    """Yield the rows of the table at `data`; messages about the mapping begin with `named`."""
    tables = tables_of(data, mapping)
    store = ImageStore(image_root(data, tables, mapping))
    columns = [name for value in mapping.columns.model_dump().values() for name in _listed(value)]
    return convert_rows(
        _checked(read_tables(tables, encoding=mapping.encoding), columns, named),
        lambda row: _convert(row, mapping, store),
    )


def load_mapping(path: Path) -> GenericSet:
    """Read the mapping in a YAML file. Raises UserError naming the key that is wrong."""
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path}: a generic source is described by a YAML file; docs/data.md shows an example")
    return parse_tree(GenericSet, read_tree(path), str(path))


def data_path(path: Path, mapping: GenericSet) -> Path:
    """Return the location of the table that the YAML file `path` describes. Raises UserError if nothing is there."""
    if mapping.revision:
        return locate(mapping.path, mapping.revision)[0]
    data = path.parent / mapping.path  # an absolute path stays as it is
    if not data.exists():
        raise UserError(
            f"{path}: path {mapping.path!r} does not exist (it is read relative to this file); "
            "if it is a hub id, pin it with revision: COMMIT"
        )
    return data


def tables_of(data: Path, mapping: GenericSet) -> list[Path]:
    """Return the tables that the mapping names. Raises UserError if there are none."""
    if not mapping.files or data.is_file():
        return find_tables(data, _PATTERNS)
    tables = sorted({file for pattern in mapping.files for file in data.glob(pattern) if file.is_file()})
    if not tables:
        raise UserError(f"{data}: no file fits files: {mapping.files}")
    return tables


def image_root(data: Path, tables: list[Path], mapping: GenericSet) -> Path:
    """Return the folder that paths of images begin in."""
    if not mapping.image_folder:
        return tables[0].parent
    return (data.parent if data.is_file() else data) / mapping.image_folder


def _listed(columns: str | list[str]) -> list[str]:
    return [name for name in ([columns] if isinstance(columns, str) else columns) if name]


def _checked(rows: Iterator[tuple[str, Any]], columns: list[str], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows; a column that all of the first rows lack is a mistake in the mapping, not in a row.

    Nested columns may be null: of these the first part must be there.
    """
    first = [*islice(rows, SAMPLE_ROWS)]
    present = {name for _, row in first if isinstance(row, dict) for name in row}
    for name in columns if present else ():
        if name not in present and name.partition(".")[0] not in present:
            raise UserError(f"{path}: columns names {name!r}, but the table has {sorted(present)}")
    yield from first
    yield from rows


def _limit_columns(columns: Columns) -> list[tuple[str, str]]:
    return [("seconds", columns.time_limit), ("memory", columns.memory_limit)]


def _convert(row: Fields, mapping: GenericSet, store: ImageStore) -> Converted:
    columns = mapping.columns
    question = text_of({columns.question: question_of(row, columns.question)}, columns.question)
    meta: dict[str, Any] = {"test_only": True} if mapping.test_only else {}
    if system := system_text(row, columns.question):
        meta["system"] = system
    if columns.hint and not is_missing(hint := cell(row, columns.hint)):
        question = f"Hint: {hint}\n{question}"
    if columns.box:
        raw_boxes = read_raw_boxes(unwritten(cell(row, columns.box)), mapping.box_format)
        meta |= {"raw_boxes": raw_boxes, "box_unit": mapping.box_unit}
    if columns.response:
        meta["response"] = text_of({columns.response: answer_of(row, columns.response)}, columns.response)
    if columns.tests:
        limits = {name: cell(row, column) if column else None for name, column in _limit_columns(columns)}
        tests = tests_in(cell(row, columns.tests), **limits)
        answer, meta["tests"] = tests.gold, tests.packed()
    else:
        boxes = meta["raw_boxes"] if not columns.answer else []
        answer = answer_of(row, columns.answer) if columns.answer else json.dumps(boxes if boxes[1:] else boxes[0])
    golds, choices = _golds_and_choices(row, mapping, answer, question)
    gold = golds[0]
    if golds[1:]:
        meta["alternatives"] = [*golds[1:]]
    kind: AnswerType = "code" if columns.tests else mapping.answer_type or infer_answer_type(gold)
    if kind == "list" and choices and columns.answer and not mapping.answer_type:
        kind = "choice"  # several letters: AC is A, C, and "A or C" is not
    if columns.choices and choices and not _lists(question, choices):
        question = with_choices(question, choices)
    images = images_of(row, _listed(columns.images), store)
    question, images = place_images(question, images)
    if columns.frames:
        frames, times = video_of(row, columns.frames, columns.times, fps=mapping.fps, store=store)
        before = question.partition(VIDEO_MARKER)[0].count(IMAGE_MARKER) if VIDEO_MARKER in question else len(images)
        if frames:
            images, meta["videos"] = [*images[:before], *frames, *images[before:]], [times]
    if columns.box and len(images) != 1:
        raise RowError("bad_box", f"a row with a box must have one image, not {len(images)}")
    identity = (
        id_of({columns.id: cell(row, columns.id)}, columns.id)
        if columns.id
        else digest_row(
            images,
            question,
            gold,
            *(str(meta[key]) for key in ("response", "videos", "tests", "system") if key in meta),
        )
    )
    problem = Problem(
        id=f"{mapping.source}-{identity}",
        question=question,
        images=(),
        answer=gold,
        answer_type=kind,
        choices=choices,
        source=mapping.source,
        category=str(cell(row, columns.category) or "") if columns.category else "",
        difficulty=pass_rate_of(cell(row, columns.difficulty)) if columns.difficulty else -1.0,
        meta=meta,
    )
    return problem, images


def _golds_and_choices(
    row: Fields, mapping: GenericSet, answer: Any, question: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the gold with its alternatives, and the options of the row, or of the question where it lists them.

    Raises RowError if there are options and the gold is none of them.
    """
    columns = mapping.columns
    if columns.tests or not columns.answer:
        return (gold_of(answer),), options_of(row, _listed(columns.choices)).texts
    options = options_of(row, _listed(columns.choices))
    if mapping.answer_type not in (None, "choice"):  # the user says that the gold is no letter
        return golds_in(answer, mapping.answer_form, RowOptions()), options.texts
    golds = golds_in(answer, mapping.answer_form, options)
    if options.texts:
        return golds, options.texts
    listed = RowOptions(parse_choices(question))
    if not listed.texts:
        return golds, ()
    if infer_answer_type(golds[0]) == "choice":
        return golds_in(answer, mapping.answer_form, listed), listed.texts
    try:  # the text of a listed option, or its letter and text
        return golds_in(answer, mapping.answer_form, listed), listed.texts
    except RowError:
        return golds, ()


def _lists(question: str, choices: tuple[str, ...]) -> bool:
    """Say whether a question lists these options; their own texts may begin with the letters."""
    listed = parse_choices(question)
    return bool(listed) and listed in (tuple(map(str.strip, choices)), parse_choices("\n".join(choices)))


def digest_row(images: Sequence[ImageRef], *texts: str) -> str:
    """Name a row without an id by a digest of its texts and its images."""
    names = [hashlib.sha256(ref.data).hexdigest() if isinstance(ref, ImageBytes) else ref.name for ref in images]
    text = "\0".join([*texts, *names])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]  # such a row is dropped later
