"""The rows of a data set's own files, from the reader that yields them to the prepared set.

    a reader yields    UsableRow    or DroppedRow, with its reason
    a shard records    KeptRow      or DroppedRow

The images of a row travel as references; nothing is decoded here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

from vlm_rl.errors import UserError
from vlm_rl.types import IMAGE_MARKER, VIDEO_MARKER, Problem, marker_fault, split_at_markers


class StoredImage(Protocol):
    """A reference to an encoded image in the data set's files (vlm_rl.data_prep.readers.image_files)."""

    def read(self) -> bytes:
        """Return the encoded bytes. Raises RowError if they cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class BlankImage:
    """A white image of the smallest size, drawn by the preparation."""


@dataclass(frozen=True, slots=True)
class TypesetImage:
    """An image of a problem's text, drawn by the preparation."""

    text: str


DRAWN = frozenset(("blank_image", "typeset_image"))
"""Notes of a row whose only image the preparation drew: it says nothing that the text does not say."""

ImageReference = StoredImage | BlankImage | TypesetImage


@dataclass(frozen=True, slots=True)
class UsableRow:
    """A row that its reader could convert; `problem.images` is still empty."""

    where: str  # file and row, for messages
    problem: Problem
    images: tuple[ImageReference, ...] = ()


@dataclass(frozen=True, slots=True)
class DroppedRow:
    """A row that is left out."""

    where: str
    reason: str  # a short key, counted
    detail: str  # one sentence
    known: bool = False  # a documented property of the data set: strict mode does not stop at it
    count: int = 1  # rows that this record stands for: the copies of a problem are reported together


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The facts that later stages need about a row that is in its shard's file."""

    where: str
    id: str
    text_key: str  # digest of the normalised question
    answer: str
    test_only: bool
    sha256s: list[str]  # of the original images
    phashes: list[str]
    notes: list[str]  # what was changed or flagged
    resized: int  # images that were encoded again


class RowError(Exception):
    """Raised while a single row is converted; the row becomes a DroppedRow."""

    def __init__(self, reason: str, detail: str, *, known: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.known = known

    def dropped(self, where: str) -> DroppedRow:
        """Return the record of the row at `where` that raised this."""
        detail = str(self).encode("utf-8", "backslashreplace").decode()  # a lone surrogate could not be written
        return DroppedRow(where, self.reason, detail, self.known)


Fields = Mapping[str, Any]
Converted = tuple[Problem, Sequence[StoredImage]]


def convert_rows(
    rows: Iterable[tuple[str, Any]], convert: Callable[[Fields], Converted]
) -> Iterator[UsableRow | DroppedRow]:
    """Pass every (where, row) through `convert`; a row that it cannot convert comes out as a DroppedRow."""
    for where, row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            if not isinstance(row, Mapping):
                raise RowError("bad_type", f"a row must be an object, not {row!r:.60}")
            problem, images = convert(row)
            problem = with_markers(problem, len(images))
            _check_text(problem)
            converted = UsableRow(where, problem, tuple(images))
        except RowError as error:
            converted = error.dropped(where)
        except UserError:
            raise
        except Exception as error:  # a value that the reader does not expect; no row may end the preparation
            detail = f"the row cannot be read: {type(error).__name__}: {error}"
            converted = RowError("bad_value", f"{detail:.300}").dropped(where)
        yield converted


def _check_text(problem: Problem) -> None:
    """Raise RowError for text that cannot be stored: half of a surrogate pair, which JSON may hold."""
    texts = [problem.id, problem.question, problem.answer, *problem.choices, problem.source, problem.category]
    try:
        "".join([*texts, json.dumps(dict(problem.meta), ensure_ascii=False)]).encode()
    except UnicodeEncodeError as error:
        char = error.object[error.start]
        if "\udc80" <= char <= "\udcff":  # as `surrogateescape` reads a byte
            cure = "if its file has an encoding of its own, name it: --encoding cp1252, gbk ..."
            raise RowError(
                "bad_text", f"holds the byte 0x{ord(char) - 0xDC00:02x}, which is not UTF-8; {cure}"
            ) from None
        raise RowError("bad_text", f"holds {char!r}, half of a surrogate pair") from None


def with_markers(problem: Problem, num_images: int) -> Problem:
    """Return the problem with a marker for each image and video; its meta says so if they had to be added.

    `num_images` counts frames too.
    """
    question = fit_markers(problem.question, num_images, problem.videos)
    if question == problem.question:
        return problem
    return replace(problem, question=question, meta={**problem.meta, "markers_prepended": True})


def fit_markers(question: str, num_images: int, videos: Sequence[Sequence[float]] = ()) -> str:
    """Return the question with a marker for each image and video; if it has none, they are put in front.

    Raises RowError("marker_mismatch") if it has some but not as many: which image belongs where would be a guess.
    """
    fault = marker_fault(question, num_images, videos)
    if not fault:
        return question
    if not split_at_markers(question, videos)[1]:
        return f"{IMAGE_MARKER * (num_images - sum(map(len, videos)))}{VIDEO_MARKER * len(videos)}\n{question}"
    raise RowError("marker_mismatch", f"the row {fault}")


def text_of(row: Fields, *keys: str) -> str:
    """Return the text under the first of `keys` that the row has. Raises RowError if it is missing or not text."""
    key = next((key for key in keys if row.get(key) not in (None, "")), keys[0])
    value = row.get(key)
    if value is None or value == "":
        raise RowError(f"{key}_missing", f"{key} is missing")
    if not isinstance(value, str):
        raise RowError("bad_type", f"{key} must be text, not {type(value).__name__} {value!r:.40}")
    return value


def id_of(row: Fields, *keys: str) -> str:
    """Return the id under the first of `keys` that holds a whole number or a text. Raises RowError if none does."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas makes whole numbers with a gap among them floats
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    if held := next((f"{key} is {row[key]!r:.40}" for key in keys if row.get(key) not in (None, "")), ""):
        raise RowError("id_missing", f"{held}, and an id is a text or a whole number")
    raise RowError("id_missing", f"none of {', '.join(keys)} names the row")


def pass_rate_of(value: Any) -> float:
    """Return a pass rate in [0, 1], or -1 if `value` is not one (-1 itself, missing, text that is not a number)."""
    try:
        rate = float(Fraction(value.strip())) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        return -1.0
    return rate if 0 <= rate <= 1 else -1.0
