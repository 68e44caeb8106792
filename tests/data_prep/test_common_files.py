"""Files as other programs write them: encodings, containers, shards, names of images, places of images."""

from __future__ import annotations

import gzip
import io
import json
import unicodedata
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.own_data import IMAGES
from tests.helpers.prepared_sets import manifest_of, rows_of
from vlm_rl import cli
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.readers.find_data import find_data
from vlm_rl.data_prep.readers.guess import guess
from vlm_rl.errors import UserError

ROWS = [{"question": f"How many in tray {n}?", "answer": str(n + 3), "image": f"img/{n}.png"} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = "question,answer,image\n" + "".join(",".join(row.values()) + "\n" for row in ROWS)
GOLDS = ["3", "4", "5"]


def folder_with(tmp_path: Path, files: dict[str, str | bytes], images: Any = "img/{}.png") -> Path:
    raw = tmp_path / "raw"
    for name, data in {**files, **{images.format(n): IMAGES[n] for n in range(3)}}.items():
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        (raw / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return raw


def parquet_bytes(columns: dict[str, list[str]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def prepared(path: Path, encoding: str = "") -> list[dict]:
    mapping = guess(path, find_data(path), {}, encoding=encoding)
    out = path.parent / "set"
    prepare("generic", path, out, mapping=mapping)
    return rows_of(out)


def images_of(row: dict) -> list[int]:
    return [IMAGES.index(image["bytes"]) for image in row["images"]]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES.encode("utf-8-sig")),
        ("a.json", json.dumps(ROWS).encode("utf-8-sig")),
        ("a.csv", CSV.encode("utf-16")),
        ("a.tsv", CSV.replace(",", "\t").encode("utf-16-le")),
        ("a.jsonl", LINES.encode("utf-16-be")),
        ("a.json", json.dumps(ROWS).encode("utf-32")),
        ("a.csv", CSV.replace(",", "\t")),
        ("a.csv", CSV.replace(",", ";")),
        ("a.json", LINES),
        ("a.json", json.dumps({"version": "1", "data": ROWS})),
        ("a.json", json.dumps({"info": {"by": "us"}, "questions": ROWS})),
        ("a.json", json.dumps({"rows": [{"row_idx": n, "row": row} for n, row in enumerate(ROWS)]})),
        ("a.json", json.dumps({key: [row[key] for row in ROWS] for key in ROWS[0]})),
        ("a.json", json.dumps({"columns": [*ROWS[0]], "data": [[*row.values()] for row in ROWS]})),
        ("a.json", json.dumps({f"id{n}": row for n, row in enumerate(ROWS)})),
        ("a.jsonl", json.dumps(ROWS, indent=2)),
        ("a.jsonl", json.dumps(ROWS)),
        ("a.ndjson", LINES),
        ("A.JSONL", LINES),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.csv.gz", gzip.compress(CSV.encode("utf-8-sig"), mtime=0)),
    ],
)
def test_the_content_decides_how_a_table_is_read(name: str, data: str | bytes, tmp_path: Path) -> None:
    rows = prepared(folder_with(tmp_path, {name: data}))
    assert [row["answer"] for row in rows] == GOLDS
    assert [images_of(row) for row in rows] == [[0], [1], [2]]


def workbook(*sheets: list[list[Any]]) -> bytes:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for number, rows in enumerate(sheets):
        sheet = book.create_sheet(f"sheet {number}")
        for row in rows:
            sheet.append(row)
    stream = io.BytesIO()
    book.save(stream)
    return stream.getvalue()


ROW_LISTS = [[*ROWS[0]], *([*row.values()] for row in ROWS)]


def test_a_workbook_is_a_table(tmp_path: Path) -> None:
    sheet = [ROW_LISTS[0], ROW_LISTS[1], [None, None, None], *ROW_LISTS[2:]]
    rows = prepared(folder_with(tmp_path, {"a.xlsx": workbook([], sheet)}))
    assert [row["answer"] for row in rows] == GOLDS
    assert [images_of(row) for row in rows] == [[0], [1], [2]]


def test_values_of_a_workbook_stay_as_they_are(tmp_path: Path) -> None:
    values = [27, 0.1, "073", "1/2", datetime(2026, 3, 2)]
    book = workbook([["question", "answer"], *([f"What is {n}?", value] for n, value in enumerate(values))])
    rows = prepared(folder_with(tmp_path, {"a.xlsx": book}))
    assert [row["answer"] for row in rows] == ["27", "0.1", "073", "1/2", "2026-03-02"]


@pytest.mark.parametrize(
    ("sheets", "words"),
    [
        ([ROW_LISTS, ROW_LISTS], "one sheet must hold rows, not sheet 0, sheet 1"),
        ([[]], "one sheet must hold rows, not none"),
        ([[["answer", "answer", "question"], ["1", "2", "3"]]], "two columns are called 'answer'"),
    ],
)
def test_a_workbook_of_other_forms_is_refused(sheets: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        prepared(folder_with(tmp_path, {"a.xlsx": workbook(*sheets)}))


def test_a_cell_beyond_the_columns_costs_its_row(tmp_path: Path) -> None:
    prepared(folder_with(tmp_path, {"a.xlsx": workbook([ROW_LISTS[0], [*ROW_LISTS[1], "note"], *ROW_LISTS[2:]])}))
    assert [row["answer"] for row in rows_of(tmp_path / "set")] == GOLDS[1:]


def csv_with(*lines: str) -> str:
    return CSV + "".join(line + "\n" for line in lines)


@pytest.mark.parametrize(
    ("lines", "golds", "lost"),
    [
        (['Which?,"8,img/0.png', "What?,9,img/1.png"], [*GOLDS, "9"], [5]),
        (['Which?,8,"img/0.png', "What?,9,img/1.png"], [*GOLDS, "9"], [5]),
        (['"Which?,8,img/0.png', 'The ""big"" one?,9,img/1.png'], [*GOLDS, "9"], [5]),
        (["What?,9,img/1.png", 'Which?,8,"img/0.png'], [*GOLDS, "9"], [6]),
        (['"Is it\nmany\nlines?",8,img/0.png', 'Which?,"8,img/0.png', "What?,9,img/1.png"], [*GOLDS, "8", "9"], [8]),
        (['Is it 5" long?,8,img/0.png', 'Is it 7" long?,9,"img/1.png"'], [*GOLDS, "8", "9"], []),
    ],
)
def test_a_quotation_mark_that_is_never_closed_costs_its_row_alone(
    lines: list[str], golds: list[str], lost: list[int], tmp_path: Path
) -> None:
    rows = prepared(folder_with(tmp_path, {"a.csv": csv_with(*lines)}))
    assert [row["answer"] for row in rows] == golds
    dropped = [json.loads(line) for line in (tmp_path / "set/dropped.jsonl").read_text().splitlines()]
    assert [row["where"] for row in dropped] == [f"a.csv line {number}" for number in lost]
    assert all("never closed" in row["detail"] and row["reason"] == "bad_csv" for row in dropped)


def test_a_header_with_an_open_quotation_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its header has a quotation mark that is never closed"):
        prepared(folder_with(tmp_path, {"a.csv": '"' + CSV}))


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, ending: str) -> None:
    names, values = ["question", "answer", "answer"], ["What is 1 + 1?", "2", "3"]
    table = pa.Table.from_arrays([pa.array([value]) for value in values], names=names)
    stream = pa.BufferOutputStream()
    if ending == "parquet":
        pq.write_table(table, stream)
    elif ending == "arrow":
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
    else:
        separator = "," if ending == "csv" else "\t"
        stream.write("".join(separator.join(fields) + "\n" for fields in (names, values)).encode())
    raw = folder_with(tmp_path, {f"a.{ending}": stream.getvalue().to_pybytes()})
    with pytest.raises(UserError, match=rf"a\.{ending}: two columns are called 'answer': rename one"):
        prepared(raw)


def test_spaces_around_the_names_of_columns_are_none_of_theirs(tmp_path: Path) -> None:
    rows = prepared(folder_with(tmp_path, {"a.csv": CSV.replace(",", " , ", 2)}))
    assert [row["answer"] for row in rows] == GOLDS


@pytest.mark.parametrize(("encoding", "word"), [("cp1252", "thé"), ("gbk", "盘子"), ("shift_jis", "皿")])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_another_encoding_is_named_and_never_guessed(
    encoding: str, word: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "question": f"{word} {n}?"} for n, row in enumerate(ROWS)]
    table = "question,answer,image\n" + "".join(",".join(row.values()) + "\n" for row in rows)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = {"csv": table, "jsonl": lines, "json": json.dumps(rows, ensure_ascii=False)}[kind]
    raw = folder_with(tmp_path, {f"a.{kind}": text.encode(encoding)})
    assert cli.main(["prepare", str(raw), "--out", str(tmp_path / "none")]) == 2
    assert "--encoding" in (said := "".join(capsys.readouterr())) and "not UTF-8" in said
    assert cli.main(["prepare", str(raw), "--encoding", encoding, "--out", str(tmp_path / "set")]) == 0
    assert [row["question"] for row in rows_of(tmp_path / "set")] == [f"<image>\n{word} {n}?" for n in range(3)]
    assert manifest_of(tmp_path / "set")["mapping"]["encoding"] == encoding
    assert cli.main(["prepare", str(raw), "--encoding", "klingon", "--out", str(tmp_path / "no")]) == 2


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_a_bad_byte_costs_its_row(kind: str, tmp_path: Path) -> None:
    text = {"csv": CSV, "jsonl": LINES, "json": json.dumps(ROWS)}[kind]
    prepared(folder_with(tmp_path, {f"a.{kind}": text.encode().replace(b"tray 1", b"tr\xe4y 1")}))
    assert [row["answer"] for row in rows_of(tmp_path / "set")] == ["3", "5"]
    (line,) = (tmp_path / "set/dropped.jsonl").read_text().splitlines()
    assert "0xe4, which is not UTF-8" in json.loads(line)["detail"] and json.loads(line)["reason"] == "bad_text"


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", json.dumps({"train": ROWS, "test": ROWS}), "several lists of rows: train, test"),
        ("a.json", json.dumps(ROWS)[:-9], "is not JSON.*a list of rows, or an object on each line"),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:40], "damaged"),
        ("a.xlsx", b"PK", "cannot be read as an Excel workbook.*save it again, or as CSV"),
        ("a.ods", b"PK", "is a spreadsheet of a kind that is not read: save it as a.xlsx"),
        ("a.csv", "größe,answer\n1,2\n".encode("cp1252"), "header is not UTF-8; name its encoding"),
        ("a.jsonl", bytes(range(128, 168)) * 9, r"none of its first 100 rows can be read: it begins with b'.x80"),
        ("a.jsonl", "<!DOCTYPE html>\n<p>404", "it is a web page or XML and not the data: download it again"),
        ("a.jsonl", "\n\n", "it is empty"),
        ("a.json", "[]", "it is empty"),
        ("a.csv", "question,answer\n", "it is empty"),
        ("a.parquet", parquet_bytes({"question": [], "answer": []}), "it is empty"),
        ("a.jsonl", parquet_bytes({"question": ["1?"]}), r"it is a Parquet file: let its name end in \.parquet"),
        *(
            (f"a.{ending}", "version https://git-lfs.github.com/spec/v1\nsize 9\n", "git lfs pull brings")
            for ending in ("parquet", "jsonl", "json", "csv", "tar", "xlsx", "arrow")
        ),
    ],
)
def test_a_table_that_cannot_be_read_says_why_and_what_to_do(
    name: str, data: str | bytes, words: str, tmp_path: Path
) -> None:
    raw = folder_with(tmp_path, {name: data})
    for path in (raw, raw / name):
        with pytest.raises(UserError, match=words):
            prepared(path)


