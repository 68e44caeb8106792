"""The pictures of a prepared set, read from its Parquet file when they are asked for.

A set may hold more bytes of pictures than a rank has memory, and training draws its rows in random
order: what is held is the table without them, and the few megabytes that were read last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.errors import UserError

KEPT_BYTES = 32 * 2**20  # of pictures per set; a row group that is larger is kept alone


class PictureFile:
    """Reads the column `images` of one Parquet file, a row group at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ArrowException or OSError for a file that is no Parquet."""
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

    def table(self) -> pa.Table:
        """Every row without the bytes of its pictures; how many it has can be seen from `images`."""
        with pq.ParquetFile(self.path, metadata=self._file.metadata, pre_buffer=True) as file:
            return file.read(columns=self._rest)

    def row(self, index: int) -> tuple[bytes, ...]:
        """The pictures of one row. Raises UserError where the file cannot be read any more."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        if group in self._kept:
            self._kept.move_to_end(group)
        else:
            self._keep(group)
        return self._kept[group][index - int(self._ends[group])]  # counted from the group's end

    def _keep(self, group: int) -> None:
        try:
            column = self._file.read_row_group(group, columns=self._leaf)["images"]
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.path}: the pictures of row group {group} cannot be read ({error}); the file must stay as it "
                "is while a run reads from it"
            ) from None
        rows = [tuple(image["bytes"] for image in images or ()) for images in column.to_pylist()]
        self._kept[group] = rows
        self._num_kept_bytes += _num_bytes(rows)
        while self._num_kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._num_kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])


class StoredPictures(Sequence[bytes]):
    """The pictures of one row: their number is known, their bytes are read at each use.

    Equal to any sequence of the same bytes.
    """

    __slots__ = ("_count", "_file", "_row")

    def __init__(self, file: PictureFile, row: int, count: int) -> None:
        self._file, self._row, self._count = file, row, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file.row(self._row))

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, index: int | slice) -> bytes | tuple[bytes, ...]:
        return self._file.row(self._row)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{self._count} pictures of row {self._row} of {self._file.path}>"


def _num_bytes(rows: Sequence[Sequence[bytes]]) -> int:
    return sum(len(data) for pictures in rows for data in pictures)
