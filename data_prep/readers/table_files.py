"""Find a data set's tables on disk and stream their rows: Parquet, Arrow, tars, and text (text_tables.py).

These readers are our own where `datasets` has one too: its readers end at the first row that they cannot parse, and
guess types (the text 073 becomes the number 73). Here a bad row is that row's alone, and every value stays as it is.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.data.images import DEFAULT_LIMITS
from vlm_rl.data_prep.readers.arrow_streams import arrow_batches
from vlm_rl.data_prep.readers.row_limit import (
    BoundedTarInfo,
    check_columns_unpack,
    max_row_bytes,
    text_columns,
    too_large,
    unpacked_bytes,
)
from vlm_rl.data_prep.readers.spreadsheets import xlsx_rows
from vlm_rl.data_prep.readers.text_tables import check_names, csv_rows, json_lines, json_or_error, json_rows
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError

FORMATS = {
    ".parquet": "Parquet",
    ".jsonl": "JSON lines",
    ".json": "JSON",
    ".csv": "CSV",
    ".tsv": "TSV",
    ".arrow": "datasets' save_to_disk",
    ".tar": "webdataset",
    ".xlsx": "Excel",
}
_TEXTS = (".jsonl", ".json", ".csv", ".tsv")  # which may be compressed with gzip
_PART = re.compile(r"-\d{5}-of-\d{5}")  # one of several files of a split
_BATCH_BYTES = 32 * 2**20
_LFS = b"version https://git-lfs"


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


def format_of(file: Path) -> str:
    """Return the ending that says how a table is read, "" for none: .jsonl also for a.ndjson and a.jsonl.gz."""
    name = file.name.lower().removesuffix(".gz")
    ending = "." + name.rpartition(".")[2] if "." in name else ""
    ending = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}.get(ending, ending)
    return ending if ending in FORMATS and (ending in _TEXTS or not file.name.lower().endswith(".gz")) else ""


def read_tables(
    tables: Iterable[Path], columns: Sequence[str] = (), *, encoding: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (file and row, fields) of every row; a row that is not JSON comes as a RowError.

    `encoding` is that of text, "" for UTF-8 or what a mark at its beginning says.

    Only `columns` of a Parquet file are read, and it must have them; () reads all columns.
    """
    for table in tables:
        _check_is_here(table)
        ending = format_of(table)
        if ending == ".parquet":
            yield from parquet_rows(table, columns)
        elif ending == ".jsonl":
            yield from json_lines(table, encoding)
        elif ending == ".arrow":
            yield from _arrow_rows(table)
        elif ending in (".csv", ".tsv"):
            yield from csv_rows(table, tabs=ending == ".tsv", encoding=encoding)
        elif ending == ".tar":
            yield from _tar_rows(table)
        elif ending == ".xlsx":
            yield from xlsx_rows(table)
        else:
            yield from json_rows(table, encoding)


def _check_is_here(table: Path) -> None:
    """Raise UserError for the small text that Git LFS leaves in place of a file that was not downloaded."""
    with table.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise UserError(f"{table}: it is a pointer of Git LFS and not the file: git lfs pull brings it")


