"""Read the images of a prepared set from its Parquet file when they are used.

The images of a set may need more memory than a rank has, and training takes rows in random order. So only
the table without them is held, and the few megabytes of images that were read last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.errors import UserError

KEPT_BYTES = 32 * 2**20  # of images per set; a larger row group is kept alone


class ImageColumn:
    """The column `images` of a Parquet file, read a row group at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ArrowException or OSError if it is not Parquet."""
        self.path = path
        self._file = pq.ParquetFile(path)
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        leaves = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        self._leaf = [leaf for leaf in leaves if leaf.startswith("images.") and leaf.endswith(".bytes")]
        self._rest = [leaf for leaf in leaves if leaf not in self._leaf]
        self._kept: OrderedDict[int, list[tuple[bytes, ...]]] = OrderedDict()  # by row group, the last read last
        self._num_kept_bytes = 0
        self._lock = threading.Lock()  # a judge that is shown images reads them in a thread of its own

    @property
    def schema(self) -> pa.Schema:
        """Return the columns of the file."""
        return self._file.schema_arrow

    def table(self) -> pa.Table:
        """Return every row without the bytes of its images; `images` still shows how many it has."""
        with pq.ParquetFile(self.path, metadata=self._file.metadata, pre_buffer=True) as file:
            return file.read(columns=self._rest)

    def row(self, index: int) -> tuple[bytes, ...]:
        """Return the images of a row. Raises UserError if the file can no longer be read."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        with self._lock:
            if group in self._kept:
                self._kept.move_to_end(group)
            else:
                self._keep(group)
            return self._kept[group][index - int(self._ends[group])]  # counted from the group's end

    def _keep(self, group: int) -> None:
        try:
            column = self._file.read_row_group(group, columns=self._leaf)["images"]
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.path}: the images of row group {group} cannot be read ({reason}); the file must stay as it "
                "is while a run reads from it"
            ) from None
        # A missing image is an empty one, which no decoder takes.
        rows = [tuple((image or {}).get("bytes") or b"" for image in images or ()) for images in column.to_pylist()]
        self._kept[group] = rows
        self._num_kept_bytes += _num_bytes(rows)
        while self._num_kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._num_kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])


class StoredImages(Sequence[bytes]):
    """The images of a row: their number is known, their bytes are read at each use.

    It is equal to any sequence of the same bytes.
    """

    __slots__ = ("_count", "file", "row")

    def __init__(self, file: ImageColumn, row: int, count: int) -> None:
        self.file, self.row, self._count = file, row, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.file.row(self.row))

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, index: int | slice) -> bytes | tuple[bytes, ...]:
        return self.file.row(self.row)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, tuple[str, int, int]]:
        """Travel to another process as the place of the images, not as their bytes."""
        return open_stored, (str(self.file.path.absolute()), self.row, self._count)

    def __repr__(self) -> str:
        return f"<{self._count} images of row {self.row} of {self.file.path}>"


def open_stored(path: str, row: int, count: int) -> StoredImages:
    """Return the images of a row of a file, which is opened once in each process."""
    return StoredImages(_column(path), row, count)


@cache
def _column(path: str) -> ImageColumn:
    return ImageColumn(Path(path))


def _num_bytes(rows: Sequence[Sequence[bytes]]) -> int:
    return sum(len(data) for images in rows for data in images)
