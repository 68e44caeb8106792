"""The value of a gold does not depend on how it is stored: numbers, truth values, lists, lists as text."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data_prep.test_options import prepared
from tests.helpers.prepared_sets import manifest_of, rows_of
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.readers.written_values import parse_written, plain_text
from vlm_rl.errors import UserError

NUMBERS = [0.1, 2.3, 7.75, 27.0]
GOLDS = ["0.1", "2.3", "7.75", "27"]
VQA = [{"answer": text, "answer_id": n} for n, text in enumerate(["blue", "red", "red", "dark red"])]


def golds_of(folder: Path, golds: Any, answer_form: str = "") -> list[str]:
    """Return the golds of a prepared table; `golds` is a list for JSON lines, or a column of Arrow."""
    count = len(golds)
    columns = {"question": [f"Which {n}?" for n in range(count)], "answer": golds}
    if isinstance(golds, pa.Array):
        file = folder / "rows.parquet"
        pq.write_table(pa.table(columns), file)
    else:
        file = folder / "rows.jsonl"
        file.write_text(
            "".join(
                json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in zip(*columns.values(), strict=True)
            )
        )
    return [row["answer"] for row in prepared(file, answer_form)]


@pytest.mark.parametrize(
    "column",
    [
        *(pa.array(np.array(NUMBERS, dtype)) for dtype in ("float16", "float32", "float64")),
        pa.array([Decimal(f"{number:.2f}") for number in NUMBERS], pa.decimal128(12, 4)),
        pa.array([[number] for number in NUMBERS], pa.list_(pa.float32())),
        pa.array(GOLDS),
        pa.array(GOLDS).dictionary_encode(),
    ],
    ids=["half", "single", "double", "decimal", "list", "text", "dictionary"],
)
def test_numbers_are_golds_as_people_write_them(column: pa.Array, tmp_path: Path) -> None:
    assert golds_of(tmp_path, column) == GOLDS


def test_whole_numbers_that_pandas_made_floats_are_ids_as_people_write_them(tmp_path: Path) -> None:
    columns = {"question": [f"Which {n}?" for n in range(4)], "answer": ["1"] * 4, "uid": [1.0, 20.0, None, 1.5]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    named = {"question": "question", "answer": "answer", "id": "uid"}
    mapping = {"path": "rows.parquet", "source": "mine", "columns": named}
    (tmp_path / "mine.yaml").write_text(json.dumps(mapping))
    report = prepare("generic", tmp_path / "mine.yaml", tmp_path / "set")
    assert [row["id"] for row in rows_of(tmp_path / "set")] == ["mine-1", "mine-20"]
    assert report.dropped == {"id_missing": 2}
    assert "uid is 1.5, and an id is" in (tmp_path / "set/dropped.jsonl").read_text()


def test_numbers_inside_objects_and_lists_of_options_too(tmp_path: Path) -> None:
    single = pa.float32()
    kind = pa.struct([("ground_truth", single)])
    answer = pa.array([{"ground_truth": 0.3}, {"ground_truth": None}], kind)
    options = pa.array([[0.1, 0.3], [0.7]], pa.list_(single))
    pq.write_table(
        pa.table({"question": ["a?", "b?"], "reward_model": answer, "options": options}), tmp_path / "r.parquet"
    )
    (row,) = prepared(tmp_path / "r.parquet")
    assert (row["answer"], row["choices"]) == ("B", ["0.1", "0.3"])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_double_keeps_its_value(number: float) -> None:
    """A number of 16 digits that is exactly a float32 stands for the float32."""
    text = plain_text(number)
    assert text is not None
    single = abs(number) < 3e38 and float(np.float32(number)) == number
    assert float(text) == number or (single and np.float32(text) == np.float32(number))


def test_truth_values_are_words(tmp_path: Path) -> None:
    assert golds_of(tmp_path, [True, False]) == ["True", "False"]
    metas = [json.loads(row["meta"]) for row in pq.read_table(tmp_path / "set/data.parquet").to_pylist()]
    assert metas == [{"alternatives": ["Yes"]}, {"alternatives": ["No"]}]


@pytest.mark.parametrize(
    ("golds", "read"),
    [
        ([["3"], ["blue"]], ["3", "blue"]),
        ([["yes", "yes"], ["no"]], ["yes", "no"]),
        (["['24/7']", '["6"]', "7"], ["24/7", "6", "7"]),
        ([[3], [0.5]], ["3", "0.5"]),
        (["[0, 1]", "['a', 'b'"], ["[0, 1]", "['a', 'b'"]),  # an interval, and a text that is no list
        ([VQA[1:3], [{"answer": "no"}]], ["red", "no"]),
    ],
)
def test_a_list_of_equal_answers_is_that_answer(golds: list, read: list[str], tmp_path: Path) -> None:
    assert golds_of(tmp_path, golds) == read


@pytest.mark.parametrize(
    ("answer", "any_of", "all_of"),
    [
        (["3", "5"], ["3", "5"], "3, 5"),
        ("['24/7', '3.429']", ["24/7", "3.429"], "24/7, 3.429"),
        (VQA, ["red", "blue", "dark red"], "blue, red, red, dark red"),  # the most frequent is the gold
    ],
)
def test_a_list_of_different_answers_is_asked_about(
    answer: Any, any_of: list[str], all_of: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="--answer-form any_of or --answer-form all_of"):
        golds_of(tmp_path, [answer, ["7"]])
    (tmp_path / "any").mkdir()
    assert golds_of(tmp_path / "any", [answer, ["7"]], "any_of") == [any_of[0], "7"]
    metas = [json.loads(meta) for meta in pq.read_table(tmp_path / "any/set/data.parquet")["meta"].to_pylist()]
    assert [meta.get("alternatives", []) for meta in metas] == [any_of[1:], []]
    assert manifest_of(tmp_path / "any/set")["mapping"]["answer_form"] == "any_of"
    (tmp_path / "all").mkdir()
    assert golds_of(tmp_path / "all", [answer, ["7"]], "all_of") == [all_of, "7"]


TEXTS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029")), min_size=1, max_size=5
)


@given(TEXTS)
def test_printed_lists_are_read_back(texts: list[str]) -> None:
    """What json, repr and NumPy print."""
    array = np.array(texts, dtype=object)
    for text in (json.dumps(texts), repr(texts), repr(array), str(array), repr(tuple(texts))):
        assert parse_written(text) == texts, text


@pytest.mark.parametrize("text", ["[1, 2", "['a' ... 'b']", "{1, 2}", "[__import__('os')]", "array(5)", "[" * 2000])
def test_what_is_no_printed_list_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither JSON|nested|left out|no list"):
        parse_written(text)


def test_a_list_that_python_printed_is_read_up_to_a_megabyte() -> None:
    assert parse_written(f"({'1, ' * 1000})") == [1] * 1000
    with pytest.raises(ValueError, match=r"too long \(1200002 characters\) to be read as what Python prints"):
        parse_written(f"({'1, ' * 400_000})")
