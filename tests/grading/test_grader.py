r"""The grader against its policy: hand-made cases, real golds, hostile text.

In CASES each row is (gold, answer, type, equal, extras): what a person following the policy would say.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vlm_rl
from tests.conftest import shared_data
from tests.helpers.processes import children_of
from vlm_rl.grading.grader import Grader, GradeTask
from vlm_rl.grading.latex import clean
from vlm_rl.grading.rational import TooLargeError, parse_rational
from vlm_rl.grading.symbolic_client import SymbolicJudge
from vlm_rl.templates import TEMPLATES, boxes
from vlm_rl.types import Grade, Problem

THINK = TEMPLATES["think_answer"]
X, N, L, C, T, F = "expression", "integer", "list", "choice", "text", "float"
FOUR = ("4 cm", "5 cm", "6 cm", "7 cm")
VALUES = ("\\frac{1}{2}", "\\frac{3}{4}", "\\frac{\\sqrt{3}}{2}", "2")
WORDS = ("red", "blue", "green", "Because it is blue")
BARE = ("A", "B", "C", "D", "E")

CASES: list[tuple] = [
    # the same value in another notation
    ("1/2", r"\frac{1}{2}", X, True),
    ("1/2", r"\dfrac12", X, True),
    ("1/2", "0.5", X, True),
    ("1/2", "0.50", X, True),
    ("1/2", "2/4", X, True),
    (r"\frac{3}{6}", r"\tfrac{1}{2}", X, True),
    ("-1/2", r"-\frac{1}{2}", X, True),
    ("-1/2", r"\frac{-1}{2}", X, True),
    ("-5", "−5", N, True),
    ("5", "5.", N, True),
    ("5", " 5 ", N, True),
    ("5", "5.0", N, True),
    ("5", "+5", N, True),
    ("73", "073", N, True),
    ("27.0", "27", N, True),
    ("5", r"\text{5}", N, True),
    ("5", "$5$", N, True),
    ("5", r"\(5\)", N, True),
    ("1000", "1,000", N, True),
    ("1000", r"1\,000", N, True),
    ("1000", "1{,}000", N, True),
    ("1234567", "1,234,567", N, True),
    ("1000", "10^3", N, True),
    ("1000", r"1 \times 10^{3}", N, True),
    ("4.5e33", r"4.5 \times 10^{33}", F, True),
    ("1e-5", "0.00001", F, True),
    ("7/3", r"2\frac{1}{3}", X, True),
    ("1/3", r"0.\overline{3}", X, True),
    (r"\frac{100!}{2^{50}}", r"100!/2^{50}", X, True),
    (r"\sqrt{8}", r"2\sqrt{2}", X, True),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", X, True),
    (r"\frac{1}{2n+2}", r"\frac{1}{2(n+1)}", X, True),
    ("x^2-1", "(x-1)(x+1)", X, True),
    ("2.5x", r"\frac{5x}{2}", X, True),
    (r"\frac{\pi}{2}", r"0.5\pi", X, True),
    ("4π", r"4\pi", X, True),
    (r"e^{t}/3", r"\frac{1}{3}e^t", X, True),
    # the same number is not a similar number
    ("1/3", "0.33", X, False),
    ("1/3", "0.333333333333", X, False),
    (r"\pi", "3.14", X, False),
    (r"\pi", "3.14159265358979323846", X, False),
    ("3.14", r"\pi", F, False),
    (r"\sqrt{2}", "1.41421356", X, False),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", X, False),
    (r"\frac{1}{2^{99}}", r"2^{-99}", X, True),
    (r"\frac{\pi}{2^{99}}", r"\frac{\pi}{2^{98}}", X, False),
    (r"\frac{\pi}{2^{300}}", r"\frac{\pi}{2^{301}}", X, False),  # both are 0 to math-verify's 60 digits
    ("123456789012345678901", "123456789012345678902", N, False),
    ("123456789012345678901", "123,456,789,012,345,678,901", N, True),
    ("5", "-5", N, False),
    ("5", "6", N, False),
    ("5", "5.0000001", N, False),
    ("1000", "1,00", N, False),
    ("35", "3 5", N, False),
    ("1234", "1, 234", N, False),
    ("x^2-1", "x^2+1", X, False),
    ("2n", "2m", X, False),
    ("7/3", "21/3", X, False),
    ("2n", "2N", X, False),
    ("12", "12_{3}", N, False),
    ("x", r"\frac{x^2}{x}", X, True),
    (r"\binom{2n}{n}", r"\frac{(2n)!}{n!n!}", X, True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", X, True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", X, False),
    (r"\mathbb{R}", r"(-\infty, \infty)", X, True),
    ("12", r"\{12\}\cup\{13\}", N, False),
    ("3\\sqrt{2}", r"3\sqrt{3}", X, False),
    ("5", r"\approx 5", N, False),
    ("1/3", r"0.333\ldots", X, False),
    ("5", "five or so", N, False),
    # degrees, units, money
    ("90", r"90^\circ", X, True),
    (r"90^{\circ}", "90", X, True),
    ("90°", r"90\text{ degrees}", X, True),
    ("90", r"90^\circ C", X, True),
    (r"20^\circ C", r"20^\circ F", X, False),
    ("90", r"45^\circ", X, False),
    ("5", "5 cm", N, True),
    (r"5\text{ cm}", "5", X, True),
    (r"5\,\mathrm{cm}", "5 centimeters", X, True),
    ("5 cm", "5 m", X, False),
    ("5 cm", "5 kg", X, False),
    ("5 m", "500 cm", X, False),
    (r"12 \mathrm{~cm}^{2}", r"12\text{ cm}^2", X, True),
    (r"12 \mathrm{~cm}^{2}", r"12\text{ cm}^3", X, False),
    (r"12 \mathrm{~cm}^{2}", "12 square centimeters", X, True),
    (r"9 \pi \mathrm{cm}^{2}", r"9\pi", X, True),
    (r"9 \pi \mathrm{cm}^{2}", r"9\pi \text{ m}^2", X, False),
    ("60 km/h", "60 kilometers per hour", X, True),
    ("60 km/h", "60 m/s", X, False),
    ("6", r"6\text{ apples}", N, True),
    ("6 apples", "6 oranges", X, False),
    ("6", "7 apples", N, False),
    ("6", "6 million", N, False),
    ("6", "not 6", N, False),
    ("5.00", r"\$5", X, True),
    (r"\$5", "5 euros", X, False),
    ("4", "4 years", N, True, {"meta": {"unit": "years"}}),
    ("4", "4 months", N, False, {"meta": {"unit": "years"}}),
    ("2n", "2", X, False),
    # percent
    (r"50\%", r"50\%", X, True),
    (r"50\%", "0.5", X, True),
    (r"50\%", r"\frac{1}{2}", X, True),
    (r"50\%", "50", X, False),
    ("50", "50", X, True),
    ("50", r"50\%", X, True),
    ("50", "50 percent", X, True),
    ("50", "0.5", X, False),
    ("0.5", "0.5", X, True),
    ("0.5", r"50\%", X, True),
    ("0.5", "50", X, False),
    ("0.5", r"0.5\%", X, False),
    ("0.5", r"60\%", X, False),
    # stated precision
    ("1.2", "1.2", F, True, {"meta": {"precision": 1}}),
    ("1.2", "1.23", F, True, {"meta": {"precision": 1.0}}),
    ("1.2", "1.15", F, True, {"meta": {"precision": 1}}),
    ("1.2", "1.26", F, False, {"meta": {"precision": 1}}),
    ("0.33", "1/3", F, True, {"meta": {"precision": 2}}),
    ("4.3", r"\frac{5\sqrt{3}}{2}", F, True, {"meta": {"precision": 1}}),
    ("4.4", r"\frac{5\sqrt{3}}{2}", F, False, {"meta": {"precision": 1}}),
    ("2.0944", r"\frac{2\pi}{3}", F, True, {"meta": {"tolerance": 0.001}}),
    ("2.0944", "2.0954", F, True, {"meta": {"tolerance": 0.001}}),
    ("2.0944", "2.0955", F, False, {"meta": {"tolerance": 0.001}}),
    ("2.0944", "2.1", F, False, {"meta": {"tolerance": 0.001}}),
    ("2.0944", "x", F, False, {"meta": {"tolerance": 0.001}}),
    ("1.2", "1.23", F, False),
    ("-1.2", "-1.23", F, True, {"meta": {"precision": 1}}),
    ("-1.2", "1.2", F, False, {"meta": {"precision": 1}}),
    ("2.0944", "2.1", F, False, {"meta": {"tolerance": 0.001, "precision": 1}}),  # the tolerance goes first
    # labels and equations
    ("5", "x = 5", N, True),
    ("x=5", "5", X, True),
    ("x=5", "y=5", X, False),
    ("x=5", "x=6", X, False),
    ("5", "x = 10/2 = 5", N, True),
    ("5", "x = 3 = 5", N, False),
    ("5", "3 = 5", N, False),
    (r"Area $=113.1 \mathrm{~cm}^{2}$", "113.1", X, True),
    (r"Area $=113.1 \mathrm{~cm}^{2}$", "A = 113.1", X, True),
    (r"Area $=113.1 \mathrm{~cm}^{2}$", r"113.1 \text{ cm}", X, False),
    ("y=2x+3", "y = 3 + 2x", X, True),
    ("y=2x+3", "2x - y + 3 = 0", X, True),
    ("y=2x+3", "y = 2x - 3", X, False),
    ("x^2+y^2=1", "1", X, False),
    ("f(x)=x+1", "x+1", X, True),
    (r"k \geqslant 2", r"k \ge 2", X, True),
    (r"k \ge 2", "k > 2", X, False),
    # sets, tuples, intervals, lists, unions
    (r"\{1,2,3\}", r"\{3, 1, 2\}", X, True),
    (r"\{1,2,3\}", r"\left\{1,2\right\}", X, False),
    (r"\{1,2,3\}", r"\{1,2,4\}", X, False),
    (r"\{\frac12,\sqrt{8}\}", r"\{2\sqrt{2}, 0.5\}", X, True),
    (r"\emptyset", r"\varnothing", X, True),
    (r"\emptyset", r"\{\}", X, True),
    (r"\emptyset", r"\{0\}", X, False),
    ("(3,-4)", r"\left(3, -4\right)", X, True),
    ("(3,-4)", "3, -4", X, True),
    ("(3,-4)", "(-4,3)", X, False),
    ("(3,-4)", r"\{3,-4\}", X, False),
    (r"(\sqrt{2},\pi)", r"(\pi,\sqrt{2})", X, False),
    (r"(\sqrt{8},\pi)", r"(2\sqrt{2},\pi)", X, True),
    ("(0,4]", r"\left(0,4\right]", X, True),
    ("(0,4]", "(0,4)", X, False),
    ("[0,4]", "(0,4)", X, False),
    ("(0,4)", "[0,4]", X, False),
    ("(0,4]", "[0,4)", X, False),
    (r"(-\infty,1)\cup(3,4)", r"(3,4) \cup (-\infty, 1)", X, True),
    (r"(-\infty,1)\cup(3,4)", r"(3,4] \cup (-\infty, 1)", X, False),
    (r"(-\infty,1)\cup(3,4)", r"(-\infty, 1)", X, False),
    ("1,3,5", "5, 3, 1", L, True),
    ("1,3,5", "1, 3 and 5", L, True),
    ("69,84", "69 or 84", L, True),
    ("1,3,5", "1,3", L, False),
    ("1,3,5", "1,3,5,7", L, False),
    ("1,1,3", "1,3,3", L, False),
    ("2500,7500", "7500,2500", L, True),
    ("100,200", "200,100", L, True),
    ("1,3,5", "5,3,1", X, False),
    ("[0, 2, 1]", "0, 2, 1", L, True),
    ("[0, 2, 1]", "[0,2,1]", L, True),
    ("[0, 2, 1]", "[1,2,0]", L, False),
    ("$(1,1), (3,2)$", "(3,2),(1,1)", L, True),
    ("$(1,1), (3,2)$", "(2,3),(1,1)", L, False),
    (r"\{3,-3\}", r"\pm 3", X, True),
    ("3", r"\pm 3", X, False),
    # guess lists
    ("3", "3 or 5", N, False),
    ("3", r"3 \text{ or } 5", N, False),
    ("3", "3, 5", N, False),
    ("3", r"\{3, 5\}", N, False),
    ("3", "3 and 5", N, False),
    # text
    ("Sep", "sep", T, True),
    ("Sep", r"\text{Sep}", T, True),
    ("Sep", "pes", T, False),
    ("Sep", "September", T, False),
    ("4:45", "4:45", T, True),
    ("4:45", "445", T, False),
    # multiple choice
    ("B", "B", C, True, {"choices": FOUR}),
    ("B", "(B)", C, True, {"choices": FOUR}),
    ("B", "B.", C, True, {"choices": FOUR}),
    ("B", r"\text{B}", C, True, {"choices": FOUR}),
    ("B", r"\textbf{(B)}", C, True, {"choices": FOUR}),
    ("B", "Option B", C, True, {"choices": FOUR}),
    ("B", "B: 5 cm", C, True, {"choices": FOUR}),
    ("B", r"(B) 5\text{ cm}", C, True, {"choices": FOUR}),
    ("B", "B: 6 cm", C, False, {"choices": FOUR}),
    ("B", "5 cm", C, True, {"choices": FOUR}),
    ("B", "5", C, True, {"choices": FOUR}),
    ("B", "5 m", C, False, {"choices": FOUR}),
    ("B", "C", C, False, {"choices": FOUR}),
    ("B", "A or B", C, False, {"choices": FOUR}),
    ("B", "A, B", C, False, {"choices": FOUR}),
    ("B", "AB", C, False, {"choices": FOUR}),
    ("B", "Because it is 5 cm", C, False, {"choices": FOUR}),
    ("B", "Because", C, False),
    ("B", "B", C, True),
    ("B", "B: or maybe C", C, False),
    ("B", "H", C, False, {"choices": FOUR}),
    ("H", "H", C, False, {"choices": FOUR}),  # a gold that names no option
    ("5 cm", "B", C, True, {"choices": FOUR}),
    ("5 cm", "A", C, False, {"choices": FOUR}),
    ("A", "0.5", C, True, {"choices": VALUES}),
    ("C", r"\sqrt{3}/2", C, True, {"choices": VALUES}),
    ("C", r"\sqrt{2}/2", C, False, {"choices": VALUES}),
    ("B", "blue", C, True, {"choices": WORDS}),
    ("B", "Because it is blue", C, False, {"choices": WORDS}),
    ("D", "D", C, True, {"choices": BARE}),
    ("D", "E", C, False, {"choices": BARE}),
    ("18", "C", C, True, {"choices": ("9", "12", "18", "18")}),
    ("18", "D", C, True, {"choices": ("9", "12", "18", "18")}),
    ("B", r"\frac{2}{4}", C, False, {"choices": ("0.5", "1/2", "3", "4")}),
    ("B", "1/2", C, True, {"choices": ("0.5", "1/2", "3", "4")}),
    ("B, D", "D, B", C, True),
    ("B, D", "B and D", C, True),
    ("B, D", "BD", C, True),
    ("B, D", "B", C, False),
    ("B, D", "B, C, D", C, False),
]  # fmt: skip


def task(gold: str, answer: str, answer_type: str, extras: dict | None = None) -> GradeTask:
    response = THINK.wrap("Some reasoning.", answer)
    return GradeTask(response, gold, answer_type, THINK, **(extras or {}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=2, timeout=5.0) as grader:
        yield grader


@pytest.fixture(scope="module")
def table(grader: Grader) -> list[Grade]:
    return grader.grade_many([task(row[0], row[1], row[2], *row[4:]) for row in CASES])


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}|{CASES[i][1]}"[:40])
def test_policy(table: list[Grade], index: int) -> None:
    gold, answer, _, equal = CASES[index][:4]
    grade = table[index]
    assert grade.verdict == ("correct" if equal else "wrong"), f"{answer!r} for {gold!r}: {grade}"


def test_the_table_has_both_kinds() -> None:
    accepted = sum(row[3] for row in CASES)
    assert accepted >= 60
    assert len(CASES) - accepted >= 60


# -- where the answer is looked for -----------------------------------------------------------------

RESPONSES = [
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer>", "correct"),
    ("think_answer", r"<think>a</think><answer>So \boxed {5}.</answer>", "correct"),
    ("think_answer", r"<think>\boxed{5}</think><answer>5</answer>", "no_answer"),
    ("think_answer", r"<think>\boxed{7}</think><answer>\boxed{5}</answer>", "correct"),
    ("think_answer", r"<think>\boxed{5}", "no_answer"),
    ("think_answer", r"<think>a</think>\boxed{5}", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{5}", "no_answer"),
    ("think_answer", r"It is \boxed{5}", "correct"),
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer><think>\boxed{5}", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{3}</answer><answer>\boxed{5}</answer>", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{5} and \boxed{10/2}</answer>", "correct"),
    ("think_answer", r"<think>a</think><answer>\boxed{3}, no, \boxed{5}</answer>", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{}\boxed{5}</answer>", "correct"),
    ("think_answer", r"<think>a</think><answer>\boxed{}</answer>", "no_answer"),
    ("think_answer", r"<think>a</think><answer>\boxed{5}\boxed{5</answer>", "no_answer"),
    ("think_answer", "", "no_answer"),
    ("think_box", r"<think>a</think>\boxed{5}", "correct"),
    ("think_box", r"<think>\boxed{5}</think> I think", "no_answer"),
    ("think_box", r"<think>a \boxed{5}", "no_answer"),
    ("think_box", r"a</think>\boxed{5}", "correct"),
    ("think_box", r"\boxed{3}</think>\boxed{5}", "correct"),
    ("think_box", r"\boxed{5}", "correct"),
    ("plain", r"It is \boxed{5}", "correct"),
    ("plain", "It is 5", "no_answer"),
    ("plain", r"\boxed{3} or \boxed{5}", "no_answer"),
]


@pytest.mark.parametrize(("template", "response", "verdict"), RESPONSES)
def test_only_the_answer_region_counts(grader: Grader, template: str, response: str, verdict: str) -> None:
    grade = grader.grade(response, gold="5", answer_type="integer", template=TEMPLATES[template])
    assert grade.verdict == verdict, grade
    assert (grade.extracted is None) == (verdict == "no_answer")


FORMATS = [
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer>", True),
    ("think_answer", "<think>a</think>\n<answer>It is \\boxed{5}.</answer>\n", True),
    ("think_answer", r"<think>a</think><answer>5</answer>", False),
    ("think_answer", r"<think>a</think><answer>\boxed{}</answer>", False),
    ("think_answer", r"<think>a</think>\boxed{5}", False),
    ("think_answer", r"<think></think><answer>\boxed{5}</answer>", False),
    ("think_answer", r"x<think>a</think><answer>\boxed{5}</answer>", False),
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer> bye", False),
    ("think_answer", r"<think>a</think> so <answer>\boxed{5}</answer>", False),
    ("think_answer", r"<think>a<think>b</think><answer>\boxed{5}</answer>", False),
    ("think_answer", r"<think>a</think><answer>\boxed{5}</answer><answer>\boxed{5}</answer>", False),
    ("think_answer", r"<answer>\boxed{5}</answer><think>a</think>", False),
    ("think_answer", r"<think>a<answer>\boxed{5}</answer>", False),
    ("think_answer", r"\boxed{5}", False),
    ("think_box", r"<think>a</think>\boxed{5}", True),
    ("think_box", "<think>a</think>\n\nSo it is \\boxed{5}.", True),
    ("think_box", r"<think>a</think>5", False),
    ("think_box", r"<think>\boxed{5}</think>", False),
    ("think_box", r"<think>a</think><answer>\boxed{5}</answer>", False),
    ("think_box", r"a</think>\boxed{5}", False),
    ("think_box", r"<think>a</think>\boxed{5", False),
    ("plain", r"\boxed{5}", False),
    ("plain", r"<think>a</think><answer>\boxed{5}</answer>", False),
]


@pytest.mark.parametrize(("template", "response", "well_formed"), FORMATS)
def test_the_format_rule(template: str, response: str, well_formed: bool) -> None:
    assert TEMPLATES[template].is_well_formed(response) == well_formed


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_wrapped_answer_is_perfect(grader: Grader, name: str) -> None:
    template = TEMPLATES[name]
    response = template.wrap("Two and three.", r"\frac{1}{2}")
    assert template.is_well_formed(response) == (name != "plain")
    assert template.reasoning(response) == (None if name == "plain" else "Two and three.")
    assert grader.grade(response, gold="0.5", answer_type="expression", template=template).correct
    with pytest.raises(ValueError, match="</think>"):
        template.wrap("a </think> b", "5")


def test_boxes_count_braces() -> None:
    assert boxes(r"\boxed{\frac{1}{2}} and \boxed {\{1,2\}}") == [r"\frac{1}{2}", r"\{1,2\}"]
    assert boxes(r"\boxed{\left\{a\right.}") == [r"\left\{a\right."]
    assert boxes(r"\boxed{1") is None
    assert boxes("no box, \\boxedly{5}") == []


# -- numbers ----------------------------------------------------------------------------------------


@given(st.fractions(max_denominator=10**9), st.sampled_from(["\\frac{%d}{%d}", "%d/%d", "\\dfrac{%d}{%d}"]))
def test_fractions_are_read_exactly(number, form: str) -> None:
    text = form % (number.numerator, number.denominator)
    assert parse_rational(clean(text)) == number


@given(st.integers(), st.integers(min_value=0, max_value=12))
def test_decimals_are_read_exactly(digits: int, places: int) -> None:
    # abs: -7 with 3 places is -0.007, written with the sign in front of the padded digits.
    padded = str(abs(digits)).rjust(places + 1, "0")
    text = "-" * (digits < 0) + (padded[:-places] + "." + padded[-places:] if places else padded)
    assert parse_rational(text) * 10**places == digits  # type: ignore[operator]


@given(st.text(alphabet="0123456789.,+-*/^!(){}e \\fracbinom", max_size=40))
@settings(max_examples=500)
def test_any_text_is_a_number_or_none_or_too_large(text: str) -> None:
    try:
        value = parse_rational(text)
    except TooLargeError:
        return
    assert value is None or value.numerator.bit_length() <= 200_000


# -- real golds -------------------------------------------------------------------------------------


def real_golds() -> dict[str, Problem]:
    """Every gold of the sample data, as its benchmark would be prepared."""
    data = shared_data()
    golds: dict[str, Problem] = {}

    def add(name: str, answer: object, answer_type: str, choices: tuple = (), **meta: object) -> None:
        meta = {key: value for key, value in meta.items() if value is not None}
        golds[name] = Problem(name, "", (), str(answer), answer_type, tuple(choices), meta=meta)  # type: ignore[arg-type]

    for line in (data / "mathvision" / "testmini.jsonl").read_text().splitlines():
        row = json.loads(line)
        add(f"mathvision {row['id']}", row["answer"], C if row["options"] else X, row["options"])
    for pid, row in json.loads((data / "mathvista" / "testmini_250_no_images.json").read_text()).items():
        kind = C if row["choices"] else row["answer_type"]
        precision = int(row["precision"]) if row["precision"] is not None else None
        extras = {"precision": precision, "unit": row["unit"]}
        add(f"mathvista {pid}", row["answer"], kind, row["choices"] or (), **extras)
    for row in json.loads((data / "mathverse" / "testmini_text_only_part.json").read_text()):
        kind = C if row["question_type"] == "multi-choice" else X
        add(f"mathverse {row['sample_index']}", row["answer"], kind)
    for name, row in json.loads((data / "logicvista" / "dataset_90.json").read_text()).items():
        add(f"logicvista {name}", row["answer"], C)
    for trial in sorted((data / "dynamath").glob("trial*/dataset.json")):
        for name, row in json.loads(trial.read_text()).items():
            kind = {"float": F, "multiple choice": C, "text": T}[row["answer_type"]]
            tolerance = 0.001 if kind == F else None
            add(f"dynamath {trial.parent.name} {name}", row["answer"], kind, tolerance=tolerance)
    for number, row in enumerate(json.loads((data / "wemath" / "testmini.json").read_text())):
        add(f"wemath {number} {row['ID']}", row["answer"], C)
    for row in pq.read_table(data / "dapo_math" / "aime-2024.parquet").to_pylist():
        add(f"dapo {row['extra_info']['index']}", row["reward_model"]["ground_truth"], N)
    for name in ("aime24", "amc23"):
        for line in (data / "text_math" / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            add(f"{name} {row['id']}", row["answer"], N)
    for line in (data / "text_math" / "minerva_math.jsonl").read_text().splitlines():
        row = json.loads(line)
        add(f"minerva {row['idx']}", (boxes(row["solution"]) or [""])[-1], X)
    for line in (data / "text_math" / "olympiadbench_100.jsonl").read_text().splitlines():
        row = json.loads(line)
        add(f"olympiad {row['id']}", row["final_answer"][0], L if row["is_multiple_answer"] else X)
    return golds


def test_every_real_gold_verifies_itself(grader: Grader, capsys: pytest.CaptureFixture[str]) -> None:
    golds = real_golds()
    assert len(golds) > 1500
    failing = {name: problem.answer for name, problem in golds.items() if not grader.verifies_itself(problem)}
    with capsys.disabled():
        print(f"\n{len(golds)} golds, not self-verifying: {failing}")
    # Both golds are "(b)", which is option D's text and the letter of option B.
    assert set(failing) <= {"mathvista 168", "mathvista 849"}


def test_no_real_gold_accepts_another_number(grader: Grader) -> None:
    golds = [problem for problem in real_golds().values() if problem.answer_type in (N, F, X)]
    distinct = list({problem.answer: problem for problem in golds}.values())
    distinct = distinct[::3]
    tasks = [task(p.answer, "987654.3210123", p.answer_type, {"meta": p.meta}) for p in distinct]
    assert [p.answer for p, g in zip(distinct, grader.grade_many(tasks), strict=True) if g.correct] == []


# -- hostile answers --------------------------------------------------------------------------------

HOSTILE = [
    "9^{9^{9^9}}",
    "9^{9^{9^{9^{9}}}}x",
    "(10^9)!",
    "((10^9)!)x",
    r"\binom{10^8}{5*10^7}",
    r"\frac{\binom{10^8}{5*10^7}}{x}",
    "(x+y+z+w)^{200}",
    "+".join(f"x^{k}" for k in range(4000)),
    "(" * 3000 + "x" + ")" * 3000,
    "{" * 3000 + "5" + "}" * 3000,
    "\\{" * 3000 + "5" + "\\}" * 3000,
    r"\{" + ",".join(map(str, range(5000))) + r"\}",
    r"\prod_{k=1}^{10^6} k",
    r"\sum_{k=1}^{1000000} \frac{1}{k}",
    "1e999999999",
    "7" * 100_000,
    "-" * 50_000 + "5",
    r"\text{" * 3000,
    r"\frac{" * 3000 + "1" + "}{2}" * 3000,
    "^" * 5000,
    " " * 15_000 + "5",
    "=" * 10_000,
    "A, " * 5000,
    "\x00\ud800",
    r"\int_0^1 \int_0^1 \int_0^1 e^{-x^2y^2z^2} dx dy dz",
    r"\boxed{" * 2000 + "5" + "}" * 2000,
]


def test_hostile_answers_cost_nothing_but_their_own_verdict() -> None:
    """Good answers between hostile ones are graded as ever; the limits stop what the filter misses."""
    good = [task(r"\sqrt{8}", r"2\sqrt{2}", X), task(r"\sqrt{8}", r"3\sqrt{2}", X), task("1/2", "0.5", X)]
    gold = r"\frac{x+1}{y}"
    hostile = [task(gold, text.replace("\\boxed", "\\fbox"), X) for text in HOSTILE]
    mixed = [t for bad in hostile for t in (bad, *good)]
    with Grader(workers=2, timeout=1.0) as grader:
        grades = grader.grade_many(mixed)
        again = grader.grade_many(good)
    for text, grade in zip(HOSTILE, grades[:: len(good) + 1], strict=True):
        assert grade.verdict != "correct", text[:60]
    assert {grades[0].verdict, grades[2 * (len(good) + 1)].verdict} == {"error"}  # seen, never a silent "wrong"
    expected = ["correct", "wrong", "correct"]
    for start in range(0, len(mixed), len(good) + 1):
        assert [g.verdict for g in grades[start + 1 : start + 1 + len(good)]] == expected
    assert [g.verdict for g in again] == expected


@pytest.fixture(scope="module")
def judge() -> Iterator[SymbolicJudge]:
    judge = SymbolicJudge(workers=2, timeout=1.0, memory_bytes=1 << 30)
    yield judge
    judge.close()


def test_cpu_time_decides_and_good_jobs_survive(judge: SymbolicJudge) -> None:
    """What gets past the filter dies by its own CPU clock, and its neighbours are answered."""
    good = ("equal", "x^{2}-1", "(x-1)(x+1)")
    outcomes = judge.decide([("equal", "9", "9^{9^{9^9}}"), good, ("equal", "9", "(10^9)!"), good])
    assert [kind for kind, _ in outcomes] == ["timeout", "ok", "timeout", "ok"]
    assert outcomes[1][1] is True
    assert "CPU" in outcomes[0][1]


def test_a_server_started_ahead_is_the_one_that_answers() -> None:
    good, bad = ("equal", r"\sqrt{8}", r"2\sqrt{2}"), ("equal", r"\sqrt{8}", r"3\sqrt{2}")
    with closing(SymbolicJudge(workers=1, timeout=1.0)) as judge:
        judge.start()
        assert judge._server is not None
        process = judge._server.pid
        for job, verdict in ((good, True), (bad, False)):
            judge.start()  # it runs already
            assert judge.decide([job]) == [("ok", verdict)]
        assert judge._server.pid == process and _runs(process)


def test_closing_before_the_server_is_ready_leaves_a_working_judge(judge: SymbolicJudge) -> None:
    judge.close()
    judge.start()
    assert judge._server is not None
    process = judge._server.pid
    judge.close()
    assert not _runs(process)
    assert judge.decide([("equal", r"\sqrt{8}", r"2\sqrt{2}")]) == [("ok", True)]


def test_a_killed_server_is_replaced(judge: SymbolicJudge) -> None:
    good = ("equal", r"\sqrt{8}", r"2\sqrt{2}")
    assert judge.decide([good]) == [("ok", True)]
    assert judge._server is not None
    os.killpg(judge._server.pid, signal.SIGKILL)
    assert judge.decide([good]) == [("ok", True)]


def test_the_workers_environment_is_empty(judge: SymbolicJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    judge.close()
    monkeypatch.setenv("SOME_API_TOKEN", "very-secret")
    assert judge.decide([("equal", r"\sqrt{8}", r"2\sqrt{2}")]) == [("ok", True)]
    assert judge._server is not None
    processes = [judge._server.pid, *children_of(judge._server.pid)]
    assert len(processes) >= 2
    for process in processes:
        environment = Path(f"/proc/{process}/environ").read_text().split("\0")
        assert {line.partition("=")[0] for line in environment if line} <= {
            *("LD_LIBRARY_PATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        }
        assert "PYTHONHASHSEED=0" in environment  # the same text takes the same way every time


def test_closing_leaves_no_process() -> None:
    judge = SymbolicJudge(workers=2, timeout=1.0)
    judge.decide([("value", r"\sqrt{4}")])
    assert judge._server is not None
    processes = [judge._server.pid, *children_of(judge._server.pid)]
    judge.close()
    deadline = time.monotonic() + 60  # the kernel is not obliged to be done with a killed process at once
    while (alive := [pid for pid in processes if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive == []


def _runs(pid: int) -> bool:
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


PAYLOADS = [
    "__import__('os').system('touch {marker}')",
    "\\text{{__import__('os').system('touch {marker}')}}",
    "eval(\"open('{marker}','w')\")",
    "(lambda: __import__('pathlib').Path('{marker}').touch())()",
    "\\operatorname{{open}}('{marker}','w')",
    "[open('{marker}','w'), 1]",
    "$(touch {marker})",
    "x; import os; os.system('touch {marker}')",
]


def test_code_in_an_answer_is_only_text(grader: Grader, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    texts = [payload.format(marker=marker) for payload in PAYLOADS]
    grades = grader.grade_many([task(gold, text, X) for text in texts for gold in ("x+1", "0")])
    assert all(not grade.correct for grade in grades)
    # Also straight into the symbolic side, past every filter.
    with_judge = SymbolicJudge(workers=1, timeout=2.0)
    with_judge.decide([(kind, *["x", text][-n:]) for text in texts for kind, n in (("equal", 2), ("value", 1))])
    with_judge.close()
    assert not marker.exists()


GRADING_FILES = (
    *sorted(
        path.relative_to(Path(vlm_rl.__file__).parent).with_suffix("").as_posix()
        for path in (Path(vlm_rl.__file__).parent / "grading").glob("*.py")
    ),
    "templates",
)
FORBIDDEN = {"eval", "exec", "compile", "sympify", "parse_expr", "pickle", "__import__", "S", "literal_eval"}


@pytest.mark.parametrize("name", GRADING_FILES)
def test_no_code_path_from_model_text(name: str) -> None:
    tree = ast.parse((Path(vlm_rl.__file__).parent / f"{name}.py").read_text())
    for node in ast.walk(tree):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
        if isinstance(node, ast.Call):
            # re.compile takes a pattern of ours, not code.
            names = {node.func.id} if isinstance(node.func, ast.Name) else set()
            if isinstance(node.func, ast.Attribute) and node.func.attr != "compile":
                names = {node.func.attr}
        assert not names & FORBIDDEN, f"{name}.py line {getattr(node, 'lineno', 0)}"


def test_the_grader_needs_no_torch() -> None:
    code = (
        "import sys, vlm_rl.grading.grader, vlm_rl.grading.symbolic_server as w; w._load_grammar();"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.slow
def test_512_good_answers_among_288_hostile_ones_on_an_idle_and_a_busy_machine() -> None:
    """Every verdict of the good ones is as it is alone, and as it is while other processes take the cores."""
    golds = ((r"\ln 8", r"3\ln 2", X), (r"\ln 8", r"2\ln 3", X), ("1/2", "0.5", X), ("B", "C", C))
    good = [task(*golds[index % 4]) for index in range(512)]
    hostile = [task(r"\frac{x+1}{y}", (HOSTILE * 2)[kind], X) for kind in range(36) for _ in range(8)]
    mixed = [t for pair in zip(good, [*hostile, *good[: 512 - 288]], strict=True) for t in pair]
    burn = "while True: pass"
    with Grader(workers=2, timeout=2.0) as grader:
        idle = grader.grade_many(mixed)
        burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2 * (os.cpu_count() or 1))]
        try:
            busy = grader.grade_many(mixed)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
    assert [grade.verdict for grade in idle[::2]] == ["correct", "wrong", "correct", "wrong"] * 128
    assert [grade.verdict for grade in busy] == [grade.verdict for grade in idle]
