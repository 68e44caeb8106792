"""Leave rows out: pass rates, types, duplicates, and what a benchmark has too."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.images import encoded, smooth_noise
from tests.helpers.prepared_sets import rows_of
from vlm_rl.data.images import encode_png
from vlm_rl.data_prep.duplicates import NEAR_BITS, find_duplicates, normalised
from vlm_rl.data_prep.filters import cached
from vlm_rl.data_prep.leakage import BenchmarkIndex
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.records import KeptRow
from vlm_rl.errors import UserError
from vlm_rl.toy.virl_layout import write_virl
from vlm_rl.types import Problem


def test_pass_rates_and_types(tmp_path) -> None:
    rows: list[dict] = [{"question": f"{r}?", "PassRate_32BTrained": r} for r in (-1.0, 0.0, 0.3, 0.7, 1.0)]
    rows.append({"question": "letter", "answer": "B"})
    source = write_virl(tmp_path / "virl", rows, {})
    options = Options(min_pass_rate=0.3, max_pass_rate=0.9, exclude_types=("choice",))
    report = prepare("virl39k", source, tmp_path / "out", options)
    assert [row["difficulty"] for row in rows_of(tmp_path / "out")] == [-1.0, 0.3, 0.7]  # unknown ones stay
    assert report.dropped == {"pass_rate": 2, "answer_type": 1}


@pytest.mark.parametrize(
    "changes", [{"limit": 0}, {"min_pass_rate": 0.8, "max_pass_rate": 0.2}, {"exclude_types": ("word",)}]
)
def test_impossible_options(tmp_path, changes) -> None:
    with pytest.raises(UserError, match="--"):
        prepare("virl39k", write_virl(tmp_path / "virl", [{}], {}), tmp_path / "out", replace(Options(), **changes))


def test_duplicates_conflicts_and_variants(tmp_path) -> None:
    square = smooth_noise(200, 200, seed=5)
    numbered = square.copy()
    numbered.paste((0, 0, 0), (100, 100, 104, 106))  # a small label: nearly the same picture
    images = {
        "a.png": encode_png(square),
        "copy.png": encode_png(square),
        "small.jpg": encoded(square.resize((150, 150)), "JPEG"),
        "numbered.png": encode_png(numbered),
        "other.png": encode_png(smooth_noise(200, 200, seed=6)),
    }

    def row(name: str, answer: str, question: str = "<image>Find $x$.") -> dict:
        return {"question": question, "answer": answer, "image": [f"images/{name}"]}

    rows = [
        row("a.png", "3"),
        row("copy.png", "3"),  # duplicate
        row("small.jpg", "3", "<image> find x"),  # near duplicate
        row("numbered.png", "4"),  # a variant: a different gold
        row("other.png", "3"),  # a different picture
        {"question": "Text?", "answer": "1"},
        {"question": "Text?", "answer": "2"},  # both go
        {"question": "x+2?", "answer": "1"},
        {"question": "x-2?", "answer": "1"},  # a different sign makes a different problem
    ]
    source = write_virl(tmp_path / "virl", rows, images)
    report = prepare("virl39k", source, tmp_path / "out")
    assert report.dropped == {"duplicate": 1, "near_duplicate": 1, "gold_conflict": 2}
    assert [r["id"] for r in rows_of(tmp_path / "out")] == [f"Processed-{n}" for n in (0, 3, 4, 7, 8)]
    assert prepare("virl39k", source, tmp_path / "all", Options(keep_duplicates=True)).kept == 9


@pytest.mark.parametrize(
    ("rows", "kept", "dropped"),
    [
        ([("1", "a?", "3"), ("1", "b?", "3"), ("2", "b?", "3")], ["1", "2"], {"duplicate_id": 1}),
        ([("1", "a?", "3"), ("1", "b?", "3"), ("2", "b?", "4"), ("3", "c?", "3")], ["1", "3"],
         {"duplicate_id": 1, "gold_conflict": 1}),
        ([("1", "a?", "3"), ("1", "a?", "3"), ("2", "b?", "3")], ["1", "2"], {"duplicate": 1}),
        ([("1", "a?", "3"), ("1", "a?", "4"), ("2", "b?", "3")], ["2"], {"gold_conflict": 2}),
    ],
)  # fmt: skip
def test_a_row_with_the_id_of_another_takes_no_problem_with_it(tmp_path, rows, kept, dropped) -> None:
    """A problem stays whose other copy goes for its id; a copy under one id is no worse than any other copy."""
    fields = [{"qid": name, "question": question, "answer": answer} for name, question, answer in rows]
    source = write_virl(tmp_path / "virl", fields, {})
    assert prepare("virl39k", source, tmp_path / "out").dropped == dropped
    assert [row["id"] for row in rows_of(tmp_path / "out")] == kept
    if "duplicate_id" in dropped:
        with pytest.raises(UserError, match="duplicate_id"):
            prepare("virl39k", source, tmp_path / "strict", Options(strict=True))
    else:
        assert prepare("virl39k", source, tmp_path / "strict", Options(strict=True)).dropped == dropped
    ids = [name for name, *_ in rows]
    assert prepare("virl39k", source, tmp_path / "all", Options(keep_duplicates=True)).kept == len({*ids})


def test_twins_among_many_images_of_one_question_are_found_without_a_call_for_each_pair() -> None:
    rng = random.Random(0)
    hashes = [rng.getrandbits(256) for _ in range(3000)]
    near, far = hashes[7] ^ ((1 << NEAR_BITS) - 1), hashes[8] ^ ((1 << NEAR_BITS + 1) - 1)
    answers = ["1"] * 3000 + ["1", "1", "2"]  # the last looks like row 7, and has a different gold
    rows = [
        KeptRow(f"row {n}", f"r{n}", "same text", answer, False, [f"{n}"], [f"{phash:064x}"], [], 0)
        for n, (answer, phash) in enumerate(zip(answers, [*hashes, near, far, near], strict=True))
    ]
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, of: calls.update([event]))
    try:
        dropped = find_duplicates(rows)
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] < 100 * len(rows)  # there are 1,500 pairs for each row
    assert {number: row.reason for number, row in dropped.items()} == {3000: "near_duplicate"}
    assert dropped[3000].detail.startswith("the same text as r7,")


def test_a_whole_row_group_of_duplicates_may_go(tmp_path) -> None:
    """Rows are copied in groups of 16; here the second group is left out whole."""
    rows = [{"question": f"{number % 16}?"} for number in range(32)] + [{"question": "Another?"}]
    report = prepare("virl39k", write_virl(tmp_path / "virl", rows, {}), tmp_path / "out")
    assert (report.kept, report.dropped) == (17, {"duplicate": 16})
    assert [row["question"] for row in rows_of(tmp_path / "out")] == [f"{n}?" for n in range(16)] + ["Another?"]


def test_benchmarks_keep_their_duplicates(tmp_path) -> None:
    row = {"imagename": "a.png", "question": "Which?", "answer": "A", "skill": ["spatial"]}
    source = write_virl(tmp_path / "raw", [], {"a.png": encode_png(smooth_noise(84, 84))})
    (source / "dataset.json").write_text(json.dumps({"v1_0": row, "v1_1": row}))
    report = prepare("logicvista", source, tmp_path / "out")
    assert (report.kept, report.dropped) == (2, {})


def test_a_gold_is_judged_once_under_each_rule() -> None:
    judged: list[tuple[str, object]] = []
    check = cached(lambda problem: bool(judged.append((problem.answer, problem.meta.get("precision"))) or True))
    problem = Problem(id="a", question="?", images=(), answer="2.5", answer_type="float")
    other = replace(problem, id="b", question="other words")
    for row in (problem, other, replace(problem, meta={"precision": 1}), replace(problem, answer="3.5"), other):
        assert check(row)
    assert judged == [("2.5", None), ("2.5", 1), ("3.5", None)]


def test_normalised_text_ignores_dress_and_keeps_signs() -> None:
    assert normalised(r"Find  \left( $X$ \right).") == normalised("find (x)")
    assert normalised("x + 2") != normalised("x - 2")
    assert normalised(r"\text{cm}") == normalised("cm") != normalised("m")


LONG = "A farmer walks nine kilometres every single morning before he feeds the eleven grey horses in his {} barn"


@pytest.fixture
def benchmark(tmp_path) -> Path:
    rows = [
        {"question": LONG.format("red")},
        {"question": "<image>What is x?", "image": ["images/b.png"]},
        {"question": "How many primes divide 2024?"},
        {"question": "<image>Nothing is drawn.", "image": ["images/white.png"]},
    ]
    pictures = {"b.png": smooth_noise(300, 300, seed=8), "white.png": Image.new("RGB", (200, 200), "white")}
    files = {name: encode_png(image) for name, image in pictures.items()}
    source = write_virl(tmp_path / "bench-raw", rows, files)
    prepare("virl39k", source, tmp_path / "bench")
    return tmp_path / "bench"


def test_rows_that_share_text_or_an_image_with_a_benchmark_go(tmp_path, benchmark) -> None:
    rows = [
        {"question": "Listen. " + LONG.format("blue") + "?"},  # 13 words in a row
        {"question": "A farmer walks nine kilometres every single morning."},  # fewer than 13
        {"question": "how many primes divide 2024"},  # short, and the same as a whole
        {"question": "<image>Something else altogether?", "image": ["images/b.jpg"]},  # its picture
        {"question": "<image>What is x?", "image": ["images/c.png"]},  # same short text, a different picture
        {"question": "<image>Nothing to see", "image": ["images/white.png"]},
    ]
    images = {
        "b.jpg": encoded(smooth_noise(300, 300, seed=8).resize((250, 250)), "JPEG"),
        "c.png": encode_png(smooth_noise(300, 300, seed=9)),
        "white.png": encode_png(Image.new("RGB", (300, 300), "white")),
    }
    source = write_virl(tmp_path / "virl", rows, images)
    report = prepare("virl39k", source, tmp_path / "out", Options(against=(benchmark,)))
    assert report.dropped == {"benchmark_overlap": 3}
    assert [row["id"] for row in rows_of(tmp_path / "out")] == [f"Processed-{n}" for n in (1, 4, 5)]
    lines = [json.loads(line) for line in (tmp_path / "out/dropped.jsonl").read_text().splitlines()]
    assert [line["detail"].split()[-1] for line in lines] == [f"bench/Processed-{n}" for n in (0, 2, 1)]
    kept = prepare("virl39k", source, tmp_path / "kept", Options(against=(benchmark,), keep_overlap=True))
    assert (kept.kept, kept.notes["benchmark_overlap"]) == (6, 3)
    # A limit of one row reads a shard that holds them all: only what is in the set is counted.
    options = Options(against=(benchmark,), keep_overlap=True, limit=1)
    first = prepare("virl39k", source, tmp_path / "first", options)
    assert (first.kept, first.notes["benchmark_overlap"]) == (1, 1)
    assert len((tmp_path / "first/dropped.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(("shared", "is_leak"), [(12, False), (13, True)])
def test_thirteen_shared_words_in_a_row_are_a_leak_and_twelve_are_not(shared, is_leak) -> None:
    words = [f"w{number}" for number in range(30)]
    benchmarks = BenchmarkIndex()
    benchmarks.add("bench/1", " ".join(words), [])
    question = " ".join(["Other", *words[5 : 5 + shared], "and an end of its own"])
    assert bool(benchmarks.by_text(question, [])) == is_leak


# 26 characters, or 24 and one word: 13 words each
@pytest.mark.parametrize(("shared", "is_leak"), [(26, True), (25, False)])
@pytest.mark.parametrize("word", ["", "ABC"])
def test_two_characters_without_spaces_between_them_count_as_a_word(shared: int, is_leak: bool, word: str) -> None:
    text = "某商店把进价为每件八十元的商品按标价打九折出售后仍可获利百分之二十问标价是多少元"
    shared -= 2 * bool(word)
    benchmarks = BenchmarkIndex()
    benchmarks.add("bench/1", f"{text[:5]}，{word}{text[5:]}？", [])
    question = f"甲、{word}{text[5 : 5 + shared]}，乙丙丁"
    assert bool(benchmarks.by_text(question, [])) == is_leak
    assert bool(benchmarks.by_text(f"甲、{word}，{text[5:12]}", [])) is False
    benchmarks.add("bench/2", "图中有几只猫？", [])
    assert benchmarks.by_text("图中有几只猫", []) and not benchmarks.by_text("图中有几只狗", [])


def test_stock_phrases_are_not_a_leak(tmp_path, benchmark) -> None:
    # 21 training rows share the words: more than COMMON, so they prove nothing
    rows = [{"question": LONG.format(f"number {n}")} for n in range(21)]
    source = write_virl(tmp_path / "virl", rows, {})
    assert prepare("virl39k", source, tmp_path / "out", Options(against=(benchmark,))).kept == 21
    few = write_virl(tmp_path / "few", rows[:20], {})
    with pytest.raises(UserError, match="benchmark_overlap"):
        prepare("virl39k", few, tmp_path / "out-few", Options(against=(benchmark,)))


def test_a_benchmark_to_compare_with_must_be_prepared(tmp_path) -> None:
    source = write_virl(tmp_path / "virl", [{}], {})
    with pytest.raises(UserError, match=r"--against .*not a prepared set"):
        prepare("virl39k", source, tmp_path / "out", Options(against=(tmp_path,)))


@pytest.mark.parametrize("of_benchmark", ["none", "blank", "typeset"])
@pytest.mark.parametrize("of_training", ["none", "blank", "typeset"])
def test_pictures_that_the_preparation_draws_prove_nothing(tmp_path, of_benchmark, of_training) -> None:
    """Texts that differ in a number look the same when they are drawn; equal texts are a leak however they look."""
    (tmp_path / "bench").mkdir()
    problem = {"problem": "What is the area of a circle of radius 3?", "answer": "28.27", "unique_id": "a"}
    (tmp_path / "bench/test.jsonl").write_text(json.dumps(problem) + "\n")
    prepare("math500", tmp_path / "bench", tmp_path / "math", Options(text_image=of_benchmark))
    questions = ["What is the area of a circle of radius 5?", problem["problem"]]
    source = write_virl(tmp_path / "virl", [{"question": question} for question in questions], {})
    options = Options(text_image=of_training, against=(tmp_path / "math",))
    report = prepare("virl39k", source, tmp_path / "out", options)
    kept = [json.loads(row["meta"]).get("typeset_text", row["question"]) for row in rows_of(tmp_path / "out")]
    assert [question.removeprefix("<image>\n") for question in kept] == questions[:1]
    assert report.dropped == {"benchmark_overlap": 1}