def test_a_json_file_for_each_image_is_a_table(tmp_path: Path) -> None:
    files = {f"x/{n}.json": json.dumps({"question": f"What is {n}?", "answer": GOLDS[n]}) for n in range(3)}
    rows = prepared(folder_with(tmp_path, files, "x/{}.png"))
    assert [(row["answer"], images_of(row)) for row in rows] == [(gold, [n]) for n, gold in enumerate(GOLDS)]


@pytest.mark.parametrize(
    ("names", "golds"),
    [
        ("part_1 part_2 part_3", GOLDS),
        ("Shard-0 Shard-1 Shard-2", GOLDS),
        ("train_1 train_2 test_1", ["3", "4"]),
        ("chunk1 chunk2 chunk3", GOLDS),
        ("data.0 data.1 data.2", GOLDS),
    ],
)
def test_numbered_files_are_parts_of_a_table(names: str, golds: list[str], tmp_path: Path) -> None:
    lines = LINES.splitlines(keepends=True)
    rows = prepared(folder_with(tmp_path, {f"{name}.jsonl": lines[n] for n, name in enumerate(names.split())}))
    assert [row["answer"] for row in rows] == golds


def test_numbers_with_a_gap_are_tables_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are several tables"):
        prepared(folder_with(tmp_path, {"set_2.jsonl": LINES, "set_4.jsonl": LINES}))


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize(
    ("on_disk", "in_table"),
    [
        ("images/{}.png", "images\\{}.png"),
        ("images/{}.png", ".\\Images\\{}.PNG"),
        ("images/a b{}.png", "images/a%20b{}.png"),
        ("images/a%20b{}.png", "images/a b{}.png"),
        (unicodedata.normalize("NFD", "images/é{}.png"), "images/é{}.png"),
        ("images/é{}.png", unicodedata.normalize("NFD", "images/É{}.png")),
    ],
)
def test_names_of_other_systems_find_their_images(on_disk: str, in_table: str, is_zip: bool, tmp_path: Path) -> None:
    table = "".join(json.dumps({**row, "image": in_table.format(n)}) + "\n" for n, row in enumerate(ROWS))
    raw = folder_with(tmp_path, {"a.jsonl": table}, "unused/{}.txt" if is_zip else on_disk)
    if is_zip:
        with zipfile.ZipFile(raw / "images.zip", "w") as archive:
            for n in range(3):
                archive.writestr(on_disk.format(n), IMAGES[n])
    assert [images_of(row) for row in prepared(raw)] == [[0], [1], [2]]


