"""Guess the mapping of a user's table: which column holds the question, the answer, the images and the options.

Names decide, in the order below, among the columns whose values fit. Where two columns fit equally well, nothing is
guessed: the message lists the columns and names the option that decides.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.gold_boxes import read_raw_boxes
from vlm_rl.data_prep.readers.cells import (
    ASSISTANT,
    USER,
    cell,
    content_images,
    images_in,
    is_conversation,
    is_encoded,
    is_image_name,
    turn_of,
)
from vlm_rl.data_prep.readers.find_data import FoundData
from vlm_rl.data_prep.readers.generic import Columns, GenericSet
from vlm_rl.data_prep.readers.guess_options import NO_CHOICES, check_no_options, guess_answer_form, guess_choices
from vlm_rl.data_prep.readers.image_files import by_number, locate_file
from vlm_rl.data_prep.readers.row_golds import answers_in
from vlm_rl.data_prep.readers.sample import (
    SAMPLE_ROWS,
    Fits,
    Names,
    Sample,
    UndecidedColumnError,
    best,
    is_struct,
    message,
    read_sample,
    why_unreadable,
)
from vlm_rl.data_prep.readers.written_values import plain_text, unwritten
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError

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
    ("multiple_choice_answer",),  # VQA's, beside all that its annotators said
    ("gt", "gt_answer", "groundtruth"),
    ("label", "target", "solution", "response", "output", "completion", "cls", "answerkey"),
    ("answers", "labels"),
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
CATEGORIES: Names = (("category", "subject", "topic"), ("ability",))
PASS_RATES: Names = (("pass_rate",),)

_NUMBERED = re.compile(r"(?i)(image|img|picture)[-_]?\d+")
_MEMBER = re.compile(r"(?:.*\.)?(png|jpe?g|webp)")  # an image of a webdataset's sample


def guess(
    path: Path,
    data: FoundData,
    given: Mapping[str, Sequence[str]],
    *,
    named: str = "",
    answer_form: Any = "",
    encoding: str = "",
    out: str = "SET",
) -> GenericSet:
    """Return the mapping of the tables at `path`.

    Args:
        path: the user's folder or file.
        data: the tables there.
        given: columns that the user named, by ours: question, answer, images, choices (none: no options), response.
        named: what the user called it, if that is not `path`: a hub id.
        answer_form: the form of the answers where the user named it.
        encoding: that of text; "" for UTF-8.
        out: the prepared set, for the command in a message.

    Raises UserError listing the columns where some are missing, or where several fit, with the command that decides.
    """
    sample = read_sample(data.tables, encoding)
    where = str(data.tables[0])
    if not sample.rows:
        raise UserError(
            f"{where}: none of its first {SAMPLE_ROWS} rows can be read: {why_unreadable(data.tables, encoding)}"
        )
    given = dict(given)
    has_no_choices = given.get("choices") == [NO_CHOICES] and NO_CHOICES not in sample.columns
    if has_no_choices:
        del given["choices"]
    wrong = [
        f"--{ours} {name}"
        for ours, names in given.items()
        for name in names
        if all(cell(row, name) is None for row in sample.rows)
    ]
    if wrong:
        raise UserError(message(where, sample, f"{' '.join(wrong)}: no row has such a column"))
    undecided: list[UndecidedColumnError] = []

    def chosen(option: str, choose: Callable[[], list[str]]) -> list[str]:
        try:
            return [*given.get(option, ())] or choose()
        except UndecidedColumnError as error:
            undecided.append(error)
            return []

    question = chosen("question", lambda: [_decide("question", QUESTIONS, _is_question, sample)])
    answer = chosen("answer", lambda: [_decide_answer(sample)])
    images = chosen("images", lambda: _images(sample))
    if undecided:
        command = _command(named or str(path), given, undecided, out)
        said = "\n".join(error.said for error in undecided)
        raise UserError(f"{message(where, sample, said)}\nthe command: {command}")
    _check_no_boxes(answer[0], sample, where)
    choices = [*given.get("choices", ())] or ([] if has_no_choices else guess_choices(sample, where))
    if not choices and not has_no_choices:
        check_no_options(sample, question[0], answer[0], images, where)
    category = best(CATEGORIES, lambda values: all(isinstance(value, str) for value in values), sample)
    difficulty = best(PASS_RATES, lambda values: all(isinstance(value, float | int) for value in values), sample)
    columns = Columns(
        question=question[0],
        answer=answer[0],
        images=images if len(images) > 1 else "".join(images),
        choices=choices if len(choices) > 1 else "".join(choices),
        hint="hint" if all(isinstance(text, str) for text in sample.columns.get("hint", [0])) else "",
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
        encoding=encoding,
        answer_form=answer_form or guess_answer_form(sample, answer[0], choices, where),
    )


# -- which column ----------------------------------------------------------------------------------


def _command(
    named: str, given: Mapping[str, Sequence[str]], undecided: Sequence[UndecidedColumnError], out: str
) -> str:
    """Return the whole command, with a word in capitals, or the columns to choose from, where the user decides."""
    words = ["vlm-rl prepare", shlex.quote(named)]
    for option, names in given.items():
        words += [f"--{option}", shlex.join(names)]
    for error in undecided:
        words += [f"--{error.option}", "|".join(map(shlex.quote, error.columns)) or "COLUMN"]
    return " ".join([*words, "--out", shlex.quote(out)])


def _decide(option: str, names: Names, fits: Fits, sample: Sample) -> str:
    """Return the only column that fits best, or the first of several with equal values.

    Raises UndecidedColumnError if none fits, or several do.
    """
    columns = best(names, fits, sample)
    if not columns or any(sample.columns[column] != sample.columns[columns[0]] for column in columns):
        raise UndecidedColumnError(option, columns)
    return columns[0]


def _decide_answer(sample: Sample) -> str:
    """Return the column of the answers: a column of lists only where no other fits."""
    fits = _is_answer if best(ANSWERS, _is_answer, sample) else _is_answer_or_list
    return _decide("answer", ANSWERS, fits, sample)


def _check_no_boxes(column: str, sample: Sample, where: str) -> None:
    """Raise UserError if the answers are boxes: nothing in them tells corners from sizes."""
    values = [unwritten(value) for value in sample.columns.get(column, ())]
    if "box" in column.lower() and values and all(map(_is_box, values)):
        raise UserError(
            f"{where}: the answers in {column} are boxes, and whether they are corners or sizes, in pixels or in "
            f"fractions, only you know: write a mapping with columns: {{question: ..., images: ..., box: {column}}}, "
            "box_format and box_unit (docs/data.md, a mapping by hand)"
        )


def _is_box(value: Any) -> bool:
    """Tell whether a value is a box, or a list of boxes, in whatever format."""
    try:
        return bool(read_raw_boxes(value, "xywh"))
    except RowError:
        return False


def _is_question(values: list[Any]) -> bool:
    return _fit_or_speak(values, lambda value: isinstance(value, str), USER)


def _is_answer(values: list[Any]) -> bool:
    return _fit_or_speak(values, lambda value: plain_text(value) is not None, ASSISTANT)


def _is_answer_or_list(values: list[Any]) -> bool:
    lists = [[value] if (items := answers_in(value)) is None else items for value in values]
    return all(plain_text(item) is not None for items in lists for item in items)


def _fit_or_speak(values: list[Any], fits: Callable[[Any], bool], roles: tuple[str, ...]) -> bool:
    """Say whether all values fit or are conversations; where a conversation lacks a turn, that is its row's fault."""
    conversations = [value for value in values if is_conversation(value)]
    has_turns = not conversations or any(_has_turn(value, roles) for value in conversations)
    return has_turns and all(fits(value) or is_conversation(value) for value in values)