def parquet_rows(table: Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a Parquet file as `read_tables` does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(table, pre_buffer=False) as file:
            check_names(table, file.schema_arrow.names)
            check_columns(table, file.schema_arrow.names, columns)
            check_columns_unpack(table, file.metadata)
            texts = text_columns(file.metadata)
            total = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
            per_row = total // max(file.metadata.num_rows, 1) + 1
            size = max(1, min(1024, _BATCH_BYTES // per_row))  # rows with images are read a few at a time
        number = 0
        with pq.ParquetFile(table, pre_buffer=False, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=size, columns=list(columns) or None, use_threads=False):
                for row in _bounded_rows(batch):
                    yield f"{table.name} row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{table}: cannot be read as Parquet: {error}") from None


def _bounded_rows(batch: Any) -> Iterator[Any]:
    """Yield the rows of an Arrow batch, so many at a time that memory stays flat; one too large as a RowError."""
    size = sum(map(unpacked_bytes, batch.columns))
    if size <= min(_BATCH_BYTES, max_row_bytes()):
        yield from _rows_of(batch)
    elif batch.num_rows == 1:
        yield from [too_large()] if size > max_row_bytes() else _rows_of(batch)
    else:
        half = batch.num_rows // 2
        yield from _bounded_rows(batch.slice(0, half))
        yield from _bounded_rows(batch.slice(half))


def _rows_of(batch: Any) -> list[Any]:
    """Return the rows of an Arrow batch; one that is not UTF-8 is a RowError."""
    narrow = [field for field in batch.schema if _has_narrow_floats(field.type)]
    try:
        rows = batch.to_pylist()
        for field in narrow:
            for row in rows:
                row[field.name] = _as_written(row[field.name], field.type)
        return rows
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [RowError("bad_text", f"is not UTF-8: {error}")]
        return [row for number in range(batch.num_rows) for row in _rows_of(batch.slice(number, 1))]


def _has_narrow_floats(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        return True
    return any(_has_narrow_floats(kind.field(index).type) for index in range(kind.num_fields))


def _as_written(value: Any, kind: Any) -> Any:
    """Return a value with the shortest number for each float16 or float32: 0.1, not 0.10000000149011612."""
    import numpy as np
    import pyarrow as pa

    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        single = np.float16 if pa.types.is_float16(kind) else np.float32
        return None if value is None else float(str(single(value)))
    if isinstance(value, list) and kind.num_fields == 1 and not pa.types.is_map(kind):
        return [_as_written(item, kind.field(0).type) for item in value]
    if isinstance(value, dict):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return {field.name: _as_written(value[field.name], field.type) for field in fields}
    return value


def check_columns(table: Path, present: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise UserError if a wanted column is not present."""
    missing = [name for name in wanted if name not in present]
    if missing:
        raise UserError(f"{table}: no column {missing[0]!r}; it has {list(present)}")


def _arrow_rows(table: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file of `Dataset.save_to_disk`: an Arrow stream, images as structs of bytes and path."""
    number = 0
    for batch in arrow_batches(table):
        check_names(table, batch.schema.names)
        for start in range(0, batch.num_rows, 16):
            for row in _bounded_rows(batch.slice(start, 16)):
                yield f"{table.name} row {number}", row
                number += 1


def _tar_rows(table: Path) -> Iterator[tuple[str, Any]]:
    """Yield the samples of a webdataset tar: its neighbouring members that share a name up to the first dot.

    A sample has "__key__", that name, and a value for each extension: JSON parsed, text as text, all else as bytes.
    """
    try:
        with tarfile.open(table, "r|*", tarinfo=BoundedTarInfo) as archive:
            sample: dict[str, Any] = {}
            size = 0
            fault: RowError | None = None
            for member in archive:
                folder, _, file = member.name.rpartition("/")
                stem, _, extension = file.partition(".")
                key = f"{folder}/{stem}".removeprefix("./").lstrip("/")
                if not member.isfile() or not stem or not extension:
                    continue
                if sample and sample["__key__"] != key:
                    yield f"{table.name} sample {sample['__key__']}", fault or sample
                    sample, fault, size = {}, None, 0
                sample["__key__"] = key
                size += member.size + 512
                value = too_large() if size > max_row_bytes() else _member_value(archive, member, extension.lower())
                if isinstance(value, RowError):
                    fault = fault or value
                if fault is not None:
                    continue  # what a sample holds that is dropped is not kept
                sample[extension.lower()] = value
            if sample:
                yield f"{table.name} sample {sample['__key__']}", fault or sample
    except (OSError, EOFError, tarfile.TarError) as error:
        raise UserError(f"{table}: cannot be read as a tar archive: {error}") from None


def _member_value(archive: tarfile.TarFile, member: tarfile.TarInfo, extension: str) -> Any:
    """Return the value of a member; a RowError if it is too large or not what its extension says."""
    if member.size > DEFAULT_LIMITS.max_bytes:
        return RowError("image_unreadable", f"{member.name!r} has {member.size} bytes")
    stream = archive.extractfile(member)
    assert stream is not None  # it is a plain file
    data, kind = stream.read(), extension.rpartition(".")[2]
    if kind not in ("json", "txt", "text", "cls"):
        return data
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return RowError("bad_text", f"{member.name!r} is not UTF-8: {error}")
    return json_or_error(text) if kind == "json" else text
