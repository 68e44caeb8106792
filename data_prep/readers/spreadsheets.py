"""Stream the rows of an Excel workbook (.xlsx) by openpyxl: the first row names the columns."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError


def xlsx_rows(table: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and row, fields) of every row that holds something; a formula's value is the one that was saved.

    Raises UserError for a damaged workbook, and for one with several sheets of rows.
    """
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
            if repeated := [name for name in header if name and header.count(name) > 1]:
                raise UserError(f"{table}: two columns are called {repeated[0]!r}: rename one")
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
    """Return a date or time as text, a date without its midnight, and all else as it is."""
    if isinstance(value, datetime) and value.time() == time():
        value = value.date()
    return value.isoformat() if isinstance(value, date | time) else value
