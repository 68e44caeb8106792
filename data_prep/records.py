"""The rows of a data set's own files: a usable one is a `Row`, any other a `Dropped` with its reason.

Pictures travel as references (vlm_rl.data_prep.image_files); nothing is decoded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vlm_rl.types import IMAGE_MARKER, Problem

if TYPE_CHECKING:
    from vlm_rl.data_prep.image_files import ImageRef
    from vlm_rl.data_prep.pictures import PictureRef


@dataclass(frozen=True, slots=True)
class Row:
    """A usable row; `problem.images` is still empty."""

    where: str  # file and row, for messages
    problem: Problem
    pictures: tuple[PictureRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is not used."""

    where: str
    reason: str  # a short key, counted
    detail: str  # one sentence
    known: bool = False  # a documented property of the data set: strict mode does not stop at it
    count: int = 1  # rows that this stands for: the copies of one problem are reported together


class RowError(Exception):
    """Raised while one row is converted; becomes a Dropped."""

    def __init__(self, reason: str, detail: str, *, known: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.known = known


Fields = Mapping[str, Any]
Converted = tuple[Problem, Sequence["ImageRef"]]


def convert_rows(rows: Iterable[tuple[str, Any]], convert: Callable[[Fields], Converted]) -> Iterator[Row | Dropped]:
    """Every row through `convert`; its RowErrors become Dropped."""
    for where, row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            if not isinstance(row, Mapping):
                raise RowError("bad_type", f"a row must be an object, not {row!r:.60}")
            problem, pictures = convert(row)
            yield Row(where, with_markers(problem, len(pictures)), tuple(pictures))
        except RowError as error:
            yield Dropped(where, error.reason, str(error), error.known)


def with_markers(problem: Problem, num_images: int) -> Problem:
    """The problem with one marker per picture, noted in its meta where they were added."""
    question = fit_markers(problem.question, num_images)
    if question == problem.question:
        return problem
    return replace(problem, question=question, meta={**problem.meta, "markers_prepended": True})


def fit_markers(question: str, num_images: int) -> str:
    """The question with one marker per image: kept if they agree, put in front if there are none.

    Raises RowError("marker_mismatch") otherwise: which picture belongs where would be a guess.
    """
    found = question.count(IMAGE_MARKER)
    if found == num_images:
        return question
    if found == 0:
        return f"{IMAGE_MARKER * num_images}\n{question}"
    raise RowError("marker_mismatch", f"the question has {found} {IMAGE_MARKER} markers for {num_images} images")


def text_of(row: Fields, *keys: str) -> str:
    """The text under the first of `keys` that the row has. Raises RowError if it is missing or no text."""
    key = next((key for key in keys if row.get(key) not in (None, "")), keys[0])
    value = row.get(key)
    if value is None or value == "":
        raise RowError(f"{key}_missing", f"{key} is missing")
    if not isinstance(value, str):
        raise RowError("bad_type", f"{key} must be text, not {type(value).__name__} {value!r:.40}")
    return value


def id_of(row: Fields, *keys: str) -> str:
    """The id under the first of `keys` that the row has, a number or a text. Raises RowError without one."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    raise RowError("id_missing", f"none of {', '.join(keys)} names the row")
