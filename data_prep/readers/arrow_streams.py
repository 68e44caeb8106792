"""Read the batches of an Arrow stream that a stranger wrote: what it declares is checked before anything is used.

pyarrow takes the lengths and offsets of a stream as they are, and unpacks the body of a compressed batch whole, to
sizes that the body itself names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_rl.errors import UserError

# Places of fields in the tables of Message.fbs, in the order in which they are declared there.
_HEADER, _DICTIONARY_DATA, _COMPRESSION = 2, 1, 3


def arrow_batches(table: Path) -> Iterator[Any]:
    """Yield the batches of a file of `Dataset.save_to_disk`, mapped into memory.

    Raises UserError for bodies that are compressed, columns whose values are stored once and used many times, and
    offsets that lead out of a body; `datasets` writes none of them.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(table)) as source:
            for message in pa.ipc.MessageReader.open_stream(source):
                if _is_compressed(message):
                    raise UserError(
                        f"{table}: its batches are compressed, and would be unpacked whole: write it again without "
                        "compression, as save_to_disk does, or as Parquet"
                    )
            source.seek(0)
            with pa.ipc.open_stream(source) as stream:
                for field in stream.schema:
                    if _may_repeat(field.type):
                        raise UserError(
                            f"{table}: column {field.name!r} has type {field.type}, in which a few bytes can stand "
                            "for very many values: write it again as plain values, or as Parquet"
                        )
                for batch in stream:
                    for column in batch.columns:
                        _check_offsets(column)
                    yield batch
    except (pa.ArrowException, OSError, struct.error) as error:
        raise UserError(f"{table}: cannot be read as an Arrow stream: {error}") from None


def _is_compressed(message: Any) -> bool:
    """Tell whether the body of a message is compressed, by its metadata, whose offsets pyarrow has checked."""
    if message.type not in ("record batch", "dictionary"):
        return False
    data = memoryview(message.metadata)
    batch = _follow(data, _place(data, _follow(data, 0), _HEADER))
    if message.type == "dictionary":
        batch = _follow(data, _place(data, batch, _DICTIONARY_DATA))
    return _place(data, batch, _COMPRESSION) != batch


def _follow(data: memoryview, position: int) -> int:
    """Return the position that an offset of a flatbuffer leads to."""
    return position + struct.unpack_from("<I", data, position)[0]


def _place(data: memoryview, table: int, number: int) -> int:
    """Return the position of a field of a flatbuffer's table; if the table lacks the field, the table's own."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, fields)
    at = 4 + 2 * number
    return table + (struct.unpack_from("<H", data, fields + at)[0] if at < size else 0)


def _check_offsets(column: Any) -> None:
    """Raise ArrowInvalid if an array leads out of its buffers; a text that is not UTF-8 costs its row alone."""
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        column.view(_as_bytes(column.type)).validate(full=True)


def _may_repeat(kind: Any) -> bool:
    """Tell whether arrays of a type, or of one inside, may use the same value many times."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _may_repeat(kind.storage_type)
    tests = (
        pa.types.is_dictionary,
        pa.types.is_run_end_encoded,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
        pa.types.is_string_view,
        pa.types.is_binary_view,
        pa.types.is_union,
    )
    if any(test(kind) for test in tests):
        return True
    return any(_may_repeat(kind.field(number).type) for number in range(kind.num_fields))


def _as_bytes(kind: Any) -> Any:
    """Return a type with bytes in the place of its texts."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _as_bytes(kind.storage_type)
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_map(kind) or not kind.num_fields:
        return kind
    fields = [field.with_type(_as_bytes(field.type)) for field in map(kind.field, range(kind.num_fields))]
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    return (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(fields[0])
