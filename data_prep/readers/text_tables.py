"""Stream the rows of tables that are text: CSV, TSV, JSON and JSON lines, compressed with gzip or not.

The content decides over the ending: byte order marks, UTF-16, JSON lines in a .json file, an object around the rows.
Any other encoding is never guessed: bytes that are not UTF-8 cost their row alone, and the user names the encoding.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from vlm_rl.data.images import DEFAULT_LIMITS
from vlm_rl.data_prep.readers.image_files import IMAGE_SUFFIXES
from vlm_rl.data_prep.readers.row_limit import (
    BoundedLines,
    fields_bytes,
    load_json,
    max_row_bytes,
    read_whole,
    too_large,
)
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError

_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"} | {
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Names of a row's own columns: an object with one of them is a row, not an object of rows.
_ROW_KEYS = {"question", "problem", "query", "prompt", "instruction", "conversations", "messages"}
_END = "\udfff"  # which no text holds that was read from a file
_OPEN = "a quotation mark that is never closed"
_FAULTS = (OSError, EOFError, zlib.error, UnicodeError, LookupError)


def _open(table: Path, encoding: str) -> TextIO:
    """Open a table as text; bytes that its encoding lacks become halves of surrogate pairs, which drop their row."""
    with table.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    stream: Any = (gzip.open if packed else open)(table, "rb")
    try:
        name = encoding or _encoding(stream)
        stream.seek(0)
        return io.TextIOWrapper(stream, name, errors="surrogateescape", newline="")
    except BaseException:
        stream.close()
        raise


def _encoding(stream: BinaryIO) -> str:
    """Return the encoding that a mark or the zeros of UTF-16 show; UTF-8 for all others."""
    start = stream.read(4096)
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            return name
    zeros = [start[first::2].count(0) for first in (0, 1)]
    if max(zeros) > len(start) // 8 and min(zeros) == 0:
        return "utf-16-be" if zeros[0] else "utf-16-le"
    return "utf-8"


def _unreadable(table: Path, error: Exception) -> UserError:
    is_encoding = isinstance(error, UnicodeError | LookupError)
    cure = (
        "name its encoding, e.g. --encoding gbk" if is_encoding else "it may be damaged: download or write it again"
    )
    return UserError(f"{table}: cannot be read as text: {error}; {cure}")


def csv_rows(table: Path, *, tabs: bool, encoding: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a CSV or TSV file with a header, every value as text; only a broken row itself is lost."""
    csv.field_size_limit(2 * DEFAULT_LIMITS.max_bytes)  # an image as base64 takes a third more than its bytes
    try:
        with _open(table, encoding) as stream:
            bounded = BoundedLines(stream)
            first = bounded.next_line()
            if isinstance(first, RowError):
                raise UserError(f"{table}: its header {first}")
            delimiter = "\t" if tabs else max(",;\t", key=first.count)  # the first of equals
            lines = _CsvLines(first, bounded, delimiter)
            reader = csv.reader(lines, delimiter=delimiter)
            try:
                header = [name.strip() for name in next(reader)]
            except RowError as error:
                raise UserError(f"{table}: the header: {error}") from None
            if header == [_END]:
                return
            if header[-1:] and header[-1].endswith(_END):
                raise UserError(f"{table}: its header has {_OPEN}: correct it")
            if any("\udc80" <= char <= "\udcff" for char in "".join(header)):
                raise UserError(f"{table}: its header is not UTF-8; name its encoding, e.g. --encoding cp1252 or gbk")
            check_names(table, header)
            while True:
                where = f"{table.name} line {lines.number + 1}"
                lines.begin_row()
                try:
                    fields = next(reader)
                except StopIteration:  # _END was in a row that could not be read
                    return
                except RowError as error:
                    yield where, error
                    continue
                except csv.Error as error:
                    yield where, RowError("bad_csv", f"cannot be read: {error}")
                    continue
                if fields == [_END]:
                    return
                if fields[-1:] and fields[-1].endswith(_END):
                    yield where, RowError("bad_csv", f"has {_OPEN}")
                    lines.go_back()
                    reader = csv.reader(lines, delimiter=delimiter)
                elif len(fields) == len(header):
                    yield where, dict(zip(header, fields, strict=True))
                elif fields:
                    yield where, RowError("bad_csv", f"has {len(fields)} fields; the header has {len(header)}")
    except (*_FAULTS, csv.Error) as error:
        raise _unreadable(table, error) from None


def check_names(table: Path, names: Sequence[str]) -> None:
    """Raise UserError for a table with two columns of one name, of which a row could hold only one."""
    if repeated := next((name for name, count in Counter(names).items() if name and count > 1), ""):
        raise UserError(f"{table}: two columns are called {repeated!r}: rename one")


class _CsvLines:
    """Lines for a CSV reader. A row that is too large raises RowError, and reading continues after it.

    The last line is _END. It is a row of its own, or ends a field whose quotation mark is never closed.

    Attribute `number`: how many lines came.
    """

    def __init__(self, first: str, rest: BoundedLines, delimiter: str) -> None:
        self._waiting, self._rest, self._delimiter = deque([first]), rest, delimiter
        self.number = 0
        self._is_over = False
        self.begin_row()

    def begin_row(self) -> None:
        """Count the lines that come from now on as those of another row."""
        self._row: list[str] = []
        self._held = 0  # bytes of its fields
        self._quotes = 0

    def go_back(self) -> None:
        """Let all lines of the row but its first come again."""
        self.number -= len(self._row) - 1
        self._waiting.extend(self._row[1:])
        self._is_over = False

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._next()
        if isinstance(line, RowError):
            raise line
        if not line:
            if self._is_over:
                raise StopIteration
            self._is_over = True
            return _END
        self._row.append(line)
        self._held += fields_bytes(line, self._delimiter)
        self._quotes += line.count('"')
        if self._held > max_row_bytes():
            while self._quotes % 2 and (line := self._next()) != "":  # between quotes the row continues
                self._quotes += 0 if isinstance(line, RowError) else line.count('"')
            raise too_large("with its fields it ")
        return line

    def _next(self) -> str | RowError:
        line = self._waiting.popleft() if self._waiting else self._rest.next_line()
        self.number += line != ""
        return line


