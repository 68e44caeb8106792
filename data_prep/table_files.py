"""Find a data set's tables on disk and stream their rows: Parquet, JSON, JSON lines, datasets folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError

_PART = re.compile(r"-\d{5}-of-\d{5}")  # one of several files of a split
_BATCH_BYTES = 32 * 2**20


def find_tables(path: Path, patterns: Sequence[str]) -> list[Path]:
    """Return `path` itself if it is a file, else the files that the first fitting pattern (a glob) finds.

    Several files must be the parts of a single split. Raises UserError naming what was looked for.
    """
    if path.is_file():
        return [path]
    for pattern in patterns:
        files = sorted(item for item in path.glob(pattern) if item.is_file())
        if len({_PART.sub("", item.name) for item in files}) > 1:
            names = [item.relative_to(path).as_posix() for item in files[:8]]
            raise UserError(f"{path}: no {patterns[0]} there; there are {names}, name one of them")
        if files:
            return files
    raise UserError(f"{path}: no {patterns[0]} there, {_contents(path)}; docs/data.md shows where each file belongs")


def _contents(folder: Path) -> str:
    names = sorted(item.name + "/" * item.is_dir() for item in folder.iterdir())
    return f"only {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" if names else "the folder is empty"


def read_tables(tables: Iterable[Path], columns: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (file and row, fields) of every row; a row that is not JSON comes as a RowError.

    Only `columns` of a Parquet file are read, and it must have them; () reads all columns.
    """
    for table in tables:
        if table.suffix == ".parquet":
            yield from parquet_rows(table, columns)
        elif table.suffix == ".jsonl":
            yield from _json_lines(table)
        elif table.suffix == ".arrow":
            yield from _arrow_rows(table)
        else:
            yield from _json_rows(table)


def parquet_rows(table: Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a Parquet file as `read_tables` does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(table, pre_buffer=False) as file:
            check_columns(table, file.schema_arrow.names, columns)
            total = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
            per_row = total // max(file.metadata.num_rows, 1) + 1
            size = max(1, min(1024, _BATCH_BYTES // per_row))  # rows with images are read a few at a time
            number = 0
            for batch in file.iter_batches(batch_size=size, columns=list(columns) or None, use_threads=False):
                for row in _rows_of(batch):
                    yield f"{table.name} row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{table}: cannot be read as Parquet: {error}") from None


def _rows_of(batch: Any) -> list[Any]:
    """Return the rows of an Arrow batch; one that is not UTF-8 is a RowError."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [RowError("bad_text", f"is not UTF-8: {error}")]
        return [row for number in range(batch.num_rows) for row in _rows_of(batch.slice(number, 1))]


def check_columns(table: Path, present: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise UserError if a wanted column is not present."""
    missing = [name for name in wanted if name not in present]
    if missing:
        raise UserError(f"{table}: no column {missing[0]!r}; it has {list(present)}")


def _arrow_rows(table: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file of `Dataset.save_to_disk`: an Arrow stream, images as structs of bytes and path."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(table)) as source, pa.ipc.open_stream(source) as stream:
            number = 0
            for batch in stream:
                for start in range(0, batch.num_rows, 16):
                    for row in _rows_of(batch.slice(start, 16)):
                        yield f"{table.name} row {number}", row
                        number += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{table}: cannot be read as an Arrow stream: {error}") from None


def _json_lines(table: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file with a JSON object per line; only a broken line itself is lost."""
    try:
        with table.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{table.name} line {number}", _json_or_error(line)
    except (OSError, ValueError) as error:
        raise UserError(f"{table}: cannot be read as UTF-8 text: {error}") from None


def _json_rows(table: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a JSON list, or of a JSON object of rows (their keys are added as "key")."""
    try:
        tree = _json_or_error(table.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{table}: cannot be read as UTF-8 text: {error}") from None
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


def _json_or_error(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError("bad_json", f"is not JSON: {error}")