def test_a_name_that_fits_two_images_finds_none(tmp_path: Path) -> None:
    table = "".join(json.dumps({**ROWS[0], "image": f"img/{name}"}) + "\n" for name in ("0.PNG", "1.PNG"))
    raw = folder_with(tmp_path, {"a.jsonl": table, "img/1.Png": IMAGES[2]})
    assert [images_of(row) for row in prepared(raw)] == [[0]]
    assert manifest_of(tmp_path / "set")["dropped"] == {"image_missing": 1}


@pytest.mark.parametrize(
    "written",
    [
        *("img/0.png;img/1.png", "img/0.png, img/1.png", "img/0.png|img/1.png", "img/0.png\nimg/1.png"),
        *('["img/0.png", "img/1.png"]', "['img/0.png', 'img/1.png']", "['img/0.png' 'img/1.png']"),
    ],
)
def test_a_cell_may_name_several_images(written: str, tmp_path: Path) -> None:
    (row,) = prepared(folder_with(tmp_path, {"a.jsonl": json.dumps({**ROWS[0], "image": written})}))
    assert images_of(row) == [0, 1]


@pytest.mark.parametrize("empty", [float("nan"), None, "", [], [None], {"bytes": None, "path": None}, "absent"])
@pytest.mark.parametrize("first", [True, False])
def test_rows_without_an_image_stay(empty: Any, first: bool, tmp_path: Path) -> None:
    """Also where the first row has no such key, which the mapping names from the others."""
    text = {"question": "What is 6 times 7?", "answer": "42"} | ({} if empty == "absent" else {"image": empty})
    rows = [text, *ROWS] if first else [*ROWS, text]
    got = prepared(folder_with(tmp_path, {"a.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}))
    assert sorted(map(images_of, got)) == [[], [0], [1], [2]]
    assert [row["question"] for row in got if not row["images"]] == ["What is 6 times 7?"]


@pytest.mark.parametrize(
    ("question", "asked", "order"),
    [
        ("Is <image 1> in <image 2>?", "Is <image> in <image>?", [0, 1]),
        ("Is [image 2] in [Image 1]?", "Is <image> in <image>?", [1, 0]),
        ("Is <image1> in <|image_2|>? See <image1>.", "Is <image> in <image>? See image 1.", [0, 1]),
        ("Is <image 0> in <image 1>?", "Is <image> in <image>?", [0, 1]),
        ("Is [image] in <img>?", "Is <image> in <image>?", [0, 1]),
        ("Is [image] whole?", "<image><image>\nIs [image] whole?", [0, 1]),
        ("Is <image> in <image>? [image 1]", "Is <image> in <image>? [image 1]", [0, 1]),
    ],
)
def test_images_go_where_the_question_names_them(question: str, asked: str, order: list[int], tmp_path: Path) -> None:
    row = {"question": question, "answer": "3", "image": ["img/0.png", "img/1.png"]}
    (got,) = prepared(folder_with(tmp_path, {"a.jsonl": json.dumps(row)}))
    assert (got["question"], images_of(got)) == (asked, order)


def test_a_number_without_its_image_is_a_mismatch(tmp_path: Path) -> None:
    row = {"question": "Is <image 1> in <image 3>?", "answer": "3", "image": ["img/0.png", "img/1.png"]}
    prepared(folder_with(tmp_path, {"a.jsonl": json.dumps(row) + "\n" + LINES}))
    assert manifest_of(tmp_path / "set")["dropped"] == {"marker_mismatch": 1}


def test_a_hint_stands_above_the_question(tmp_path: Path) -> None:
    table = "index\tquestion\thint\tA\tB\tanswer\n0\tWhen?\tIt is late.\tday\tnight\tB\n1\tWho?\t\tday\tnight\tA\n"
    rows = prepared(folder_with(tmp_path, {"a.tsv": table}))
    tail = "Choices:\n(A) day\n(B) night"
    assert [row["question"] for row in rows] == [f"Hint: It is late.\nWhen?\n{tail}", f"Who?\n{tail}"]


def test_a_hint_of_a_question_without_options_is_kept_too(tmp_path: Path) -> None:
    table = "index\tquestion\thint\tanswer\n0\tWhen?\tGive the hour.\t3\n1\tWho?\t\t4\n"
    rows = prepared(folder_with(tmp_path, {"a.tsv": table}))
    assert [row["question"] for row in rows] == ["Hint: Give the hour.\nWhen?", "Who?"]


def test_gt_is_an_answer(tmp_path: Path) -> None:
    rows = prepared(folder_with(tmp_path, {"a.jsonl": json.dumps({"question": "How many?", "gt": "12"})}))
    assert [row["answer"] for row in rows] == ["12"]