def json_lines(table: Path, encoding: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file with a JSON object per line; only a broken line itself is lost.

    A file that begins with a list is read as JSON.
    """
    try:
        with _open(table, encoding) as stream:
            lines = (line for line in BoundedLines(stream) if isinstance(line, RowError) or line.strip())
            first = str(next(lines, ""))
        if first.lstrip("\ufeff \t").startswith("["):
            yield from json_rows(table, encoding)
            return
        yield from _line_by_line(table, encoding)
    except _FAULTS as error:
        raise _unreadable(table, error) from None


def _line_by_line(table: Path, encoding: str) -> Iterator[tuple[str, Any]]:
    with _open(table, encoding) as stream:
        for number, line in enumerate(BoundedLines(stream), start=1):
            if isinstance(line, RowError):
                yield f"{table.name} line {number}", line
            elif line.strip():
                yield f"{table.name} line {number}", json_or_error(line)


def json_rows(table: Path, encoding: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a JSON file.

    It holds a list of rows, an object of rows (their keys are added as "key"), an object around a list of rows or
    around columns, a single row, or JSON lines. Raises UserError for anything else.
    """
    try:
        with _open(table, encoding) as stream:
            text = read_whole(table, stream)
    except _FAULTS as error:
        raise _unreadable(table, error) from None
    tree = json_or_error(text, is_file=True)
    if isinstance(tree, RowError):
        if not _has_json_lines(table, encoding):
            raise UserError(f"{table}: {tree}; a table in JSON is a list of rows, or an object on each line")
        del text
        yield from _line_by_line(table, encoding)
        return
    name = f"{table.parent.name}/{table.name}"
    if isinstance(tree, dict) and {*tree} & _ROW_KEYS and not _is_columns(tree):
        yield name, _with_image_beside(tree, table)
        return
    rows = _unwrapped(tree, table)
    if isinstance(rows, dict):
        for key, row in rows.items():
            yield f"{name} row {key!r}", {**row, "key": key} if isinstance(row, dict) else row
    else:
        for number, row in enumerate(rows):
            yield f"{name} row {number}", row


def _has_json_lines(table: Path, encoding: str) -> bool:
    """Tell whether a file has an object on each line. Where its first two are none, one broken object spans them."""
    with _open(table, encoding) as stream:
        filled = (line for line in BoundedLines(stream) if isinstance(line, RowError) or line.strip())
        first = [*islice(filled, 2)]
    objects = [line for line in first if isinstance(line, str) and line.lstrip().startswith("{")]
    return len(objects) == 2 and not all(isinstance(json_or_error(line), RowError) for line in objects)


def _is_columns(tree: Mapping[str, Any]) -> bool:
    """Say whether an object is a table by columns: lists of one length, of texts and numbers."""
    values = [*tree.values()]
    if len(values) < 2 or not all(isinstance(value, list) for value in values):
        return False
    return len({len(value) for value in values}) == 1 and not any(
        isinstance(v, dict) for value in values for v in value
    )


def _unwrapped(tree: Any, table: Path) -> list[Any] | dict[str, Any]:
    """Return the list or object of rows in a JSON tree. Raises UserError if there is none, or several."""
    if isinstance(tree, list):
        return tree
    if not isinstance(tree, dict):
        raise UserError(f"{table}: holds neither a list nor an object of rows, but {tree!r:.40}")
    columns, data = tree.get("columns"), tree.get("data")
    if isinstance(columns, list) and isinstance(data, list) and all(isinstance(row, list) for row in data):
        return [dict(zip(columns, row, strict=False)) for row in data]
    if _is_columns(tree):
        return [dict(zip(tree, values, strict=True)) for values in zip(*tree.values(), strict=True)]
    lists = [key for key, value in tree.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(lists) > 1:
        raise UserError(
            f"{table}: has several lists of rows: {', '.join(lists)}; put the one to use into its own file"
        )
    if lists:
        rows = tree[lists[0]]
        inner = all(isinstance(row, dict) and isinstance(row.get("row"), dict) for row in rows)  # the hub's viewer
        return [row["row"] for row in rows] if inner else rows
    return tree


def _with_image_beside(row: dict[str, Any], table: Path) -> dict[str, Any]:
    """Return a row that has a file to itself, with the image of the same name where it names none."""
    if {"image", "images", "image_path"} & {*row}:
        return row
    stem = table.name.partition(".")[0]
    names = [f"{stem}{suffix}" for suffix in IMAGE_SUFFIXES if (table.parent / f"{stem}{suffix}").is_file()]
    return {**row, "image": names[0]} if len(names) == 1 else row


def json_or_error(text: str, *, is_file: bool = False) -> Any:
    """Return the value of a JSON text; a RowError if it is not JSON, or more than a row (or a file) may hold."""
    try:
        return load_json(text.removeprefix("\ufeff"), is_file=is_file)
    except RowError as error:
        return error
    except (ValueError, RecursionError) as error:
        return RowError("bad_json", f"is not JSON: {error}")
