"""Guess the mapping of a user's table: which column holds the question, the answer, the images and the options.

Names decide, in the order below, among the columns whose values fit. Where two columns fit equally well, nothing is
guessed: the message lists the columns and names the option that decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vlm_rl.data.golds import LETTERS
from vlm_rl.data_prep.readers.cells import (
    ASSISTANT,
    USER,
    answer_of,
    cell,
    content_images,
    is_conversation,
    is_encoded,
    options_of,
    turn_of,
)
from vlm_rl.data_prep.readers.find_data import FoundData
from vlm_rl.data_prep.readers.generic import Columns, GenericSet
from vlm_rl.data_prep.readers.table_files import read_tables
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError
from vlm_rl.visible_text import replace_invisible

SAMPLE_ROWS = 100
Names = Sequence[Sequence[str]]
Fits = Callable[[list[Any]], bool]

# The best names first; names in a line are equally good. A name with a dot is a whole path, any other ends one.
QUESTIONS: Names = (
    ("extra_info.question", "extra_info.raw_problem"),
    ("question", "problem"),
    ("query", "instruction", "input"),
    ("prompt", "conversations", "conversation", "messages", "text", "txt"),
)
ANSWERS: Names = (
    ("reward_model.ground_truth",),
    ("answer", "gold", "gold_answer", "ground_truth", "final_answer", "correct_answer", "reference_answer"),
    ("label", "target", "solution", "response", "output", "completion", "cls", "answerkey"),
    ("conversations", "conversation", "messages"),
)
IMAGES: Names = (
    ("images", "image"),
    (
        "image_path",
        "image_paths",
        "image_file",
        "file_name",
        "img",
        "img_path",
        "picture",
        "pictures",
        "decoded_image",
    ),
    ("figure", "photo", "conversations", "conversation", "messages", "prompt"),
)
CHOICES: Names = (("choices", "options"), ("choices.text", "options.text"))
CATEGORIES: Names = (("category", "subject", "topic"), ("ability",))
PASS_RATES: Names = (("pass_rate",),)

_IMAGE_NAME = re.compile(r"(?i).*\.(png|jpe?g|webp|bmp|gif|tiff?)")
_NUMBERED = re.compile(r"(?i)(image|img|picture)[-_]?\d+")
_MEMBER = re.compile(r"(?:.*\.)?(png|jpe?g|webp)")  # an image of a webdataset's sample


@dataclass(frozen=True, slots=True)
class Sample:
    """The first rows of a table, and the values of its columns that are not empty; nested ones have dotted names."""

    rows: list[dict[str, Any]]
    columns: dict[str, list[Any]]


def guess(path: Path, data: FoundData, given: Mapping[str, Sequence[str]], *, named: str = "") -> GenericSet:
    """Return the mapping of the tables at `path`.

    Args:
        path: the user's folder or file.
        data: the tables there.
        given: columns that the user named, by ours: question, answer, images, choices, response.
        named: what the user called it, if that is not `path`: a hub id.

    Raises UserError listing the columns where one is missing, or where several fit.
    """
    sample = read_sample(data.tables)
    where = str(data.tables[0])
    if not sample.rows:
        raise UserError(f"{where}: none of its first {SAMPLE_ROWS} rows can be read")
    for ours, names in given.items():
        for name in names:
            if all(cell(row, name) is None for row in sample.rows):
                raise UserError(_message(where, sample, f"--{ours} {name}: no row has such a column"))
    question = [*given.get("question", ())] or [_decide("question", QUESTIONS, _is_question, sample, where)]
    answer = [*given.get("answer", ())] or [_decide("answer", ANSWERS, _is_answer, sample, where)]
    images = [*given.get("images", ())] or _images(sample, data.tables[0].parent, where)
    choices = [*given.get("choices", ())] or _choices(sample, where)
    category = _best(CATEGORIES, lambda values: all(isinstance(value, str) for value in values), sample)
    difficulty = _best(PASS_RATES, lambda values: all(isinstance(value, float | int) for value in values), sample)
    columns = Columns(
        question=question[0],
        answer=answer[0],
        images=images if len(images) > 1 else "".join(images),
        choices=choices if len(choices) > 1 else "".join(choices),
        category=category[0] if category else "",
        difficulty=difficulty[0] if difficulty else "",
        response=[*given.get("response", ()), ""][0],
    )
    return GenericSet(
        path=named or str(path),
        source=re.sub(r"[^\w.-]+", "_", Path(named).name if named else path.resolve().stem),
        columns=columns,
        files=_globs(path, data.tables) if path.is_dir() else [],
        image_folder=_image_folder(path, data.tables[0].parent, sample, images),
        answer_form=_answer_form(sample, answer[0], choices),
    )


def read_sample(tables: Sequence[Path]) -> Sample:
    """Read the first rows that can be read."""
    rows = [row for _, row in islice(read_tables(tables), SAMPLE_ROWS) if isinstance(row, dict)]
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in _leaves(row):
            columns.setdefault(name, [])
            if value not in (None, "", [], {}):
                columns[name].append(value)
    return Sample(rows, columns)


def _leaves(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and not _is_image(value) and prefix.count(".") < 3:
            yield from _leaves(value, f"{prefix}{name}.")
            if not prefix:
                yield name, value  # options may be an object of letters
        else:
            yield f"{prefix}{name}", value


# -- which column ----------------------------------------------------------------------------------


def _best(names: Names, fits: Fits, sample: Sample) -> list[str]:
    """Return the columns with the best name whose values fit, those that are nested least."""
    for equally_good in names:
        columns = [
            column
            for column, values in sample.columns.items()
            if values and (column.lower() in equally_good or _last(column) in equally_good) and fits(values)
        ]
        depth = min((column.count(".") for column in columns), default=0)
        if columns := [column for column in columns if column.count(".") == depth]:
            return columns
    return []


def _last(column: str) -> str:
    return column.rpartition(".")[2].lower()


def _decide(option: str, names: Names, fits: Fits, sample: Sample, where: str) -> str:
    """Return the only column that fits best, or the first of several with equal values."""
    columns = _best(names, fits, sample)
    if not columns:
        raise UserError(_message(where, sample, f"no column looks like the {option}; name it with --{option} COLUMN"))
    if any(sample.columns[column] != sample.columns[columns[0]] for column in columns):
        raise UserError(_several(option, columns, sample, where))
    return columns[0]


def _several(option: str, columns: Sequence[str], sample: Sample, where: str) -> str:
    named = " and ".join(map(repr, columns))
    return _message(where, sample, f"{named} both look like the {option}; choose with --{option} COLUMN")


def _is_question(values: list[Any]) -> bool:
    return all(isinstance(value, str) or _has_turn(value, USER) for value in values)


def _is_answer(values: list[Any]) -> bool:
    return all(isinstance(value, str | int | float) or _has_turn(value, ASSISTANT) for value in values)


def _has_turn(value: Any, roles: tuple[str, ...]) -> bool:
    """Say whether a value is a conversation in which `roles` speak; more than once is that row's fault."""
    if not is_conversation(value):
        return False
    try:
        turn_of(value, roles)
    except RowError as error:
        return error.reason == "several_turns"
    return True


