"""Read files that authors publish as plain rows: JSON by id, JSON lists, JSON Lines, CSV and our own Parquet.

Rows keep the authors' column names. A row of an object of rows has its key in "_key", a row of a list its place in
"_number". A value in the place of a row is in "_value". A benchmark's own layouts are in its file (saved_rows).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.errors import UserError

SavedRow = dict[str, Any]

_IDS = ("Question ID", "question_id", "id", "ID")
_WRAPPERS = ("data", "results", "rows", "annotations", "responses", "predictions", "outputs")


def read_rows(path: Path) -> list[tuple[str, SavedRow]]:
    """Return (where, row) of every row of a file. Raises UserError for what cannot be read."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; check the path")
    try:
        rows = list(_rows_of(path))
    except (OSError, ValueError, RecursionError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise UserError(f"{path}: holds no rows; give a file that has some")
    return [(f"{path.name} {where}", row) for where, row in rows]


def _rows_of(path: Path) -> Iterator[tuple[str, SavedRow]]:
    if path.suffix == ".parquet":
        present = pq.read_schema(path).names
        rows = pq.read_table(path, columns=[name for name in present if name != "image"]).to_pylist()
        yield from _numbered(rows)
    elif path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(2**27)  # a response may be long
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
        for number, row in enumerate(rows):
            if None in row:
                raise ValueError(f"row {number} has more cells than the header: quote answers that hold a separator")
        yield from ((where, _key_of(row) | row) for where, row in _numbered(rows))
    else:
        tree = _parsed(path.read_text(encoding="utf-8-sig"), as_lines=path.suffix == ".jsonl")
        if isinstance(tree, dict) and len(tree) == 1 and next(iter(tree)) in _WRAPPERS:
            tree = next(iter(tree.values()))
        yield from _keyed(tree) if isinstance(tree, dict) else _numbered(tree)


def _parsed(text: str, *, as_lines: bool) -> Any:
    """Parse as JSON or JSON Lines: as the suffix says, else as the other. Raises the first attempt's ValueError."""
    first, second = (_parsed_lines, json.loads) if as_lines else (json.loads, _parsed_lines)
    try:
        tree = first(text)
        if as_lines and len(tree) == 1 and isinstance(tree[0], list):  # a list of rows on one line
            return tree[0]
        return tree
    except ValueError as error:
        try:
            return second(text)
        except ValueError:
            raise error from None


def _parsed_lines(text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
    return rows


def _numbered(rows: Any) -> Iterator[tuple[str, SavedRow]]:
    if not isinstance(rows, list):
        raise ValueError(f"a table is a list or an object of rows, not {type(rows).__name__}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is not an object: {row!r:.60}")
        yield f"row {number}", {"_number": str(number), **row}


def _key_of(row: SavedRow) -> SavedRow:
    """Return the id of a table's row under "_key"; nothing if it has none."""
    return next(({"_key": row[name].strip()} for name in _IDS if row.get(name)), {})


def _keyed(tree: Mapping[str, Any]) -> Iterator[tuple[str, SavedRow]]:
    """Yield the rows of an object by id; a value may be the text alone, or several rows."""
    for key, value in tree.items():
        rows = value if isinstance(value, list) and value and all(isinstance(row, dict) for row in value) else [value]
        for row in rows:
            yield f"row {key!r}", {"_key": key, **(row if isinstance(row, dict) else {"_value": row})}
