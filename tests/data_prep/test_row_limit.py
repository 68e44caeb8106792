"""Files that unpack without a bound: each huge row is dropped by its place.

That memory stays flat is an attack's to show ("a Parquet file that unpacks without a bound", tests/attack/inputs.py).
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.own_data import workbook_with
from vlm_rl.data_prep.readers import row_limit, spreadsheets
from vlm_rl.data_prep.readers.program_tests import tests_in as read_tests
from vlm_rl.data_prep.readers.table_files import read_tables
from vlm_rl.data_prep.readers.written_values import parse_written
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


def test_the_fields_and_the_lines_of_a_row_of_csv_are_bounded(tmp_path: Path) -> None:
    """A field of no letters is an object of Python, and between quotes a row has any number of lines."""
    table = tmp_path / "a.csv"
    table.write_text("id,q\n1,a\n2," + "," * (MOST // 64) + "\n3,b\n")
    assert kinds(table) == ["row", "row_too_large", "row"]
    table.write_text('id,q\n1,a\n2,"' + ("x" * 1000 + "\n") * (MOST // 500) + '"\n3,b\n')
    assert kinds(table) == ["row", "row_too_large", "row"]
    table.write_text("," * (MOST // 2) + "\n1,a\n")
    with pytest.raises(UserError, match="the header: with its fields it has more than 100000 bytes"):
        kinds(table)


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


def write_stream(table: Path, column: pa.Array, compression: str | None = None) -> None:
    batch = pa.record_batch([column], ["q"])
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(table), "wb") as file, pa.ipc.new_stream(file, batch.schema, options=options) as stream:
        stream.write_batch(batch)


def test_an_arrow_stream_is_refused_where_its_values_are_not_there_plainly(tmp_path: Path) -> None:
    table = tmp_path / "a.arrow"
    texts = pa.array(["a", "b" * 1000, None])
    write_stream(table, texts)
    assert [row["q"] for _, row in read_tables([table])] == texts.to_pylist()
    with_bad_text = pa.array([b"a", b"\xff"]).view(pa.string())
    write_stream(table, with_bad_text)
    assert kinds(table) == ["row", "bad_text"]

    offsets = pa.py_buffer(struct.pack("<3i", 0, 2_000_000_000, 2))
    beyond = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab")])
    for column, compression, message in (
        (texts, "zstd", "compressed.*write it again without"),
        (texts, "lz4", "compressed"),
        (texts.dictionary_encode(), "lz4", "compressed"),
        (texts.dictionary_encode(), None, "column 'q' has type dictionary.*plain values"),
        (pa.array([["a"]], pa.list_(pa.string_view())), None, "column 'q' has type list<item: string_view>"),
        (pa.array([["a"]], pa.list_view(pa.string())), None, "column 'q' has type list_view"),
        (
            pa.RunEndEncodedArray.from_arrays(pa.array([9], pa.int32()), texts[:1]),
            None,
            "column 'q' has type run_end",
        ),
        (beyond, None, "cannot be read as an Arrow stream.*out of bounds"),
    ):
        write_stream(table, column, compression)
        with pytest.raises(UserError, match=message):
            kinds(table)


@pytest.mark.parametrize("name", ["a.arrow", "a.parquet"])
def test_values_that_take_no_bytes_in_a_file_count_as_what_they_become(tmp_path: Path, name: str) -> None:
    """A list of 600 objects with nothing in them takes 120 kB in Python, and next to nothing in Arrow."""
    items = pa.StructArray.from_arrays([pa.nulls(602)], ["n"])
    column = pa.ListArray.from_arrays(pa.array([0, 1, 601, 602], pa.int32()), items)
    if name.endswith("arrow"):
        write_stream(tmp_path / name, column)
    else:
        pq.write_table(pa.table({"q": column}), tmp_path / name)
    assert kinds(tmp_path / name) == ["row", "row_too_large", "row"]


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


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_the_lists_and_objects_of_a_line_count_as_what_they_become(tmp_path: Path, name: str) -> None:
    """2,000 empty lists are 6 kB of text and 128 kB in Python; commas inside of texts are none of them."""
    good = json.dumps({"q": '[{,\\"' * 2000})
    data = "\n".join(['{"q": 1}', json.dumps({"q": [[]] * 2000}), good, json.dumps({"q": [{}] * 600})]).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert kinds(tmp_path / name) == ["row", "row_too_large", "row", "row_too_large"]


def test_a_json_file_that_is_one_value_is_bounded(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.json", tmp_path / "b.json.gz"
    plain.write_text(json.dumps([{"q": "x" * 5 * MOST}]))
    assert kinds(plain) == ["row"]
    packed.write_bytes(gzip.compress(plain.read_bytes()))  # to a thousandth
    with pytest.raises(UserError, match=f"unpacks to more than {MOST} bytes, and JSON is read whole"):
        kinds(packed)
    plain.write_text(json.dumps([{"q": "x" * 40 * MOST}]))
    with pytest.raises(UserError, match=f"unpacks to more than {16 * MOST} bytes, and JSON is read whole"):
        kinds(plain)
    plain.write_text(json.dumps([[]] * 20 * (MOST // 64)))
    with pytest.raises(UserError, match=rf"its lists and objects it has more than {16 * MOST} bytes \(--max-row"):
        kinds(plain)


@pytest.mark.parametrize("value", [[[]] * 2000, [{}] * 600])
def test_json_in_a_cell_counts_as_what_it_becomes(value: Any) -> None:
    text = json.dumps(value)
    with pytest.raises(ValueError, match="its lists and objects"):
        parse_written(text)
    with pytest.raises(RowError, match="its lists and objects"):
        read_tests(text)
    assert parse_written(json.dumps(value[:200])) == value[:200]


def test_a_workbook_is_read_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "a.xlsx"
    workbook_with(table, b"How many?", row=2000)
    assert [*read_tables([table])] == [("a.xlsx row 2000", {"question": "How many?"})]

    workbook_with(table, b"x" * 50_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(spreadsheets, "_MEMORY", 100 << 20)
        with pytest.raises(UserError, match=r"as an Excel workbook it needed more (memory )?than"):
            kinds(table)

    workbook_with(table, b"How many?", row=10**12)
    monkeypatch.setattr(spreadsheets, "_CPU_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"a.xlsx: as an Excel workbook it took more than 0.5 s of CPU time: save it"):
        kinds(table)


def test_a_limit_that_no_row_keeps_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1024 bytes"):
        row_limit.set_max_row_bytes(5)
