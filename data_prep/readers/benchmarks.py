"""Read the benchmarks' tables and images, each in its authors' repository layout and in the hub's.

How a row becomes a problem is in the benchmark's own file (vlm_rl.evaluation.benchmarks). Where the images were not
downloaded, the rows come as annotations alone (meta "annotations_only"): answers to them can be scored, but no
model can be run on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.readers.image_files import ImageRef, ImageStore, by_number, image_ref
from vlm_rl.data_prep.readers.row_golds import gold_of
from vlm_rl.data_prep.readers.table_files import find_tables, read_tables
from vlm_rl.data_prep.records import Converted, DroppedRow, Fields, RowError, UsableRow, convert_rows
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, authors_gold
from vlm_rl.evaluation.benchmarks.raw_rows import UnusableRowError
from vlm_rl.types import IMAGE_MARKER


def read_benchmark(benchmark: Benchmark, path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
    """Yield the rows of a benchmark's file or folder. Raises UserError if it has no table."""
    patterns = [pattern.format(split=split) for pattern in benchmark.files.tables]
    if not benchmark.files.has_trials:
        tables = _split_tables(benchmark, path, split) or find_tables(path, patterns)
        _check_split(benchmark, path, tables[0], split)
        yield from convert_rows(
            _numbered(read_tables(tables)), partial(_convert, benchmark, _Images(tables[0], benchmark))
        )
        return
    for place, table in enumerate(_trial_tables(path, patterns), start=1):
        rows = (
            (where, part)
            for where, row in _numbered(read_tables([table]))
            for part in (benchmark.rows.saved_rows(row, table, place).values() if isinstance(row, dict) else [row])
        )
        yield from convert_rows(rows, partial(_convert, benchmark, _Images(table, benchmark)))


def _split_tables(benchmark: Benchmark, path: Path, split: str) -> list[Path]:
    """Return the files of a split that consists of several. Raises UserError if one is missing."""
    names = benchmark.files.split_files.get(split, ()) if path.is_dir() else ()
    tables = [path / name for name in names]
    if missing := [table.name for table in tables if not table.is_file()]:
        raise UserError(
            f"{path}: {', '.join(missing)} missing; the split {split} of {benchmark.name} consists of "
            f"{', '.join(names)}: download what is missing, or give --split a smaller one"
        )
    return tables


def _check_split(benchmark: Benchmark, path: Path, table: Path, split: str) -> None:
    """Raise UserError if a split was asked for, and the table that was found in the folder is named for another."""
    splits = benchmark.files.splits
    named = max((name for name in splits if name and table.name.startswith(name)), key=len, default=split)
    if path.is_dir() and named != split != splits[0] and not benchmark.files.split_files:
        raise UserError(
            f"{path}: no table of the split {split} there; {table.name} is of {named}: download that of {split}, or "
            f"give --split {named}"
        )


def _trial_tables(path: Path, patterns: list[str]) -> list[Path]:
    """Return the tables of all trials in the order of their numbers: trial2 before trial10."""
    if path.is_file():
        return [path]
    tables = next((tables for pattern in patterns if (tables := [*path.glob(pattern)])), [])
    if not tables:
        raise UserError(f"{path}: no {patterns[0]} there; give the folder that holds them all")
    return sorted(tables, key=lambda table: by_number(table.relative_to(path).as_posix()))


def _numbered(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the rows with their number in the published order, by which rows without an id are known."""
    for number, (where, row) in enumerate(rows):
        yield where, {"_number": number, **row} if isinstance(row, dict) else row


class _Images:
    """A benchmark's images: in the table, beside it, or not there at all."""

    def __init__(self, table: Path, benchmark: Benchmark) -> None:
        folder = table.parent / benchmark.files.image_folder
        self._store = ImageStore(folder if folder.is_dir() else table.parent)

    @cached_property
    def _are_absent(self) -> bool:
        return self._store.is_empty()

    def reference(self, value: Any) -> ImageRef | None:
        """Return a reference to what a row holds or names; None if that was not downloaded."""
        if value is None or (isinstance(value, str) and self._are_absent):
            return None
        return image_ref(value, self._store)


def _convert(benchmark: Benchmark, images: _Images, row: Fields) -> Converted:
    try:
        problem = benchmark.rows.read_row(row)
    except UnusableRowError as error:
        raise RowError(error.reason, str(error), known=error.known) from None
    if not problem.question:
        raise RowError("question_missing", "question is missing")
    if benchmark.rows.needs_options and not problem.choices:
        raise RowError("options", "the options cannot be told apart, or there are none")
    gold_of(authors_gold(problem))  # raises RowError if its braces do not close
    values = benchmark.rows.images(row)
    references = [reference for value in values if (reference := images.reference(value)) is not None]
    if len(references) == len(values):
        return problem, references
    name = next((value for value in values if isinstance(value, str)), None)
    meta = {**problem.meta, "annotations_only": True, **({"image": name} if name else {})}
    return replace(problem, question=problem.question.replace(IMAGE_MARKER, "[image]"), meta=meta), ()
