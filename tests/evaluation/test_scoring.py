"""Benchmark scores: rules against hand-worked rows and published verdicts, metrics against hand arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import shared_data
from vlm_rl.cli import main
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks import dynamath, mathvision, mathvista, metrics, wemath
from vlm_rl.evaluation.benchmarks.arithmetic import value_of
from vlm_rl.evaluation.benchmarks.extraction import final_answer, final_letters
from vlm_rl.evaluation.benchmarks.items import Answer, Judgement, Question, Row
from vlm_rl.evaluation.benchmarks.lettered import judge_logicvista, judge_mathverse, read_mathverse
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.evaluation.benchmarks.score import judge_all, summarise_rows
from vlm_rl.evaluation.benchmarks.score_command import read_answers, read_questions
from vlm_rl.grading.grader import Grader
from vlm_rl.stats import score_interval
from vlm_rl.templates import TEMPLATES


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=1, timeout=5.0) as grader:
        yield grader


def row(name: str, right: bool, *, problem: str = "", part: str = "", sample: int = 0, **facets: str) -> Row:
    shown = {facet: tuple(value.split("+")) for facet, value in facets.items()}
    question = Question(name, "1", "integer", facets=shown, problem=problem, part=part)
    judgement = Judgement("correct" if right else "wrong", "1", "")
    return Row(question, Answer(name, "", sample), judgement, has_box=True)


# -- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1/2", 0.5),
        (r"\frac{3}{4}-\frac{1}{4}", 0.5),
        (r"$\dfrac{5}{3}$", 5 / 3),
        ("1,000", 1000),
        ("1:2", 0.5),
        ("-2^2", -4),
        ("2^{-1}", 0.5),
        ("45^2", 2025),
        ("5!", 120),
        (r"\sqrt{16}", 4.0),
        (r"3\sqrt{2}", 3 * math.sqrt(2)),
        (r"\sqrt[3]{8}", 2.0),
        (r"1/2\pi", 1 / (2 * math.pi)),
        (r"2\times(3+4)", 14),
        ("2.50", 2.5),
        ("3.0", 3),
        ("6/2", 3.0),  # a quotient is no whole number
        (r"10\%", 0.1),
        (r"7\frac{1}{2}", 3.5),  # a product, as the published reader has it
        (r"\log_{2}{8}", 3.0),
        (r"\binom{5}{2}", 10),
        ("3)", 3),
    ],
)
def test_a_closed_expression_has_its_value(text: str, value: float) -> None:
    assert value_of(text) == value and type(value_of(text)) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "5m", "tuesday", "1,2", "5>3", "x=5", "1/0", r"\sqrt{-1}", "(1", r"\frac{1}", "e", "2e", "|2-5|"),
        *("9^{9^{9^9}}", "(" * 3000 + "1" + ")" * 3000, "(10^9)!", "1+" * 4000 + "1", "__import__('os')", "((1)"),
        *("(" * 140 + "1" + ")" * 140, "10^{400}/3", "10%", "π", "−5", r"\ln2", r"\sqrt2", r"\binom{10^8}{5}"),
    ],
)
def test_anything_else_has_none_and_ends_quickly(text: str) -> None:
    assert value_of(text) is None


@given(st.integers(-99, 99), st.integers(1, 99), st.integers(-99, 99), st.sampled_from("+-*"))
def test_values_are_those_of_fractions(top: int, bottom: int, other: int, sign: str) -> None:
    expected = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__}[sign]
    value = value_of(rf"\frac{{{top}}}{{{bottom}}}{sign}({other})")
    assert value == pytest.approx(float(expected(Fraction(top, bottom), Fraction(other))), abs=1e-12)


# -- MathVision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "found"),
    [  # responses of InternLM-XComposer2-VL, Qwen-VL-Plus and Gemini-Pro with the authors' own extraction (MIT)
        (r"The answer is \boxed{D}.", "d"),
        (r"There are two different digits in this picture: 0 and 5. The answer is \boxed{2}.", "2"),
        ("3.", "3"),
        ("The answer is (D).", "d"),
        (r"The answer is \textbf{C}.", "bfc"),
        (r"4\boxed{.}", "0"),
        (r"\boxed{(C)}", "c"),
        (r"\boxed{<image1>}", "<image1>"),
        ("The ant gets to the bee.", "theantgetstothebee"),
        ("The answer is \\text{E}.\\]\nSo, the final answer is $\\boxed{E}$.", "e"),
        (r"they ate $\boxed{10}$ a day, which is $10 \times 3 = \boxed{30}$ carrots.The answer is: 30", "30"),
        ("Therefore, the answer is (E).", "e"),
        (r"$35 \mathrm{~km}$", r"35\mathrm{~}"),
        ("Square D", "squared"),
        ("1 Euro", "1euro"),
        ("So it must be (B).", "b"),
        (r"so $\boxed{x = 5}$", "5"),
        ("we make 5 - 1 = 4 cuts.\nThe answer is: 4", "4"),
        (r"\(\boxed{D.}\)", "d"),  # the following are Gemini-Pro's
        (r"\(\boxed{ \text{(A)} }\)", "a"),
        (r"\boxed{None of the above choices.}", "noneoftheabovechoices"),
        ("576.\n\nThe answer is (A) $6 \\times 6 \\times 6 \\times 6$.", r"a6\times6\times6\times6"),
        (r"$$5 + 5 + \frac{14}{3} = \frac{44}{3}$$ \(\boxed{\frac{44}{3}}\)", r"\frac{44}{3}"),
        (r"the diameter of each hole is \(\boxed{\sqrt{2}}\).", r"\sqrt{2}"),
        (r"\(\boxed{b(\sqrt{2}+1)}\)", r"b(\sqrt{2}+1)"),
        (r"\boxed{\text{No solution}}", "{nosolution}"),
        (r"is $\boxed{\frac{11}{2}}$ units.The answer is: \frac{11}{2}", r"\frac{11}{2}}.theansweris:\frac{11}{2"),
        (r"look like $\boxed{\text{(C)}}$. The answer is: \text{(C)}.", "c}.theansweris:{c"),
    ],
)
def test_mathvision_extracts_what_its_authors_did(response: str, found: str) -> None:
    assert mathvision.extract(response) == found


@pytest.mark.parametrize(
    ("gold", "found", "equal"),
    [
        ("B", "b", True),
        ("0.001", "0", True),  # two digits
        ("0.006", "0", False),
        ("1:2", r"\frac{1}{2}", True),
        ("(3,-4)", "(3.0,-4)", True),
        ("(3,-4)", "(6/2,-4)", False),  # texts of values are compared, and a quotient is 3.0
        ("[0,1)", "[0,1)", True),
        ("5.5", r"\frac{11}{2}}.theansweris:\frac{11}{2", True),  # read up to the stray brace, as published
        ("C", "c}.theansweris:{c", False),
        ("[0,1)", "(0,1)", False),
        ("(1,\\infty)", "(2-1,\\infty)", True),
        ("$18$", "18", True),
        ("60", "", False),
        ("  ", " ", False),
        ("x+1", "1+x", False),
    ],
)
def test_mathvision_equality(gold: str, found: str, equal: bool) -> None:
    assert mathvision.is_equal(gold, found) is equal


def test_mathvision_takes_the_letter_or_its_value_and_says_where_it_is_unsure() -> None:
    question = mathvision.read_question(
        {"id": 7, "options": ["5", r"2\frac{1}{2}"], "answer": "B", "subject": "s", "level": 3}, "row"
    )
    assert [mathvision.judge(question, Answer("7", text)).verdict for text in ("B", "(B)", r"\boxed{1}", "5")] == [
        "correct",
        "correct",
        "correct",
        "wrong",
    ]
    assert mathvision.judge(question, Answer("7", r"\boxed{2>1}")).note.startswith("may differ")
    assert mathvision.judge(question, Answer("7", "B")).note == ""
    assert question.facets == {"subject": ("s",), "level": ("3",)}


# -- MathVista ----------------------------------------------------------------------------------------


def vista(kind: str, gold: str, *choices: str, precision: float | None = None) -> Question:
    return mathvista.read_question(
        {
            "pid": "1",
            "answer": gold,
            "answer_type": kind,
            "question_type": "multi_choice" if choices else "free_form",
            "choices": list(choices) or None,
            "precision": precision,
            "metadata": {"task": "t", "skills": ["a", "b"]},
        },
        "row",
    )


@pytest.mark.parametrize(
    ("question", "extraction", "normal"),
    [
        (vista("text", "two", "one", "two"), "B", "two"),
        (vista("text", "two", "one", "two"), "(b) two", "two"),
        (vista("text", "two", "one", "two"), "tw", "two"),
        (vista("text", "no", "yes", "no"), "", "no"),  # nearest to nothing is the shortest
        (vista("text", "97", "97", "102", "107", "122"), "92.5", "97"),  # as in the published output of Bard
        (vista("integer", "3"), "3.9", "3"),
        (vista("integer", "3"), "three", None),
        (vista("float", "1.2", precision=1.0), "1.249", "1.2"),  # a precision stored as a float
        (vista("float", "0.21", precision=2), "0.214", "0.21"),
        (vista("float", "0.21", precision=2), "inf", "inf"),
        (vista("integer", "3"), "1e999", None),
        (vista("list", "[1, 2]"), "[1, 2]", "[1, 2]"),
    ],
)
def test_mathvista_normaliser(question: Question, extraction: str, normal: str | None) -> None:
    assert mathvista.normalise(question, extraction) == normal


def test_mathvista_free_points_are_marked() -> None:
    judged = mathvista.judge(vista("text", "no", "yes", "no"), Answer("1", "", extraction=""))
    assert (judged.verdict, judged.note) == ("correct", "free point")
    assert mathvista.judge(vista("text", "yes", "yes", "no"), Answer("1", "", extraction="")).verdict == "wrong"


@given(st.text("ab", max_size=6), st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    distance = mathvista.edit_distance
    assert (distance(a, b) == 0) == (a == b) and distance(a, b) == distance(b, a)
    assert distance(a, c) <= distance(a, b) + distance(b, c)
    assert abs(len(a) - len(b)) <= distance(a, b) <= max(len(a), len(b))


def test_edit_distance_by_hand() -> None:
    assert mathvista.edit_distance("kitten", "sitting") == 3 and mathvista.edit_distance("", "abc") == 3


# -- letters and final answers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "letters"),
    [
        (r"so \boxed{B}", ("B",)),
        ("The correct answer is (C) because of it.", ("C",)),
        ("Answer: B, D", ("B", "D")),
        ("The answer is D and B.", ("B", "D")),
        ("Because of the angle", ()),
        ("<think>\\boxed{A}</think>\nE", ("E",)),
        ("Answer: Apples", ()),
        ("", ()),
    ],
)
def test_letters_that_a_response_ends_on(response: str, letters: tuple[str, ...]) -> None:
    assert final_letters(response) == letters


def test_final_answer_prefers_the_box_then_the_phrase_then_the_line() -> None:
    assert final_answer(r"The answer is 4. \boxed{5}") == "5"
    assert final_answer("The answer is 4.\nI hope so") == "4"
    assert final_answer("first\n**7**") == "7"


def test_logicvista_compares_sets() -> None:
    question = Question("v1_0", "B, D", "choice")
    assert [judge_logicvista(question, Answer("v1_0", t)).verdict for t in ("Answer: D, B", "B", "", "C")] == [
        "correct",
        "wrong",
        "wrong",
        "wrong",
    ]
    assert judge_logicvista(Question("v1_1", "C", "choice"), Answer("v1_1", "x ASSISTANT: c")).verdict == "correct"
    assert judge_logicvista(Question("v1_1", "F", "choice"), Answer("v1_1", "F")).verdict == "wrong"  # as published


def test_mathverse_hands_free_answers_to_the_grader() -> None:
    assert judge_mathverse(Question("1", "9", "integer"), Answer("1", "The answer is 9.")) == "9"
    judged = judge_mathverse(Question("1", "D", "choice"), Answer("1", r"\boxed{D}"))
    assert isinstance(judged, Judgement) and judged.verdict == "correct"
    row = {"sample_index": "521", "answer": "(D)", "question_type": "multi-choice"}
    assert read_mathverse(row, "row").gold == "D"
    both = judge_mathverse(Question("1", "D", "choice"), Answer("1", "Answer: B, D"))
    assert isinstance(both, Judgement) and both.verdict == "wrong"  # two letters are no choice


# -- We-Math --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "whole", "strict", "loose"),
    [
        ([True, True], True, "CM", "CM"),
        ([True, False], True, "RM", "CM"),
        ([False, False], True, "RM", "RM"),
        ([True, True], False, "IG", "IG"),
        ([True, False], False, "IK", "IK"),
        ([False, False, False], False, "IK", "IK"),
    ],
)
def test_the_four_cases(steps: list[bool], whole: bool, strict: str, loose: str) -> None:
    assert wemath.case_of(steps, whole, loose=False) == strict
    assert wemath.case_of(steps, whole, loose=True) == loose


def test_wemath_score_by_hand() -> None:
    """CM, strict RM (loose CM), IG, IK and one problem without its second step: four count."""
    table = {"2steps_1": "111", "2steps_2": "101", "2steps_3": "110", "3steps_4": "0110"}
    rows = [
        row(f"{problem}-{part}", verdict == "1", problem=problem, part=part)
        for problem, verdicts in table.items()
        for part, verdict in zip([*map(str, range(1, len(verdicts))), "multi"], verdicts, strict=True)
    ]
    rows += [row("2steps_9-1", True, problem="2steps_9", part="1"), row("x", True, problem="2steps_9", part="multi")]
    found = metrics.scores("wemath", rows)
    assert found["score_strict"]["score"] == (1 + 0 + 0.5 + 0) / 4
    assert found["score_loose"]["score"] == (1 + 1 + 0.5 + 0) / 4
    assert found["rates_strict"] == {"IK": 0.25, "IG": 0.25, "CM": 0.25, "RM": 0.5}
    assert found["rates_loose"]["RM"] == 0
    assert found["incomplete_problems"] == 1
    parts = {"2steps_1": 1.0, "2steps_2": 0.0, "2steps_3": 0.5, "3steps_4": 0.0}
    assert metrics.headline_parts("wemath", rows) == parts
    # S1: all ten steps, those of the incomplete problem too; S2 and S3: the wholes of two and of three steps
    assert [found[name]["score"] for name in ("S1", "S2", "S3")] == [8 / 10, 3 / 4, 0]
    # (n - IG/2 - RM - IK) / n, as published
    cases = found["cases_strict"]
    assert found["score_strict"]["score"] == (4 - 0.5 * cases["IG"] - cases["RM"] - cases["IK"]) / 4


@pytest.mark.parametrize(
    ("response", "letter"),
    [("Answer: C", "C"), ("<Answer>: <B>.", "B"), ("Answer A. Answer: (D)", None), ("G", "G"), ("I think", None)],
)
def test_wemath_reads_the_first_character_after_the_last_answer(response: str, letter: str | None) -> None:
    assert wemath.judge(Question("x", "C", "choice"), Answer("x", response)).extracted == letter


# -- DynaMath -------------------------------------------------------------------------------------------


def test_dynamath_worst_case_by_hand() -> None:
    """Seed 1: all right; seed 2: one of two right. Average 3/4, worst case 1/2, robustness 2/3."""
    rows = [row(f"{s}-v{v}", right, problem=s, part=v) for s, v, right in [("1", "1", True), ("1", "2", True)]]
    rows += [row("2-v1", True, problem="2", part="1"), row("2-v2", False, problem="2", part="2")]
    found = metrics.scores("dynamath", rows)
    assert found["average"]["score"] == 0.75 and found["worst_case"]["score"] == 0.5
    assert found["reasoning_robustness"] == pytest.approx(2 / 3) and found["num_variants"] == [2]
    assert metrics.headline_parts("dynamath", rows) == {"1": 1.0, "2": 0.0}
    assert metrics.headline_parts("mathvista", rows) == {}
    # With several samples a variant counts for the worst case only if all of them are right.
    rows += [row("1-v2", False, problem="1", part="2", sample=1)]
    assert metrics.scores("dynamath", rows)["worst_case"]["score"] == 0


@pytest.mark.parametrize(
    ("kind", "gold", "response", "verdict"),
    [
        ("float", "2.0944", '{"solution": "s", "short answer": "2.094"}', "correct"),
        ("float", "2.0944", '{"solution": "s", "short answer": "2.096"}', "wrong"),
        ("float", "6.283", '```json\n{"short answer": "2π"}\n```', "correct"),
        ("float", "7", '{"short answer": "7 cm"}', "correct"),
        ("float", "7", "no JSON here", "wrong"),
        ("choice", "B", '{"short answer": "(B) five"}', "correct"),
        ("choice", "B", '{"short answer": "Because"}', "correct"),  # the published rule looks into three characters
        ("choice", "B", '{"short answer": "The B"}', "wrong"),  # and no further
        ("text", "even", '{"short answer": "not even"}', "correct"),
        ("float", "7", "so\n72", "correct"),  # without JSON the last line, less its last character
    ],
)
def test_dynamath_rule(kind: str, gold: str, response: str, verdict: str) -> None:
    question = Question("1-v1", gold, kind)  # type: ignore[arg-type]
    assert dynamath.judge(question, Answer("1-v1", response)).verdict == verdict


def test_dynamath_free_points() -> None:
    assert dynamath.judge(Question("1", "even", "text"), Answer("1", "", extraction="not even")).note == "free point"
    assert dynamath.judge(Question("1", "even", "text"), Answer("1", "", extraction="even")).note == ""


# -- metrics ----------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_the_draws(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([i < right for i in range(n)], k))
    assert metrics.pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_avg_and_pass_at_k_by_hand() -> None:
    """Four samples each; 2 and 0 right: avg@4 = 1/4, pass@2 = (1 - 1/6)/2 = 5/12, pass@4 = 1/2."""
    rows = [row("a", i < 2, sample=i) for i in range(4)] + [row("b", False, sample=i) for i in range(4)]
    found = metrics.scores("aime24", rows)
    assert found["accuracy"]["score"] == 0.25 and found["accuracy"]["n"] == 2
    assert found["pass@1"]["score"] == 0.25
    assert found["pass@2"]["score"] == pytest.approx(5 / 12) and found["pass@4"]["score"] == 0.5
    three = metrics.scores("aime24", [one for one in rows if one.answer.sample < 3])
    assert [name for name in three if name.startswith("pass")] == ["pass@1", "pass@2", "pass@3"]  # k itself, always


def test_intervals_are_those_of_the_bootstrap_with_its_seed() -> None:
    scores = np.linspace(0, 1, 41) ** 2  # with so many values another seed has another interval
    found = metrics.with_interval(scores)
    assert found == {"score": scores.mean(), "n": 41, "interval": list(score_interval(scores, seed=0))}
    assert found["interval"] != metrics.with_interval(scores, seed=1)["interval"]


def test_health_by_hand() -> None:
    """Five responses to two questions: one cut of the three whose end is known, two boxes, one empty."""
    verdicts = ["correct", "no_answer", "timeout", "error", "correct"]
    notes, stops = ["free point", "", "", "", "published verdict"], ["length", "stop", None, "stop", None]
    rows = [
        Row(
            Question("ab"[i % 2], "1", "integer"),
            Answer("ab"[i % 2], " " if i == 2 else "x", sample=i // 2, stop_reason=stop),
            Judgement(verdict, None, "", note),  # type: ignore[arg-type]
            has_box=i < 2,
        )
        for i, (verdict, note, stop) in enumerate(zip(verdicts, notes, stops, strict=True))
    ]
    assert metrics.health(rows) == {
        "n": 2,
        "num_responses": 5,
        "k": 3,
        "k_min": 2,
        "box_share": 2 / 5,
        "truncated_share": 1 / 3,
        "empty_share": 1 / 5,
        **dict.fromkeys(("no_answer", "timeouts", "errors", "published_verdicts", "free_points"), 1),
    }


def test_facets_count_a_question_in_each_of_its_values() -> None:
    rows = [row("a", True, skills="x+y", task="t"), row("b", False, skills="y", task="t")]
    tables = metrics.facet_tables(rows)
    assert {value: (cell["score"], cell["n"]) for value, cell in tables["skills"].items()} == {
        "x": (1.0, 1),
        "y": (0.5, 2),
    }
    assert tables["task"]["t"]["score"] == 0.5


# -- files and the command ------------------------------------------------------------------------------


def write(path: Path, tree: object) -> Path:
    if isinstance(tree, str):
        path.write_text(tree, encoding="utf-8")
        return path
    lines = isinstance(tree, list) and path.suffix == ".jsonl"
    text = "\n".join(map(json.dumps, tree)) if lines else json.dumps(tree)  # type: ignore[arg-type]
    path.write_text(text, encoding="utf-8")
    return path


def score(tmp_path: Path, benchmark: str, mode: str, **files: object) -> dict:
    arguments = ["score", "--benchmark", benchmark, "--mode", mode, "--json", str(tmp_path / "score.json")]
    for flag, paths in files.items():
        arguments += [f"--{flag}", *map(str, paths if isinstance(paths, list) else [paths])]
    assert main(arguments) == 0
    return json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))


def test_published_mathvision_rows_keep_their_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotations = write(
        tmp_path / "test.jsonl",
        [
            {"id": "1", "options": [], "answer": "60", "level": 2, "subject": "arithmetic"},
            {"id": "2", "options": ["A", "B"], "answer": "A", "level": 1, "subject": "counting"},
            {"id": "3", "options": ["$1$", "$2$"], "answer": "B", "level": 1, "subject": "counting"},
        ],
    )
    responses = write(
        tmp_path / "model.jsonl",
        [
            {"id": "1", "response": "It is $\\boxed{60}$.", "model_answer": "60", "correct": True},
            {"id": "2", "response": "The answer is (B).", "model_answer": "b", "correct": False},
            {"id": "3", "response": "2", "model_answer": "2", "correct": False},  # wrong on purpose
        ],
    )
    official = score(tmp_path, "mathvision", "official", annotations=annotations, responses=responses)
    assert official["rule"] == "official" and official["scores"]["accuracy"]["score"] == pytest.approx(2 / 3)
    assert official["published_accuracy"] == pytest.approx(1 / 3) and official["judged_otherwise"] == ["3"]
    assert [r["verdict"] for r in official["rows"]] == ["correct", "wrong", "correct"]
    assert [r["category"] for r in official["rows"]] == ["arithmetic", "counting", "counting"]  # the first facet
    assert official["by"]["subject"]["counting"]["n"] == 2
    printed = capsys.readouterr().out
    for part in (
        "66.67 [",
        "n 3 questions",
        "with a box 33.3%",
        "truncated unknown",
        "timeouts 0",
        "otherwise here: 1: 3",
    ):
        assert part in printed
    strict = score(tmp_path, "mathvision", "strict", annotations=annotations, responses=responses)
    assert strict["scores"]["accuracy"]["score"] == pytest.approx(1 / 3) and strict["no_answer"] == 2


def test_mathvista_starts_from_the_shipped_extraction(tmp_path: Path) -> None:
    fields = {"question_type": "free_form", "answer_type": "integer", "precision": None, "choices": None}
    tree = {
        "1": {**fields, "pid": "1", "answer": "3", "response": "?", "extraction": "3.2", "metadata": {"task": "t"}},
        "2": {**fields, "answer": "3", "response": r"\boxed{3}", "extraction": "", "metadata": {"task": "t"}},
    }
    found = score(tmp_path, "mathvista", "official", responses=write(tmp_path / "out.json", tree))
    assert [r["verdict"] for r in found["rows"]] == ["correct", "wrong"]
    assert (found["rule"], found["shipped_extractions"]) == ("official", 2)
    del tree["2"]["extraction"]
    found = score(tmp_path, "mathvista", "official", responses=write(tmp_path / "out.json", tree))
    assert [r["verdict"] for r in found["rows"]] == ["correct", "correct"] and found["rule"] == "emulated"


def test_dynamath_trials_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for trial, gold in (("trial2", "2"), ("trial10", "3")):
        (tmp_path / trial).mkdir()
        rows = {"5": {"question": "q", "answer": gold, "answer_type": "float", "subject": "s", "level": "l"}}
        write(tmp_path / trial / "dataset.json", rows)
    (tmp_path / "answers_trial10.csv").write_text('id,response\n5,"{""short answer"": ""3""}"\n')
    report = {"5": {"response": {"solution": "s", "short answer": "4"}, "result": "fail"}}
    answers = [write(tmp_path / "report_trial2.json", report), tmp_path / "answers_trial10.csv"]
    found = score(tmp_path, "dynamath", "official", annotations=tmp_path, responses=answers)
    assert {r["id"]: r["verdict"] for r in found["rows"]} == {"5-v2": "wrong", "5-v10": "correct"}
    assert found["scores"]["worst_case"]["score"] == 0 and found["scores"]["average"]["score"] == 0.5


def test_our_own_records_are_scored_too(tmp_path: Path) -> None:
    records = [
        {
            "problem_id": "mathvision-7",
            "sample_index": 0,
            "response": r"\boxed{B}",
            "length": 5,
            "stop_reason": "stop",
        },
        {"problem_id": "mathvision-7", "sample_index": 1, "response": "I am", "length": 9, "stop_reason": "length"},
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "step-000000.parquet")
    annotations = write(tmp_path / "a.jsonl", [{"id": "7", "options": ["A", "B"], "answer": "B"}])
    responses = tmp_path / "step-000000.parquet"
    found = score(tmp_path, "mathvision", "strict", annotations=annotations, responses=responses)
    assert (found["scores"]["accuracy"]["score"], found["k"], found["truncated_share"]) == (0.5, 2, 0.5)
    assert found["scores"]["pass@2"]["score"] == 1.0 and [r["sample"] for r in found["rows"]] == [0, 1]
    assert [r["length"] for r in found["rows"]] == [5, 9]


@pytest.mark.parametrize(
    "tree",
    [
        [{"ID": "2steps_1", "key": "2steps_1", "response": "Answer: A"}],
        {"2steps_1": {"2steps_1": "Answer: A"}},
        {"2steps_1": {"2steps_1": {"response": "Answer: A"}}},
        {"2steps_1": [{"ID": "2steps_1", "key": "2steps_1", "response": "Answer: A"}]},
        {"2steps_1-2steps_1": "Answer: A"},
    ],
)
def test_wemath_responses_in_every_layout(tmp_path: Path, tree: object) -> None:
    (answer,) = read_answers(BENCHMARKS["wemath"], [write(tmp_path / "r.json", tree)])
    assert (answer.id, answer.text) == ("2steps_1-2steps_1", "Answer: A")


def test_one_set_of_answers_in_every_layout_gives_one_score(tmp_path: Path) -> None:
    """List, object by id, lines; whole-number and text ids; a byte order mark; wrong suffixes; other column names."""
    questions = [{"id": str(i), "options": [], "answer": str(i)} for i in range(4)]
    annotations = write(tmp_path / "golds.jsonl", questions)
    rows = [{"id": i, "response": str(i if i < 3 else 0)} for i in range(4)]
    lines, whole = "\n".join(map(json.dumps, rows)), json.dumps(rows, indent=1)
    layouts = {
        "a.jsonl": lines,
        "b.json": whole,
        "c.json": json.dumps({str(row["id"]): {"response": row["response"]} for row in rows}),
        "d.json": json.dumps({str(row["id"]): row["response"] for row in rows}),
        "e.jsonl": "\ufeff" + lines.replace("\n", "\r\n") + "\n\n",
        "f.json": lines,
        "g.jsonl": whole,
        "h.json": json.dumps({"results": rows}),
        "i.csv": "\ufeffid,model_answer\n"
        + "".join(f"{r['id']}.0,{r['response']}\n" for r in rows).replace(".0", ""),
        "j.jsonl": lines.replace("response", "prediction").replace('"id": 1,', '"id": 1.0,'),
        "k.jsonl": json.dumps(rows),
    }
    for name, text in layouts.items():
        found = score(
            tmp_path, "mathvision", "official", annotations=annotations, responses=write(tmp_path / name, text)
        )
        assert [r["verdict"] for r in found["rows"]] == ["correct"] * 3 + ["wrong"], name
        assert [r["id"] for r in found["rows"]] == ["0", "1", "2", "3"], name


def test_missing_repeated_and_foreign_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = {f"v1_{i}": {"question": "q", "answer": "AB"[i % 2] if i < 4 else ""} for i in range(5)}
    answers = {f"v1_{i}": {"answer": "A"} for i in (0, 1, 4)}  # v1_2, v1_3 missing; v1_4 has no gold, like v1_382
    files = {
        "annotations": write(tmp_path / "dataset.json", questions),
        "responses": write(tmp_path / "model.json", answers),
    }
    found = score(tmp_path, "logicvista", "official", **files)
    assert (found["n"], found["missing"], found["left_out"]) == (2, 2, ["v1_4"])
    assert found["scores"]["accuracy"]["score"] == 0.5
    assert "left out: 1 ids that no annotated question with a gold has: v1_4" in capsys.readouterr().out
    twice = [{"id": name, "answer": "A"} for name in ("v1_0", "v1_1", "v1_1")]
    found = score(tmp_path, "logicvista", "official", **(files | {"responses": write(tmp_path / "t.json", twice)}))
    assert (found["k_min"], found["k"], found["num_responses"]) == (1, 2, 3)
    assert "between 1 and 2 responses a question" in capsys.readouterr().out


def test_dynamaths_published_verdict_tables_are_summed_up(tmp_path: Path, capsys) -> None:
    """Its authors publish a verdict per seed and variant: 5 of 6 right, one seed of three not in all variants."""
    for trial in ("1", "2"):
        (tmp_path / f"trial{trial}").mkdir()
        rows = {str(q): {"question": "q", "answer": "2", "answer_type": "float", "subject": "s"} for q in (1, 2, 3)}
        write(tmp_path / f"trial{trial}" / "dataset.json", rows)
    table = "Question ID,Variant 1,Variant 2,Topic\nQ1,correct,correct,s\nQ2,correct,fail,s\nQ3,correct,correct,s\n"
    responses = write(tmp_path / "model-result.csv", table)
    found = score(tmp_path, "dynamath", "official", annotations=tmp_path, responses=responses)
    assert found["scores"]["average"]["score"] == 5 / 6 and found["published_verdicts"] == 6
    assert found["scores"]["worst_case"]["score"] == 2 / 3
    arguments = ["--benchmark", "dynamath", "--annotations", str(tmp_path), "--responses", str(responses)]
    assert main(["score", *arguments, "--mode", "strict"]) == 2
    assert "holds verdicts and no answers" in capsys.readouterr().err
    answers = write(tmp_path / "answers.csv", 'Question ID,Variant 1,Variant 2\nQ1,"{""short answer"": 2}",no\n')
    found = score(tmp_path, "dynamath", "official", annotations=tmp_path, responses=answers)
    assert {r["id"]: r["verdict"] for r in found["rows"]} == {"1-v1": "correct", "1-v2": "wrong"}


def test_mathverse_files_are_read_with_their_judgements(tmp_path: Path) -> None:
    rows = [
        {"problem_id": 0, "answer": "14", "problem_version": "Text Lite", "category": {"subject": "Solid Geometry"}},
        {"problem_id": 1, "answer": "A", "question_type": "multi-choice", "category": {"subject": "Plane Geometry"}},
    ]
    extra = [
        {"model_answer": "The answer is 14", "judgement": 1},
        {"model_answer": "?", "extraction": "A", "judgement": "0"},
    ]
    tree = [row | more for row, more in zip(rows, extra, strict=True)]
    found = score(tmp_path, "mathverse", "official", responses=write(tmp_path / "out.json", tree))
    assert found["by"]["subject"]["Solid Geometry"]["n"] == 1 and found["rule"] == "emulated"
    assert found["published_accuracy"] == 0.5 and found["rows"][1]["verdict"] == "correct"
    assert found["judged_otherwise"] == ["1"]


def test_text_golds_in_their_publishers_shapes(tmp_path: Path, grader: Grader) -> None:
    rows = [
        {"id": 1, "problem": "p", "answer": 27.0},
        {"id": 2, "problem": "p", "answer": "073"},
        {"idx": 3, "problem": "p", "solution": r"so \boxed{1.6}"},
        {"id": 4, "problem": "p", "answer": ["0.01\n", "0.02\n"]},
        {"id": 5, "problem": "p", "final_answer": ["1,3,5"], "is_multiple_answer": True},
        {"id": 6, "problem": "p", "final_answer": ["2.5"], "error": "0.1"},
        {"id": 7, "problem": "p", "final_answer": ["3"], "error": "0.1"},
        {"id": 8, "problem": "p", "final_answer": ["3,4"], "error": "0.1,0.2", "is_multiple_answer": True},
    ]
    benchmark = BENCHMARKS["minerva"]
    questions = read_questions(benchmark, [write(tmp_path / "a.jsonl", rows)])
    assert [q.gold for q in questions] == ["27", "73", "1.6", "0.01", "1,3,5", "2.5", "3", "3,4"]
    texts = [r"\boxed{27}", "The answer is 73.", r"\boxed{1.6}", r"\boxed{0.02}", r"\boxed{5, 1, 3}"]
    texts += [r"\boxed{2.58}", r"\boxed{3.12}", r"\boxed{4, 3}"]
    answers = [Answer(q.id, text) for q, text in zip(questions, texts, strict=True)]
    plain = TEMPLATES["plain"]
    official = judge_all(benchmark, questions, answers, mode="official", grader=grader, template=plain)
    assert [r.right for r in official] == [True] * 6 + [False, True]
    strict = judge_all(benchmark, questions, answers, mode="strict", grader=grader, template=plain)
    assert [r.right for r in strict] == [True, False, True, True, True, True, False, True]
    summary = summarise_rows(benchmark, official, mode="official", num_questions=9, template="plain")
    assert (summary["rule"], summary["missing"], summary["n"]) == ("emulated", 1, 8)


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ({"99": {"response": "x"}}, "none of the 1 responses belongs to one of the 1 annotated questions"),
        ("", "holds no rows"),
        ("{", "cannot be read: Expecting property name"),
        ('{"id": "1", "response": "x"}\n{"id": "2", "resp', "cannot be read: Extra data"),
        ({"1": {"reply": "x"}}, "no response: wanted one of"),
        ([], "holds no rows"),
        (["x"], "row 0 is no object"),
    ],
)
def test_what_cannot_be_scored_is_said(tmp_path: Path, responses: object, message: str, capsys) -> None:
    annotations = write(tmp_path / "a.jsonl", [{"id": "1", "options": [], "answer": "6"}])
    path = write(tmp_path / "r.json", responses)
    arguments = ["score", "--benchmark", "mathvision", "--annotations", str(annotations), "--responses", str(path)]
    assert main(arguments) == 2 and message in capsys.readouterr().err
    with pytest.raises(UserError, match="a second, different question '1'"):
        twice = [{"id": "1", "options": [], "answer": "6"}, {"id": "1", "options": [], "answer": "7"}]
        read_questions(BENCHMARKS["mathvision"], [write(tmp_path / "b.jsonl", twice)])


SKILLS = {"deductive": 20, "inductive": 21, "mechanical": 15, "numerical": 18, "spatial": 16}

# -- numbers that the real samples must give ---------------------------------------------------------------


def published_questions(benchmark: str, *files: str) -> list[Question]:
    return read_questions(
        BENCHMARKS[benchmark], [path for name in files for path in sorted(shared_data().glob(name))]
    )


def counts(questions: list[Question], facet: str) -> dict[str, int]:
    values = [value for question in questions for value in question.facets[facet]]
    return {value: values.count(value) for value in sorted(set(values))}


def test_counts_of_the_real_samples() -> None:
    vision = published_questions("mathvision", "mathvision/testmini.jsonl")
    assert len(vision) == 304 and set(counts(vision, "subject").values()) == {19}  # 16 subjects of 19
    we = published_questions("wemath", "wemath/testmini.json")
    assert counts(we, "step") == {f"2steps_{k}": 24 for k in ("1", "2", "multi")} | {
        f"3steps_{k}": 20 for k in ("1", "2", "3", "multi")
    }
    assert min(len(q.choices) for q in we) >= 4 and max(len(q.choices) for q in we) <= 7
    dyna = published_questions("dynamath", "dynamath/trial*/dataset.json")
    assert len(dyna) == 250 and len({q.problem for q in dyna}) == 25
    logic = published_questions("logicvista", "logicvista/dataset_90.json")
    assert counts(logic, "skill") == SKILLS
    vista = published_questions("mathvista", "mathvista/*.json")
    assert counts(vista, "answer_type") == {"float": 10, "integer": 116, "list": 1, "text": 123}
    verse = published_questions("mathverse", "mathverse/*.json")
    assert len(verse) == 99 and counts(verse, "version") == {"Text Only": 99}
    sizes = {"aime24": 30, "amc23": 40, "minerva": 272, "olympiadbench": 100}
    files = {name: f"text_math/{name}*.jsonl" for name in sizes}
    assert {name: len(published_questions(name, pattern)) for name, pattern in files.items()} == sizes


def test_perfect_answers_to_the_real_samples_score_full_marks() -> None:
    """By the published rules a gold is its own right answer, but for the two that fail their own normaliser."""
    files = {
        "mathvision": "mathvision/testmini.jsonl",
        "mathvista": "mathvista/*.json",
        "wemath": "wemath/testmini.json",
        "dynamath": "dynamath/trial*/dataset.json",
        "logicvista": "logicvista/dataset_90.json",
    }
    for name, pattern in files.items():
        questions = published_questions(name, pattern)
        judged = {q.id: BENCHMARKS[name].judge(q, Answer(q.id, q.gold, extraction=q.gold)) for q in questions}
        missed = {
            key for key, found in judged.items() if not isinstance(found, Judgement) or found.verdict != "correct"
        }
        assert missed <= {"168", "849"}, name


def test_empty_extractions_earn_points_in_mathvista() -> None:
    """The nearest option to nothing is the first of the shortest: right where the gold is that one."""
    questions = published_questions("mathvista", "mathvista/*.json")
    judged = [mathvista.judge(q, Answer(q.id, "", extraction="")) for q in questions]
    shortest = [q.choices and q.gold == min(q.choices, key=len) for q in questions]
    assert sum(found.note == "free point" for found in judged) == sum(map(bool, shortest)) > 20