def _choices(sample: Sample, where: str) -> list[str]:
    columns = _best(CHOICES, lambda values: all(map(_are_options, values)), sample)
    if len(columns) > 1:
        raise UserError(_several("choices", columns, sample, where))
    if not columns and {"A", "B"} <= {*sample.columns}:  # VLMEvalKit's tables have a column for each option
        columns = [letter for letter in LETTERS if sample.columns.get(letter)]
    return columns if len(columns) != 1 or sample.columns[columns[0]] else []


def _are_options(value: Any) -> bool:
    """Say whether a value has a form of options; a list written as text that is broken is that row's fault."""
    try:
        options_of({"options": value}, ["options"])
    except RowError:
        return isinstance(value, str) and value.lstrip().startswith("[")
    return True


# -- images ----------------------------------------------------------------------------------------


def _images(sample: Sample, folder: Path, where: str) -> list[str]:
    """Return the columns of the images: one, or several that are numbered; [] where there is none."""
    fitting = {name for name, values in sample.columns.items() if values and all(map(_is_image, values))}
    for pattern in (_NUMBERED, _MEMBER):
        numbered = sorted(fitting & {name for name in sample.columns if pattern.fullmatch(name)})
        if numbered and not fitting & {*IMAGES[0]}:
            return numbered
    columns = _best(IMAGES, lambda values: all(map(_is_image, values)), sample)
    inside = [name for name in columns if not _paths(sample.columns[name])]
    if len(columns) > 1 and len(inside) == 1:  # the image itself, beside a column with its path
        return inside
    columns = columns or sorted(fitting)  # a different name, but values that nothing else has
    if len(columns) > 1:
        raise UserError(_several("images", columns, sample, where))
    if not columns:  # file names without an ending
        columns = [name for name in IMAGES[0] if sample.columns.get(name) and _paths(sample.columns[name])]
    return columns


