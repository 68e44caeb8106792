"""The rows of a data set's own files: a usable one is a `Row`, any other a `Dropped` with its reason.

Pictures travel as the bytes of their files; nothing is decoded here, and no path leaves the data
set's folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.images import DEFAULT_LIMITS
from vlm_rl.types import IMAGE_MARKER, Problem


@dataclass(frozen=True, slots=True)
class Row:
    """A usable row."""

    where: str  # file and row, for messages
    problem: Problem


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is not used."""

    where: str
    reason: str  # a short key, counted
    detail: str  # one sentence
    known: bool = False  # a documented property of the data set: strict mode does not stop at it


class RowError(Exception):
    """Raised while one row is converted; becomes a Dropped."""

    def __init__(self, reason: str, detail: str, *, known: bool = False) -> None:
        super().__init__(detail)
        self.reason = reason
        self.known = known


Fields = Mapping[str, Any]


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


def read_inside(root: Path, name: str) -> bytes:
    """The bytes of a file that a row names. Raises RowError if it is missing, too large or outside `root`."""
    base = root.resolve()
    try:
        path = (base / name).resolve()
        if not path.is_relative_to(base):
            raise RowError("image_outside", f"the image path {name!r} leaves the data set's folder")
        if not path.is_file():
            raise RowError("image_missing", f"there is no image {name!r}")
        if path.stat().st_size > DEFAULT_LIMITS.max_bytes:
            raise RowError("image_unreadable", f"the image {name!r} is above {DEFAULT_LIMITS.max_bytes} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the name, a name too long, no permission
        raise RowError("image_missing", f"the image {name!r:.80} cannot be read: {error}") from None


def text_of(row: Fields, key: str) -> str:
    value = row.get(key)
    if value is None or value == "":
        raise RowError(f"{key}_missing", f"{key} is missing")
    if not isinstance(value, str):
        raise RowError("bad_type", f"{key} must be text, not {type(value).__name__} {value!r:.40}")
    return value


def _with_markers(problem: Problem) -> Problem:
    question = fit_markers(problem.question, len(problem.images))
    if question == problem.question:
        return problem
    return replace(problem, question=question, meta={**problem.meta, "markers_prepended": True})


def convert_rows(rows: Iterable[tuple[str, Any]], convert: Callable[[Fields], Problem]) -> Iterator[Row | Dropped]:
    for where, row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            if not isinstance(row, Mapping):
                raise RowError("bad_type", f"a row must be an object, not {row!r:.60}")
            yield Row(where, _with_markers(convert(row)))
        except RowError as error:
            yield Dropped(where, error.reason, str(error), error.known)


def parquet_rows(table: Path, columns: list[str]) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(table)
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise UserError(f"{table}: no column {missing[0]!r}; it has {file.schema_arrow.names}")
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                yield f"{table.name} row {number}", row
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{table}: cannot be read as Parquet: {error}") from None


def json_lines(table: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file with one JSON object per line."""
    for number, line in enumerate(_read_text(table).split("\n"), start=1):
        if line.strip():
            yield f"{table.name} line {number}", _json_or_error(line)


def json_rows(table: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON list, or of a JSON object of rows (their keys are added as "key")."""
    tree = _json_or_error(_read_text(table))
    if isinstance(tree, RowError):
        raise UserError(f"{table}: {tree}")
    name = f"{table.parent.name}/{table.name}"
    if isinstance(tree, dict):
        for key, row in tree.items():
            yield f"{name} row {key!r}", {**row, "key": key} if isinstance(row, dict) else row
    elif isinstance(tree, list):
        for number, row in enumerate(tree):
            yield f"{name} row {number}", row
    else:
        raise UserError(f"{table}: holds neither a list nor an object of rows")


def _read_text(table: Path) -> str:
    try:
        return table.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{table}: cannot be read as UTF-8 text: {error}") from None


def _json_or_error(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError("bad_json", f"is not JSON: {error}")


def one_file(path: Path, usual: str, pattern: str) -> Path:
    """`path` itself, or the usual file in that folder, or the only one that fits the pattern."""
    if path.is_file():
        return path
    if (path / usual).is_file():
        return path / usual
    found = sorted(path.glob(pattern))
    if len(found) == 1:
        return found[0]
    some = f"; there are {[item.name for item in found]}, name one of them" if found else ""
    raise UserError(f"{path}: no {usual} there{some}")
