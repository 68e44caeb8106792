"""The files of a run: written whole or not at all, tables as Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.errors import UserError
from vlm_rl.untrusted.plain_files import check_plain


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file and move it to `path`. A failure leaves `path` as it was.

    An OSError of a full or a damaged disk names the file, which the system's does not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _temporary_beside(path) as work:
            write(work)
            with work.open("rb") as file:
                os.fsync(file.fileno())
            work.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def place_of(folder: Path) -> Path:
    """Return where a new folder is moved to: where a link leads, whose empty folder it replaces, or its own place."""
    return folder.resolve() if folder.is_symlink() else folder


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write a table at once: in the small pieces that Parquet comes in, a shared file system would be slow."""
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    path.write_bytes(buffer.getvalue())


@contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    work = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # a dot: readers look for step-*
    try:
        yield work
    finally:
        with suppress(OSError):  # a file system that refused the file may refuse this too
            work.unlink(missing_ok=True)


def for_readers(schema: pa.Schema, hints: Mapping[str, Any], *, gaps: Container[str] = ()) -> pa.Schema:
    """Return the schema of records that somebody sent, which says what is never missing.

    Args:
        schema: of what is written.
        hints: the types of the columns; those that may be None may be missing.
        gaps: further columns that may be.
    """
    return pa.schema(
        pa.field(field.name, field.type, nullable=type(None) in get_args(hints[field.name]) or field.name in gaps)
        for field in schema
    )


def read_records(
    path: Path, columns: Sequence[str] | None, schema: pa.Schema, *, later: Container[str], advice: str
) -> pa.Table:
    """Return the records of a file in the types of a schema, all of its columns or those named.

    Args:
        path: the file.
        columns: names of the schema, or None.
        schema: of the records; columns of other names are left out.
        later: its columns that an older file may lack; all others have a value in each row.
        advice: what to do about a file that cannot be read.

    Raises UserError for a damaged file, a column of a different type, and a gap in one that has none.
    """
    table = read_parquet(path, None if columns is None else stored_columns(path, columns, later=later), advice)
    return typed_records(table, path, columns, schema, later=later, advice=advice)


def first_records(
    path: Path, count: int, columns: Sequence[str], schema: pa.Schema, *, later: Container[str], advice: str
) -> pa.Table:
    """Return the first records of a file, `count` at most, as read_records does."""
    there = stored_columns(path, columns, later=later)
    try:
        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=count, columns=there), None)
            table = file.schema_arrow.empty_table() if batch is None else pa.Table.from_batches([batch])
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {str(error)[:120]}); {advice}") from None
    return typed_records(table, path, columns, schema, later=later, advice=advice)


def typed_records(
    table: pa.Table,
    path: Path,
    columns: Sequence[str] | None,
    schema: pa.Schema,
    *,
    later: Container[str],
    advice: str,
) -> pa.Table:
    """Return the table of a file in the types of a schema; see read_records."""
    wanted = schema.names if columns is None else columns
    typed = {}
    for name in (name for name in schema.names if name in wanted):
        places = table.schema.get_all_field_indices(name)
        if not places and name in later:
            continue
        if len(places) != 1:
            raise UserError(f"{path}: it has {len(places)} columns {name}; {advice}")
        column, kind = table.column(places[0]), schema.field(name).type
        try:
            typed[name] = column.cast(kind)
            typed[name].validate(full=True)  # texts may be no UTF-8
        except pa.ArrowException as error:
            raise UserError(
                f"{path}: column {name} holds {column.type}, not {kind} ({str(error)[:120]}); {advice}"
            ) from None
        if not schema.field(name).nullable and typed[name].null_count:
            raise UserError(f"{path}: column {name} has a row without a value; {advice}")
    return pa.table(typed)


def read_parquet(path: Path, columns: Sequence[str] | None, advice: str) -> pa.Table:
    """Return a table as it is. Raises UserError if it cannot be read."""
    check_plain(path)
    try:
        return pq.read_table(path, columns=None if columns is None else list(columns))
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: also of a name that is not UTF-8
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {str(error)[:120]}); {advice}") from None


def stored_columns(path: Path, columns: Sequence[str], *, later: Container[str]) -> list[str]:
    """Return these columns without those of `later` that an older file lacks. A damaged one is left to its reader."""
    check_plain(path)
    try:
        stored = pq.read_schema(path).names
    except (OSError, ValueError, pa.ArrowException):
        return list(columns)
    return [name for name in columns if name in stored or name not in later]


def table_of(rows: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """Return rows (dataclasses or mappings with every column) as a table of exactly this schema."""
    records = [row if isinstance(row, Mapping) else _as_dict(row) for row in rows]
    columns = {name: [record[name] for record in records] for name in schema.names}
    for field in schema:
        if field.type == pa.string():  # half a surrogate pair, which a program or a judge can print, has no UTF-8
            columns[field.name] = [_encodable(text) for text in columns[field.name]]
    return pa.table(columns, schema=schema)


def _encodable(text: str | None) -> str | None:
    return text and text.encode("utf-8", errors="replace").decode()


def _as_dict(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}  # asdict would copy every token
