r"""Read any table by a mapping of its columns, a YAML file that is named instead of the data.

# my_set.yaml;  vlm-rl prepare generic --source my_set.yaml --out data/my_set
path: raw/my_set              # Parquet, JSON lines, JSON, a datasets folder, a folder of one of them, or a hub id
revision: 0123abc...          # of a hub id: its commit
source: my_set                # the name that rows carry
columns:                      # ours: theirs
  question: prompt
  answer: gold                # may be left out where there is a box
  images: picture             # optional: a path, bytes, datasets' struct, or a list of them
  choices: options            # optional: a list of texts
  difficulty: pass_rate       # optional: a number in [0, 1]
  category: topic             # optional
  box: bbox                   # optional: the gold box of the row's only image, four numbers
  id: uid                     # optional: without it, a hash of question, answer and the named images
answer_type: expression       # optional: for all rows; without it each gold's form decides
test_only: false              # optional: mark as a benchmark
box_format: xyxy              # optional: or xywh; of x and y the smallest, then the largest, or the size
box_unit: pixels              # optional: pixels of the image as it is in the file, upright; or thousandths, fractions
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from vlm_rl.config import ConfigSection, parse_tree, read_tree
from vlm_rl.data.golds import infer_answer_type, parse_choices, with_choices
from vlm_rl.data_prep.gold_boxes import read_raw_box
from vlm_rl.data_prep.hub import locate
from vlm_rl.data_prep.image_files import ImageBytes, ImageRef, ImageStore, image_ref
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
from vlm_rl.data_prep.row_golds import gold_of, number_gold
from vlm_rl.data_prep.table_files import find_tables, read_tables
from vlm_rl.errors import UserError
from vlm_rl.types import AnswerType, Problem


class Columns(ConfigSection):
    """The table's name for each of our columns; "" where it has none."""

    question: str
    answer: str = ""
    images: str = ""
    choices: str = ""
    difficulty: str = ""
    category: str = ""
    box: str = ""
    id: str = ""

    @model_validator(mode="after")
    def _has_a_gold(self) -> Columns:
        if not self.answer and not self.box:
            raise ValueError("answer is missing: name the column of the gold, or that of the gold box as box")
        return self


class GenericSet(ConfigSection):
    """The contents of the YAML file."""

    path: str
    source: str
    columns: Columns
    revision: str = ""
    answer_type: Literal["choice", "integer", "float", "expression", "text", "list"] | None = None
    test_only: bool = False
    box_format: Literal["xyxy", "xywh"] = "xyxy"
    box_unit: Literal["pixels", "thousandths", "fractions"] = "pixels"


def read_generic(path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
    """Yield the rows of the table that the YAML file `path` describes."""
    mapping = load_mapping(path)
    patterns = ("*.parquet", "data/*.parquet", "*.jsonl", "*.arrow", "*.json")
    tables = find_tables(data_path(path, mapping), patterns)
    store = ImageStore(tables[0].parent)
    columns = [name for name in mapping.columns.model_dump().values() if name]
    return convert_rows(_checked(read_tables(tables), columns, path), lambda row: _convert(row, mapping, store))


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


def _checked(rows: Iterator[tuple[str, Any]], columns: list[str], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows; a column that the first row lacks is a mistake in the mapping, not in the row."""
    for number, (where, row) in enumerate(rows):
        if number == 0 and isinstance(row, dict):
            for name in columns:
                if name not in row:
                    raise UserError(f"{path}: columns names {name!r}, but the table has {sorted(row)}")
        yield where, row


def _convert(row: Fields, mapping: GenericSet, store: ImageStore) -> Converted:
    columns = mapping.columns
    question = text_of(row, columns.question)
    meta: dict[str, Any] = {"test_only": True} if mapping.test_only else {}
    if columns.box:
        meta |= {"raw_box": read_raw_box(row.get(columns.box), mapping.box_format), "box_unit": mapping.box_unit}
    answer = row.get(columns.answer) if columns.answer else json.dumps(meta["raw_box"])
    gold = gold_of(answer) if isinstance(answer, str) else number_gold(answer)
    listed = row.get(columns.choices) if columns.choices else None
    if listed is not None and not isinstance(listed, list):
        raise RowError("bad_type", f"{columns.choices} must be a list, not {listed!r:.60}")
    choices = tuple(str(choice) for choice in listed or ())
    kind: AnswerType = mapping.answer_type or infer_answer_type(gold)
    if choices:
        question = question if all(choice in question for choice in choices) else with_choices(question, choices)
    elif kind == "choice":
        choices = parse_choices(question)
    images = _image_refs(row.get(columns.images) if columns.images else None, store)
    if columns.box and len(images) != 1:
        raise RowError("bad_box", f"a row with a box must have one image, not {len(images)}")
    identity = id_of(row, columns.id) if columns.id else _digest(question, gold, images)
    problem = Problem(
        id=f"{mapping.source}-{identity}",
        question=question,
        images=(),
        answer=gold,
        answer_type=kind,
        choices=choices,
        source=mapping.source,
        category=str(row.get(columns.category) or "") if columns.category else "",
        difficulty=pass_rate_of(row.get(columns.difficulty)) if columns.difficulty else -1.0,
        meta=meta,
    )
    return problem, images


def _image_refs(value: Any, store: ImageStore) -> list[ImageRef]:
    if value in (None, "", []):
        return []
    return [image_ref(item, store) for item in (value if isinstance(value, list) else [value])]


def _digest(question: str, gold: str, images: list[ImageRef]) -> str:
    names = [hashlib.sha256(ref.data).hexdigest() if isinstance(ref, ImageBytes) else ref.name for ref in images]
    return hashlib.sha256("\0".join([question, gold, *names]).encode()).hexdigest()[:16]