def _has_turn(value: Any, roles: tuple[str, ...]) -> bool:
    """Say whether a value is a conversation in which `roles` speak; more than once is that row's fault."""
    if not is_conversation(value):
        return False
    try:
        turn_of(value, roles)
    except RowError as error:
        return error.reason in ("several_turns", "other_turns")
    return True


# -- images ----------------------------------------------------------------------------------------


def _images(sample: Sample) -> list[str]:
    """Return the columns of the images: one, or several that are numbered; [] if there is none.

    Raises UndecidedColumnError if several fit.
    """
    fitting = {name for name, values in sample.columns.items() if values and _are_images(values)}
    for pattern in (_NUMBERED, _MEMBER):
        numbered = sorted(fitting & {name for name in sample.columns if pattern.fullmatch(name)}, key=by_number)
        if numbered and not fitting & {*IMAGES[0]}:
            return numbered
    columns = best(IMAGES, _are_images, sample)
    inside = [name for name in columns if not _paths(sample.columns[name])]
    if len(columns) > 1 and len(inside) == 1:  # the image itself, beside a column with its path
        return inside
    columns = columns or sorted(fitting)  # a different name, but values that nothing else has
    if len(columns) > 1:
        raise UndecidedColumnError("images", columns)
    if not columns:  # file names without an ending
        columns = [name for name in IMAGES[0] if sample.columns.get(name) and _paths(sample.columns[name])]
    return columns


def _are_images(values: list[Any]) -> bool:
    """Say whether these are images; of conversations some may have none."""
    conversations = [value for value in values if is_conversation(value)]
    others = [value for value in values if not is_conversation(value)]
    return all(map(_is_image, others)) and (not conversations or any(map(_is_image, conversations)))


def _is_image(value: Any) -> bool:
    """Say whether a value is an image, its path, a list of them, or a conversation with images in it."""
    if is_conversation(value):
        try:
            return bool(content_images(turn_of(value, USER)))
        except RowError:
            return False
    items = images_in(value)
    if isinstance(value, list) or len(items) > 1:
        return bool(items) and all(map(_is_image, items))
    value = items[0] if items else value
    if isinstance(value, Mapping):
        return is_struct(value)
    return isinstance(value, bytes) or (isinstance(value, str) and (is_image_name(value) or is_encoded(value)))


def _paths(values: Sequence[Any]) -> list[str]:
    """Return the paths among the images of a column's first values."""
    items: list[Any] = []
    for value in values[:20]:
        if is_conversation(value):
            value = content_images(turn_of(value, USER)) if _is_image(value) else []
        items += images_in(value)
    paths = [item.get("path") if isinstance(item, Mapping) and not item.get("bytes") else item for item in items]
    return [path for path in paths if isinstance(path, str) and not is_encoded(path)]


def _image_folder(path: Path, beside: Path, sample: Sample, columns: Sequence[str]) -> str:
    """Return the folder, relative to the data's, in which the rows' images are; "" for that of the table."""
    names = [name.removeprefix("file://") for column in columns for name in _paths(sample.columns.get(column, []))]
    folder = path if path.is_dir() else path.parent
    roots = [beside, *_folders(beside), folder, *_folders(folder)]
    counts = [sum(locate_file(root, name) is not None for name in names) for root in roots]
    best = roots[counts.index(max(counts))]
    return "" if best == beside else best.relative_to(folder).as_posix()


def _folders(folder: Path) -> list[Path]:
    return [item for item in islice(sorted(folder.iterdir()), 1000) if item.is_dir()]


# -- files -----------------------------------------------------------------------------------------


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