def _is_image(value: Any) -> bool:
    """Say whether a value is an image, its path, a list of them, or a conversation with images in it."""
    if is_conversation(value):
        try:
            return bool(content_images(turn_of(value, USER)))
        except RowError:
            return False
    if isinstance(value, list):
        return bool(value) and all(map(_is_image, value))
    if isinstance(value, Mapping):
        return bool(value) and {*value} <= {"bytes", "path"}
    return isinstance(value, bytes) or (
        isinstance(value, str) and (_IMAGE_NAME.fullmatch(value) is not None or is_encoded(value))
    )


def _paths(values: Sequence[Any]) -> list[str]:
    """Return the paths among the images of a column's first values."""
    items: list[Any] = []
    for value in values[:20]:
        if is_conversation(value):
            value = content_images(turn_of(value, USER)) if _is_image(value) else []
        items += value if isinstance(value, list) else [value]
    paths = [item.get("path") if isinstance(item, Mapping) and not item.get("bytes") else item for item in items]
    return [path for path in paths if isinstance(path, str) and not is_encoded(path)]


def _image_folder(path: Path, beside: Path, sample: Sample, columns: Sequence[str]) -> str:
    """Return the folder, relative to the data's, in which the rows' images are; "" for that of the table."""
    names = [name.removeprefix("file://") for column in columns for name in _paths(sample.columns.get(column, []))]
    folder = path if path.is_dir() else path.parent
    roots = [beside, *_folders(beside), folder, *_folders(folder)]
    counts = [sum(_is_file(root / name) for name in names) for root in roots]
    best = roots[counts.index(max(counts))]
    return "" if best == beside else best.relative_to(folder).as_posix()


def _folders(folder: Path) -> list[Path]:
    return [item for item in islice(sorted(folder.iterdir()), 1000) if item.is_dir()]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


# -- answers, files --------------------------------------------------------------------------------


def _answer_form(sample: Sample, column: str, choices: list[str]) -> Any:
    """Return the form of the answers: a value of GenericSet.answer_form."""
    answers: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
    for row in sample.rows:
        try:
            answer, (options, labels) = answer_of(row, column), options_of(row, choices)
        except RowError:
            continue
        if answer not in (None, ""):
            answers.append((str(answer), options, labels))
    if all(text in labels for text, _, labels in answers):  # or there is no answer
        return "plain"
    texts = [text for text, _, _ in answers]
    if all("</answer>" in text for text in texts):
        return "tag"
    if all("####" in text for text in texts):
        return "hashes"
    if all(r"\boxed" in text for text in texts) and any(
        not text.lstrip(" $").startswith(r"\boxed") for text in texts
    ):
        return "box"
    if not all(options for _, options, _ in answers):
        return "plain"
    if all(text.isdecimal() and int(text) < len(options) for text, options, _ in answers):
        same = sum(text in options for text, options, _ in answers)
        return "option_number" if not same else "option_text" if same == len(texts) else "plain"
    same = sum(text.strip() in map(str.strip, options) for text, options, _ in answers)
    return "option_text" if 2 * same > len(texts) else "plain"


def _globs(folder: Path, tables: Sequence[Path]) -> list[str]:
    """Return globs below `folder` that fit these tables and nothing else."""
    names = [table.relative_to(folder).as_posix() for table in tables]
    if len(names) == 1:
        return names
    suffix = tables[0].suffix
    for start in range(min(map(len, names)), -1, -1):
        glob = f"{names[0][:start]}*{suffix}"
        if sorted(folder.glob(glob)) == sorted(tables):
            return [glob]
    return names


# -- messages --------------------------------------------------------------------------------------


def _message(where: str, sample: Sample, said: str) -> str:
    """Return a message that ends with every column and a value of it."""
    width = max(map(len, sample.columns), default=0)
    lines = [f"  {name:{width}}  {describe_value(values)}" for name, values in sample.columns.items()]
    return "\n".join([f"{where}: {said}", "its columns, each with a value:", *lines])


def describe_value(values: Sequence[Any]) -> str:
    """Return a value of a column on one line that a terminal can show."""
    if not values:
        return "(empty)"
    value = values[0]
    if isinstance(value, bytes) or (isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes)):
        return "an image or other bytes"
    text = value if isinstance(value, str) else repr(value)
    text = replace_invisible(" ".join(text[:500].split()), lambda _: "?")
    return text if len(text) <= 70 else f"{text[:67]}..."
