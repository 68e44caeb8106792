"""Stream the rows of an Excel workbook (.xlsx) by openpyxl: the first row names the columns.

openpyxl runs in a process with limits: texts and parts of a workbook unpack whole, and a few bytes may name a row far
away, with all the empty ones before it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from datetime import date, datetime, time
from itertools import islice
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.readers.text_tables import check_names
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError
from vlm_rl.sandbox.limited import FaultError, LimitedWorker, LimitError

_CPU_SECONDS, _MEMORY = 60.0, 2 << 30  # of 100 rows, and of the workbook before them
_ROWS = 100
_streams: dict[str, Iterator[tuple[str, Any]]] = {}  # in the process with limits


def xlsx_rows(table: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and row, fields) of every row that holds something; a formula's value is the one that was saved.

    Raises UserError for a damaged workbook, for one with several sheets of rows, and for one that takes too much.
    """
    worker = LimitedWorker(f"{__name__}.next_rows", cpu_seconds=_CPU_SECONDS, memory=_MEMORY)
    try:
        while True:
            try:
                rows = worker.call(str(table))
            except (LimitError, FaultError) as error:
                raise UserError(f"{table}: as an Excel workbook it {error}: save it as CSV in UTF-8") from None
            if isinstance(rows, str):
                raise UserError(rows)
            if not rows:
                return
            for where, row in rows:
                yield where, RowError(*row) if isinstance(row, list) else row
    finally:
        worker.close()


def next_rows(table: str) -> list[tuple[str, Any]] | str:
    """Return the next rows of a workbook, none at its end, or why none can be read.

    A row that is dropped is its reason and detail. Called in the process with limits.
    """
    stream = _streams.setdefault(table, _rows_of(Path(table)))
    try:
        rows = [*islice(stream, _ROWS)]
    except UserError as error:
        return str(error)
    return [(where, (row.reason, str(row)) if isinstance(row, RowError) else row) for where, row in rows]


def _rows_of(table: Path) -> Iterator[tuple[str, Any]]:
    import openpyxl
    from openpyxl.utils.exceptions import InvalidFileException

    try:
        book = openpyxl.load_workbook(table, read_only=True, data_only=True)
        try:
            filled = [sheet for sheet in book.worksheets if any(any(row) for row in _first_rows(sheet))]
            if len(filled) != 1:
                names = ", ".join(sheet.title for sheet in filled) or "none"
                raise UserError(f"{table}: one sheet must hold rows, not {names}: save the one that counts as a file")
            rows = filled[0].iter_rows(values_only=True)
            header = [str(name).strip() if name is not None else "" for name in next(rows)]
            check_names(table, header)
            for number, values in enumerate(rows, start=2):
                if any(value is not None for value in values):
                    yield f"{table.name} row {number}", _fields(header, values)
        finally:
            book.close()
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, zipfile.BadZipFile, InvalidFileException) as error:
        raise UserError(
            f"{table}: cannot be read as an Excel workbook ({error}): save it again, or as CSV in UTF-8"
        ) from None


def _first_rows(sheet: Any) -> Iterator[Any]:
    return sheet.iter_rows(min_row=1, max_row=2, values_only=True)


def _fields(header: list[str], values: tuple[Any, ...]) -> dict[str, Any] | RowError:
    given = [value.strip("\n") if isinstance(value, str) else value for value in values]
    if beyond := [value for value in given[len(header) :] if value is not None]:
        return RowError("bad_value", f"has {beyond[0]!r:.40} beyond the named columns")
    if unnamed := [value for name, value in zip(header, given, strict=False) if not name and value is not None]:
        return RowError("bad_value", f"has {unnamed[0]!r:.40} in a column without a name")
    return {name: _written(value) for name, value in zip(header, given, strict=False) if name}


def _written(value: Any) -> Any:
    """Return a date or time as text, a date without its midnight, and all else that JSON has as it is."""
    if isinstance(value, datetime) and value.time() == time():
        value = value.date()
    if isinstance(value, date | time):
        return value.isoformat()
    return value if isinstance(value, str | int | float | None) else str(value)
