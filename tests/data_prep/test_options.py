"""Options in every form that tables have them, and golds in every form that names one: the letter, or a refusal."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vlm_rl
from tests.helpers.prepared_sets import manifest_of, rows_of
from vlm_rl.data.golds import with_choices
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.readers.find_data import find_data
from vlm_rl.data_prep.readers.guess import guess
from vlm_rl.data_prep.readers.option_cells import RowOptions, letter_of, options_of
from vlm_rl.errors import UserError

TREES = ["red oak", "elm", "ash, white"]
ORDER = [2, 0, 1]  # the right option of each row

STORED: dict[str, Any] = {
    "list": TREES,
    "objects": [{"id": name, "content": text} for name, text in zip("ABC", TREES, strict=True)],
    "key_value": [{"key": name, "value": text} for name, text in zip("abc", TREES, strict=True)],
    "one_key_objects": [{name: text} for name, text in zip("ABC", TREES, strict=True)],
    "object": dict(zip("abc", TREES, strict=True)),
    "hub": {"label": ["A", "B", "C"], "text": TREES},
    "own_labels": [f"{name}) {text}" for name, text in zip("ABC", TREES, strict=True)],
    "json_text": json.dumps(TREES),
    "python_text": str(TREES),
    "python_tuple": str(tuple(TREES)),
    "numpy_text": str(np.array(TREES, dtype=object)),
    "numpy_repr": repr(np.array(TREES)),
    "object_text": str(dict(zip("ABC", TREES, strict=True))),
    "lettered_lines": "A. red oak\nB. elm\nC. ash, white",
    "bracketed": "(A) red oak (B) elm (C) ash, white",
    "small_letters": "a) red oak; b) elm; c) ash, white",
    "numbered": "1. red oak\n2. elm\n3. ash, white",
    "semicolons": "red oak; elm; ash, white",
    "bars": "red oak | elm | ash, white",
    "lines": "red oak\nelm\nash, white",
}
COLUMNS = {
    "letters": ["A", "B", "C"],
    "numbers": ["option1", "option2", "option3"],
    "words": ["option_a", "option_b", "option_c"],
    "spaced": ["Choice A", "Choice B", "Choice C"],
    "short": ["opa", "opb", "opc"],
    "endings": ["ending0", "ending1", "ending2"],
}
GOLDS: dict[str, Callable[[int], Any]] = {
    "letter": lambda n: "ABC"[n],
    "small": lambda n: "abc"[n],
    "bracketed": lambda n: f"({'ABC'[n]})",
    "point": lambda n: f"{'ABC'[n]}. {TREES[n]}",
    "colon": lambda n: f"{'ABC'[n]}: {TREES[n]}",
    "letter_and_text": lambda n: f"({'ABC'[n]}) {TREES[n]}",
    "named": lambda n: f"Option {'ABC'[n]}",
    "column": lambda n: f"option_{'abc'[n]}",
    "boxed": lambda n: rf"\boxed{{{'ABC'[n]}}}",
    "text": lambda n: TREES[n],
    "loud_text": lambda n: TREES[n].upper(),
    "from_0": lambda n: n,
    "from_1": lambda n: n + 1,
    "from_1_text": lambda n: str(n + 1),
    "from_1_float": lambda n: n + 1.0,
    "list_of_one": lambda n: ["ABC"[n]],
}


def prepared(file: Path, answer_form: str = "", **given: list[str]) -> list[dict]:
    mapping = guess(file, find_data(file), given, answer_form=answer_form)
    prepare("generic", file, file.parent / "set", mapping=mapping)
    return rows_of(file.parent / "set")


def written(folder: Path, rows: list[dict]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rows_with(golds: list, options: Any) -> list[dict]:
    return [{"question": f"Which is tree {n}?", "answer": gold, "options": options} for n, gold in enumerate(golds)]


@pytest.mark.parametrize("stored", STORED)
def test_options_in_every_form_are_in_the_question_and_the_gold_is_a_letter(stored: str, tmp_path: Path) -> None:
    file = written(tmp_path, rows_with(["ABC"[n] for n in ORDER], STORED[stored]))
    rows = prepared(file)
    assert [row["question"] for row in rows] == [with_choices(f"Which is tree {n}?", TREES) for n in range(3)]
    assert [(row["answer"], row["answer_type"], row["choices"]) for row in rows] == [
        ("ABC"[n], "choice", TREES) for n in ORDER
    ]


@pytest.mark.parametrize("gold", GOLDS)
@pytest.mark.parametrize("stored", ["list", "object", "semicolons"])
def test_a_gold_in_every_form_becomes_the_letter(stored: str, gold: str, tmp_path: Path) -> None:
    rows = prepared(written(tmp_path, rows_with([GOLDS[gold](n) for n in ORDER], STORED[stored])), answer=["answer"])
    assert [(row["answer"], row["answer_type"]) for row in rows] == [("ABC"[n], "choice") for n in ORDER]


@pytest.mark.parametrize("names", COLUMNS)
@pytest.mark.parametrize("gold", ["letter", "text", "from_0", "colon"])
def test_options_may_have_a_column_each_with_these_names(names: str, gold: str, tmp_path: Path) -> None:
    columns = dict(zip(COLUMNS[names], TREES, strict=True))
    rows = [{"question": f"Which {n}?", **columns, "answer": GOLDS[gold](n)} for n in ORDER]
    with (tmp_path / "rows.csv").open("w", newline="") as stream:
        table = csv.DictWriter(stream, [*rows[0]])
        table.writeheader()
        table.writerows(rows)
    got = prepared(tmp_path / "rows.csv")
    assert [(row["answer"], row["choices"]) for row in got] == [("ABC"[n], TREES) for n in ORDER]


def test_the_numbers_of_columns_are_labels_and_a_gap_shifts_no_letter(tmp_path: Path) -> None:
    file = written(tmp_path, [{"question": "Which?", "option1": "elm", "option2": "ash", "answer": "1"}])
    assert prepared(file)[0]["answer"] == "A"
    (tmp_path / "gap").mkdir()
    file = written(tmp_path / "gap", [{"question": "Which?", "A": "elm", "B": None, "C": "ash", "answer": "C"}])
    assert [(row["answer"], row["choices"]) for row in prepared(file)] == [("B", ["elm", "ash"])]


@pytest.mark.parametrize(
    ("golds", "options", "forms"),
    [
        ([1, 2, 1], TREES, {"option_number": "BCB", "option_number_from_1": "ABA"}),
        (["1", "1"], STORED["semicolons"], {"option_number": "BB", "option_number_from_1": "AA"}),
        (["A", "C"], ["C", "A", "B"], {"plain": "AC", "option_text": "BA"}),
        (["1", "2"], {"1": "2", "2": "3", "3": "1"}, {"plain": "AB", "option_text": "CA"}),
        ([2, 3, 1], [2, 3, 1], {"option_text": "ABC", "option_number_from_1": "BCA"}),
        (["0", "2"], ["2", "0", "1"], {"option_text": "BA", "option_number": "AC"}),
        ([2, 1], ["2", "1", "4"], {"option_text": "AB", "option_number": "CB", "option_number_from_1": "BA"}),
        (["1", "2"], "3; 1; 2", {"option_text": "BC", "option_number_from_1": "AB"}),
    ],
)
def test_two_readings_are_asked_about(golds: list, options: Any, forms: dict[str, str], tmp_path: Path) -> None:
    file = written(tmp_path, rows_with(golds, options))
    with pytest.raises(UserError, match=" or ".join(f"--answer-form {form}" for form in forms)):
        prepared(file)
    for form, letters in forms.items():
        (tmp_path / form).mkdir()
        rows = prepared(written(tmp_path / form, rows_with(golds, options)), form)
        assert "".join(row["answer"] for row in rows) == letters


@pytest.mark.parametrize(
    ("golds", "options", "letters"),
    [
        ([1, 2, 3], [1, 2, 3], "ABC"),  # from 0 there is no third, and from 1 it is the same
        (["10", "30"], ["10", "20", "30"], "AC"),
        (["2", "7"], ["7", "2", "9"], "BA"),
    ],
)
def test_options_that_are_numbers_are_read_as_texts_where_nothing_else_fits(
    golds: list, options: Any, letters: str, tmp_path: Path
) -> None:
    rows = prepared(written(tmp_path, rows_with(golds, options)))
    assert "".join(row["answer"] for row in rows) == letters


@pytest.mark.parametrize(
    ("gold", "words"),
    [
        ("E", "'E' is none of the 3 options"),
        ("A. elm", "is the text of B"),
        ("oak", "none of the 3 options"),
        ("7", "answer_form says from where it is counted"),
    ],
)
def test_a_gold_that_is_no_option_drops_its_row_by_name(gold: str, words: str, tmp_path: Path) -> None:
    file = written(tmp_path, rows_with(["A", "elm", gold], TREES))
    assert [row["answer"] for row in prepared(file)] == ["A", "B"]
    assert manifest_of(tmp_path / "set")["dropped"] == {"no_option": 1}
    assert words in json.loads((tmp_path / "set/dropped.jsonl").read_text())["detail"]


@pytest.mark.parametrize("options", ["red oak, elm", {"x": [1]}, [["elm"]], [str(n) for n in range(12)], 4])
def test_options_that_cannot_be_read_are_refused_by_name(options: Any, tmp_path: Path) -> None:
    file = written(tmp_path, rows_with(["A", "B"], options))
    with pytest.raises(UserError, match=r"'options' looks like the options, but cannot be read: .*--choices none"):
        prepared(file)
    assert [row["choices"] for row in prepared(file, choices=["none"])] == [[], []]


@pytest.mark.parametrize("stored", ["list", "objects", "object", "python_text"])
def test_letters_beside_a_list_of_any_name_are_asked_about(stored: str, tmp_path: Path) -> None:
    rows = [
        {"question": f"Which is tree {n}?", "answer": "ABC"[n], "candidates": STORED[stored], "tags": ["botany"]}
        for n in ORDER
    ]
    file = written(tmp_path, rows)
    with pytest.raises(UserError, match=r"'candidates' may hold .*: --choices candidates, else --choices none"):
        prepared(file)
    assert [row["choices"] for row in prepared(file, choices=["candidates"])] == [TREES] * 3
    (tmp_path / "none").mkdir()
    file = written(tmp_path / "none", rows)
    assert [row["choices"] for row in prepared(file, choices=["none"])] == [[]] * 3


def test_a_list_without_room_for_the_letters_is_not_asked_about(tmp_path: Path) -> None:
    rows = [{"question": f"Which is {n}?", "answer": "ABD"[n], "tags": ["oak", "elm", "ash"]} for n in range(3)]
    assert [row["answer"] for row in prepared(written(tmp_path, rows))] == ["A", "B", "D"]


def test_options_in_the_question_make_letters_too(tmp_path: Path) -> None:
    question = "Which?\nA. red oak\nB. elm"
    golds = ["A. red oak", "elm", "B", "D", "5"]
    file = written(tmp_path, [{"question": f"{n} {question}", "answer": gold} for n, gold in enumerate(golds)])
    rows = prepared(file)
    assert [(row["answer"], row["choices"]) for row in rows] == [
        *(("A", ["red oak", "elm"]), ("B", ["red oak", "elm"]), ("B", ["red oak", "elm"]), ("5", []))
    ]
    assert manifest_of(tmp_path / "set")["dropped"] == {"no_option": 1}


def test_rows_without_options_keep_their_numbers(tmp_path: Path) -> None:
    rows = [*rows_with([3, 1], TREES), {"question": "How many?", "answer": 12, "options": []}]
    assert [row["answer"] for row in prepared(written(tmp_path, rows))] == ["C", "A", "12"]


def test_several_letters_stay_several(tmp_path: Path) -> None:
    rows = prepared(written(tmp_path, rows_with(["A, C", "BC", "A and B"], TREES)))
    assert [row["answer"] for row in rows] == ["A, C", "B, C", "A, B"]
    assert {row["answer_type"] for row in rows} == {"choice"}
    seen = [
        vlm_rl.grade(rf"\boxed{{{box}}}", "A, C", answer_type="choice", choices=rows[0]["choices"]).correct
        for box in ("A, C", "AC", "C and A", "A or C", "A", "A, B")
    ]
    assert seen == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    "texts", [["1: 2", "2: 3"], ["1.5", "2.5"], ["A. Smith", "C. Jones"], ["x;y", "y;x"], ["(1, 2)", "(2, 1)"]]
)
def test_what_only_looks_like_a_label_stays(texts: list[str]) -> None:
    assert options_of({"options": texts}, ["options"]) == RowOptions(tuple(texts))


@pytest.mark.parametrize("first", [0, 1])
def test_ten_numbered_options_keep_the_order_of_their_numbers(first: int) -> None:
    texts = [f"text {number}" for number in range(10)]
    row = {"options": {str(number + first): text for number, text in enumerate(texts)}}
    options = options_of(row, ["options"])
    assert list(options.texts) == texts
    assert letter_of(str(first + 9), options, "plain") == "J"
