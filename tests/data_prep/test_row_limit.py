"""Files that unpack without a bound: each huge row is dropped by its place.

That memory stays flat is an attack's to show ("a Parquet file that unpacks without a bound", tests/attack/inputs.py).
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlm_rl.data_prep.readers import row_limit
from vlm_rl.data_prep.readers.table_files import read_tables
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError

MOST = 100_000


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    row_limit.set_max_row_bytes(MOST)
    yield
    row_limit.set_max_row_bytes(row_limit.DEFAULT)


def kinds(table: Path) -> list[Any]:
    return [row.reason if isinstance(row, RowError) else "row" for _, row in read_tables([table])]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv"])
def test_a_line_without_an_end_is_dropped_by_its_place(tmp_path: Path, name: str) -> None:
    value = (lambda text: json.dumps({"q": text})) if "json" in name else (lambda text: f"1,{text}")
    texts = ["id,q"] * name.endswith("csv") + [value("a"), value("x" * 3 * MOST), value("b")]
    data = "\n".join(texts).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert kinds(tmp_path / name) == ["row", "row_too_large", "row"]
    wheres = [where for where, _ in read_tables([tmp_path / name])]
    assert wheres[2].endswith("line 4" if name.endswith("csv") else "line 3")


def test_a_row_of_parquet_that_is_too_large_is_dropped(tmp_path: Path) -> None:
    table = tmp_path / "a.parquet"
    rows = [{"q": "a", "l": [{"b": b"x"}]}, {"q": "b", "l": [{"b": b"x" * 2000}] * 100}, {"q": "c", "l": None}]
    pq.write_table(pa.Table.from_pylist(rows), table)
    assert kinds(table) == ["row", "row_too_large", "row"]
    assert [row for _, row in read_tables([table])][::2] == [rows[0], rows[2]]


def test_a_huge_value_of_parquet_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"q": ["x" * 10_000_000]}), table, compression="zstd", use_dictionary=False)
    with pytest.raises(UserError, match=r"column 'q' unpacks from \d+ to \d+ bytes"):
        kinds(table)


def test_a_sample_and_a_header_of_a_tar_are_bounded(tmp_path: Path) -> None:
    table = tmp_path / "a.tar"
    with tarfile.open(table, "w") as archive:
        for name in ("a.txt", *(f"b.{number}.txt" for number in range(30)), "c.txt"):
            info = tarfile.TarInfo(name)
            info.size = 5000
            archive.addfile(info, io.BytesIO(b"x" * 5000))
    assert kinds(table) == ["row", "row_too_large", "row"]
    with tarfile.open(table, "w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("x" * 2_000_000 + ".txt"))
    with pytest.raises(UserError, match="the header of a member has 2000005 bytes"):
        kinds(table)


def test_a_json_file_that_is_one_value_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps([{"q": "x" * 40 * MOST}]).encode()))
    with pytest.raises(UserError, match="JSON is read whole"):
        kinds(tmp_path / "a.json.gz")


def test_a_limit_that_no_row_keeps_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1024 bytes"):
        row_limit.set_max_row_bytes(5)
