"""The most bytes that one row of a source may unpack to (`--max-row-bytes`): a small file can hold a huge row.

The limit is that of this process, since readers are generators in many places and one command prepares one set.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError

DEFAULT = 256 << 20
_limit = DEFAULT
_PIECE = 1 << 20
_WHOLE_FILES = 16  # times a row's bytes: a JSON file that is one value is read whole
_HEADER = 1 << 20  # bytes of a name or of fields in a tar's header
_VALUE = 8  # bytes of an item of a list, once it is read
_NUMBER, _OBJECT, _DICT = 32, 64, 192  # bytes of an object of Python beside its content, and of its place in a list
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.S)  # of JSON
_RATIO = 100  # times its compressed size; text and images unpack to less than 20


def set_max_row_bytes(limit: int) -> None:
    """Set the limit of all readers. Raises UserError for a limit that no row keeps."""
    global _limit
    if limit < 1024:
        raise UserError(f"--max-row-bytes {limit}: give at least 1024 bytes")
    _limit = limit


def max_row_bytes() -> int:
    """Return the limit."""
    return _limit


def too_large(what: str = "", most: int = 0) -> RowError:
    """Return why a row is dropped, of which `what` has more than `most` bytes (0: those of a row)."""
    return RowError("row_too_large", f"{what}has more than {most or _limit} bytes (--max-row-bytes)")


class BoundedLines:
    """Iterates over the lines of a text; one that is too long comes as a RowError, and is never held whole.

    Attribute `number`: how many lines came.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.number = 0

    def __iter__(self) -> Iterator[str | RowError]:
        while (line := self.next_line()) != "":
            yield line

    def next_line(self) -> str | RowError:
        """Return the next line, "" at the end of the text."""
        line = self._stream.readline(_limit + 1)
        self.number += bool(line)
        if len(line) <= _limit:
            return line
        while line and not line.endswith("\n"):
            line = self._stream.readline(_PIECE)
        return too_large()


def fields_bytes(line: str, delimiter: str) -> int:
    """Return at least the bytes that the fields of a line of CSV take in Python."""
    return len(line) + _OBJECT * line.count(delimiter)


def read_whole(table: Path, stream: TextIO) -> str:
    """Return the text of a file that is one value. Raises UserError if it is too long, or packed too well."""
    most = min(_WHOLE_FILES * _limit, max(_limit, _RATIO * table.stat().st_size))
    pieces, size = [], 0
    while size <= most and (piece := stream.read(_PIECE)):
        pieces.append(piece)
        size += len(piece)
    if size > most:
        raise UserError(
            f"{table}: unpacks to more than {most} bytes, and JSON is read whole: write a JSON "
            "object on each line (.jsonl), or raise --max-row-bytes"
        )
    return "".join(pieces)


def load_json(text: str, *, is_file: bool = False) -> Any:
    """Return the value of a JSON text. Raises ValueError or RecursionError where it is none, RowError if too large.

    Args:
        text: of a row, or of a file.
        is_file: whether it is a whole file, which may hold more.
    """
    most = (_WHOLE_FILES if is_file else 1) * _limit
    if _held_bytes(text) > most:
        raise too_large("with its lists and objects it ", most)
    return json.loads(text)


def _held_bytes(text: str) -> int:
    """Return at least the bytes that the values of a JSON text take in Python, wide characters apart.

    An empty list is two characters of the text, and 64 bytes.
    """
    held = _count_held(text)
    # Only a text of many commas is looked at closely: they may all be inside of strings.
    return held if held <= _limit else len(text) + _count_held(_STRING.sub("", text))


def _count_held(text: str) -> int:
    return len(text) + _OBJECT * (text.count(",") + text.count("[")) + _DICT * text.count("{")


def check_columns_unpack(table: Path, metadata: Any) -> None:
    """Raise UserError if a column of a Parquet file unpacks to more than a row may have, from next to nothing."""
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            packed, unpacked = column.total_compressed_size, column.total_uncompressed_size
            if metadata.schema.column(number).max_repetition_level:  # lists, which runs of equal values hide
                unpacked = max(unpacked, _VALUE * column.num_values)
            if unpacked > _limit and unpacked > _RATIO * packed:
                raise UserError(
                    f"{table}: column {column.path_in_schema!r} unpacks from {packed} to {unpacked} bytes: "
                    "look at what it holds, or raise --max-row-bytes"
                )


def text_columns(metadata: Any) -> list[str]:
    """Return the paths of a Parquet file's texts and bytes, which are read as dictionaries: a value is there once."""
    schema = metadata.schema
    columns = [schema.column(number) for number in range(len(schema))]
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def unpacked_bytes(array: Any) -> int:
    """Return about the bytes that an Arrow array's values take in Python, each as often as it is used."""
    import pyarrow as pa
    import pyarrow.compute

    pc: Any = pyarrow.compute  # its functions are made at run time
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return unpacked_bytes(array.storage)
    if pa.types.is_dictionary(kind) and _is_text(kind.value_type):
        lengths = pc.binary_length(array.dictionary)
        return _OBJECT * len(array) + (pc.sum(lengths.take(array.indices)).as_py() or 0)
    if _is_text(kind):
        return _OBJECT * len(array) + (pc.sum(pc.binary_length(array)).as_py() or 0)
    if pa.types.is_struct(kind):
        return _DICT * len(array) + sum(map(unpacked_bytes, array.flatten()))
    if any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        return _OBJECT * len(array) + unpacked_bytes(array.flatten())
    return _NUMBER * len(array) + array.nbytes


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


class BoundedTarInfo(tarfile.TarInfo):
    """A member of a tar whose header may hold a name or fields of a bounded size, which tarfile reads whole."""

    _EXTENSIONS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in (*self._EXTENSIONS, tarfile.SOLARIS_XHDTYPE) and self.size > _HEADER:
            raise tarfile.ReadError(f"the header of a member has {self.size} bytes")
        return super()._proc_member(archive)  # pyright: ignore[reportAttributeAccessIssue]
