"""Hostile texts: what is refused unevaluated, and that no text costs more than its own verdict.

The limits of the workers themselves are in test_symbolic.py.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.rotation import todays
from vlm_rl.grading.closed_form import parse_closed_form
from vlm_rl.grading.decision import UndecidedError
from vlm_rl.grading.grader import MAX_QUERIES, Grader, GradeTask, try_grade
from vlm_rl.grading.latex import clean
from vlm_rl.grading.limits import refuse_explosive, refuse_long
from vlm_rl.templates import TEMPLATES

PLAIN, THINK = TEMPLATES["plain"], TEMPLATES["think_answer"]


def task(gold: str, answer: str, kind: Any = "expression") -> GradeTask:
    return GradeTask(THINK.wrap("Some reasoning.", answer), gold, kind, THINK)


# -- the filter ------------------------------------------------------------------------------------------

# Each limit on both sides: (a text that it refuses, a neighbour that it lets through).
LIMITS = [
    ("characters", "x" * 1001, "x" * 1000),
    ("nested brackets", "(" * 17 + "x" + ")" * 17, "(" * 16 + "x" + ")" * 16),
    ("nested brackets", "[{(" * 6 + "x", "[{(" * 5 + "x" + ")}]" * 5 + "[{("),
    ("an exponent tower", "2^{x^{y^{z}}}", "2^{x^{y}}+2^{x^{y}}"),
    ("an exponent tower", "((x^{a})^{b})^{c}", "(x^{a})^{b}"),
    ("a huge power", "x^{12345}", "x^{1234}"),
    ("a huge power", "x^(12345+y)", "x^(1234+y)"),
    ("a huge power", "(x+y)^{100}", "(x+y)^{99}"),
    ("a huge power", "[x+y] ^ { 100}", "[x+y] ^ { 99}"),
    ("a power of a power of digits", "x^{10^{10}}", "x^{10^{9}}"),
    ("a power of a power of digits", "x^(2^(99))", "x^(2^(9))"),
    ("a huge factorial", "12345!", "1234!"),
    ("a huge factorial", "(10^{4})!", "(10^{4}+x)!"),
    ("a huge factorial", "(5!)!", "5!+3!"),
    ("a huge binomial", r"\binom{12345}{x}", r"\binom{1234}{x}"),
    ("a huge binomial", r"\dbinom{10^{8}}{2}", r"\dbinom{10}{2}"),
    ("a long sum or product", r"\sum_{k=1000}^{n} k", r"\sum_{k=999}^{n} k"),
    ("a long sum or product", r"\sum_{k=1}^{12345} k", r"\sum_{k=1}^{100} k"),
    ("a huge power", r"\int_{0}^{9} x^{12345} dx", r"\int_{0}^{1234} x dx"),
    ("a long sum or product", r"\prod_{k=1}^{10^{9}} k", r"\prod_{k=1}^{10} k"),
    ("an indefinite integral", r"\int x dx", r"\int_{0}^{1} x dx"),
    ("an indefinite integral", r"\int\sin x dx", r"\int\limits_0^1 \sin x dx"),
    ("a derivative of high order", r"\frac{d^{10}}{dx^{10}} x^{12}", r"\frac{d^{9}}{dx^{9}} x^{12}"),
    ("many signs in a row", "-" * 16 + "x", "-" * 15 + "x"),
    ("many signs in a row", "|" * 16 + "x", "|" * 15 + "x"),
    ("several integrals", r"\int_0^1\int_0^1 x dx dy", r"\int_0^1 x dx"),
    ("several integrals", r"\iint x", r"\int_0^1 x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "over", "within"), LIMITS, ids=[f"{row[0]} {row[1]}"[:40] for row in LIMITS])
def test_each_limit_of_the_filter_is_where_it_is_said_to_be(name: str, over: str, within: str) -> None:
    refuse_explosive(within)
    with pytest.raises(UndecidedError, match=name) as refusal:
        refuse_explosive(over)
    assert (refusal.value.verdict, refusal.value.path) == ("error", "prefilter")
    assert refusal.value.reason.startswith("not evaluated: ")


def asked(answer: str, gold: str, kind: Any = "expression", **meta: Any) -> tuple[str, int]:
    """Return (the verdict, or "" while it is pending; the number of symbolic queries), none of them answered."""
    wanted: dict[Any, None] = {}
    grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", gold, kind, PLAIN, meta=meta), {}, wanted)
    return grade.verdict if grade else "", len(wanted)


def test_every_symbolic_query_passes_the_filter() -> None:
    explosive, harmless = r"\ln((x+y)^{100})", r"\ln((x+y)^{99})"
    assert asked(explosive, r"\ln 8") == ("error", 0)
    assert asked(harmless, r"\ln 8") == ("", 1)
    assert asked(r"\ln(2^{12345})", "5", "float", tolerance=0.1) == ("error", 0)  # its value would be computed
    assert asked(r"\ln(2^{1234})", "5", "float", tolerance=0.1) == ("", 1)
    assert asked(f"{explosive}, 2", r"\ln 8, 2", "list") == ("error", 0)
    assert asked(rf"{explosive} \approx 69.3", r"\ln 8") == ("error", 0)


def test_a_long_answer_and_a_long_list_are_refused_at_their_limits() -> None:
    refuse_long("5" * 8000)
    with pytest.raises(UndecidedError, match="8000 characters"):
        refuse_long("5" * 8001)
    assert asked("y" * 8001, "x") == ("error", 0)
    assert asked(rf"y}} \boxed{{{'y' * 8001}", "x") == ("error", 0)  # of any of the boxes
    for size, verdict in ((24, "wrong"), (25, "error")):  # items to pair off
        gold, answer = (rf"\{{{','.join(map(str, range(start, start + size)))}\}}" for start in (1, 101))
        assert asked(answer, gold) == (verdict, 0)


def test_many_boxes_of_many_spellings_are_no_answer() -> None:
    """Write 5 with thin spaces and their opposites in every order: all are equal, and each would have to be read."""
    spellings = [
        rf"\boxed{{5{''.join(order)}}}" for order in itertools.islice(itertools.product([r"\,", r"\!"], repeat=8), 65)
    ]
    for number, verdict in ((64, "correct"), (65, "no_answer")):
        grade = try_grade(GradeTask(" ".join(spellings[:number]), "5", "integer", PLAIN), {}, {})
        assert grade is not None and grade.verdict == verdict


# Each is repeated to the length of the noise.
NOISE = [
    *(r"\boxed{5}", r"\boxed{", r"\boxed", r"\boxed   ", r"\boxed{1}\boxed{", r"\boxed{\{"),
    *("{", "}", "{}", "\\", r"\{", "\uff5b", "\uff3c\uff42\uff4f\uff58\uff45\uff44\uff5b\uff15\uff5d"),
    *("\u200b", "\\\u200bboxed{5}", "\ud800", "\0", "\u4e2d", "\u0665", "\u00bd", "e\u0301"),
    *("7", "1,", "x=", "a ", "&#52;", "&lt;", "<", "<  ", "< think ", "<think"),
    *("<think>", "</think>", "<answer>", "</answer>", "<answer></answer>", "<think></think>"),
]
TEMPLATE_TAG = re.compile("think|answer")
FRAMES = {
    "in the reasoning": r"<think>{}</think><answer>\boxed{{5}}</answer>",
    "before the box": r"<think>a</think><answer>{}\boxed{{5}}</answer>",
    "after the answer": r"<think>a</think><answer>\boxed{{5}}</answer>{}",
    "in the box": r"<think>a</think><answer>\boxed{{{}}}</answer>",
    "all there is": "{}",
}


@pytest.mark.timeout(240)  # each size takes a second
@pytest.mark.parametrize(
    "size", [10_000, 100_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_noise_of_any_length_is_read_in_linear_time(size: int) -> None:
    """A reader that runs away runs for hours. Noise without tags outside the answer region changes nothing.

    An answer of nothing but noise is refused or no answer, never a fault and never right.
    """
    for noise in NOISE:
        text = (noise * (size // len(noise) + 1))[: size // len(noise) * len(noise)]
        for where, frame in FRAMES.items():
            task = GradeTask(frame.format(text), "5", "integer", TEMPLATES["think_answer"])
            grade = try_grade(task, {}, {})
            assert grade is not None and grade.path != "fault", (noise, where)
            if where == "in the box" and noise not in ("\u200b", r"\boxed{5}"):
                assert not grade.correct, noise
            if where in ("in the reasoning", "after the answer") and not TEMPLATE_TAG.search(noise):
                assert grade.correct, (noise, where)


LURES = [
    *(
        "{1\\over",
        r"\text{",
        r"\frac{",
        r"\sqrt",
        r"\approx 1",
        r"\dot1",
        r"k\in Z ",
        "½",
        "=",
        "=x",
        "a=b=",
        "x=",
        "^1",
    ),
    *(
        "A and ",
        "Option ",
        "word ",
        "is ",
        " to ",
        "one ",
        "m/",
        "|",
        ",",
        ":",
        "1:",
        "1,",
        "1'",
        "1.",
        "(1,2)",
        "]0,1[",
    ),
    *("&#52;", "<b>", "*", "{,}"),
]


@pytest.mark.timeout(120)  # each takes milliseconds; one that runs away takes hours
@pytest.mark.parametrize("lure", todays(LURES, days=2))
def test_no_repeated_lure_runs_away(lure: str) -> None:
    """Repeat a text to half of the longest answer that is read at all, up to the symbolic queries."""
    golds = (("x=2", "expression", ()), ("3:4", "list", ()), ("B", "choice", ("4 cm", "5 cm")))
    # A bracket that is the wrong way round may begin an open interval.
    for frame, (gold, kind, choices) in (*(("{}", gold) for gold in golds), ("]{}", golds[1]), ("[{}[", golds[1])):
        answer = frame.format((lure * 4000)[:3990])
        task = GradeTask(rf"\boxed{{{answer}}} \boxed{{5}}", gold, kind, PLAIN, choices)  # type: ignore[arg-type]
        grade = try_grade(task, {}, {})
        assert grade is None or (grade.path != "fault" and not grade.correct)


@pytest.mark.parametrize("text", ["]{0},{0}", "]{0},{0};[", "[{0},{0};[", "[x] {0},{0};["])
def test_the_time_of_a_bracket_without_a_partner_is_linear(text: str) -> None:
    """Twice the text takes about twice the time; a search of cubic time takes eight times as long."""

    def seconds(size: int) -> float:
        begun = time.process_time()
        clean(text.format("a" * size))
        return time.process_time() - begun

    assert min(seconds(600) for _ in range(5)) < 5 * min(seconds(300) for _ in range(5))


@pytest.mark.parametrize("status", ["timeout", "error"])
def test_a_comparison_without_a_result_is_a_verdict_of_its_own(status: Any) -> None:
    task, wanted = GradeTask(r"\boxed{\ln 3}", r"\ln 2", "expression", PLAIN), {}
    assert try_grade(task, {}, wanted) is None
    grade = try_grade(task, dict.fromkeys(wanted, (status, "it took too long")), {})
    assert grade is not None and (grade.verdict, grade.reason) == (status, "it took too long")


def test_a_response_asks_for_a_bounded_number_of_comparisons() -> None:
    for size, verdict in ((6, None), (7, "error")):  # 36 and 49 pairs
        gold, answer = (rf"\{{{','.join(rf'{name} {n}x' for n in range(size))}\}}" for name in (r"\sin", r"\cos"))
        wanted: dict[Any, None] = {}
        grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", gold, "expression", PLAIN), {}, wanted)
        assert (grade.verdict if grade else None) == verdict
        assert len(wanted) == min(size * size, MAX_QUERIES)


def test_a_closed_form_has_a_bounded_cost() -> None:
    root = r"(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11})^{100}"
    assert parse_closed_form(root.replace("100", "10")) is not None
    for text in ("+".join([root] * 16), "+".join(["(a+1)^{59}"] * 90), "*".join(["(a+b+c+d+1)^{2}"] * 60)):
        assert parse_closed_form(text) is None


SYMBOLS = [
    *r"0123456789.,+-*/^_!(){}[]<>=|%'&$ xyeinπ√±∞½²٣५",
    *(r"\frac", r"\sqrt", r"\pi", r"\pm", r"\{", r"\}", r"\cup", r"\le", r"\text{", r"\left(", r"\binom"),
    *(" or ", " cm"),
]
GOLDS = ["5", "x+1", r"\{1,2\}", "(0,1]", "x>2"]


@given(st.lists(st.sampled_from(SYMBOLS), max_size=25).map("".join), st.sampled_from(GOLDS))
@settings(max_examples=400)
def test_no_text_makes_the_grader_fail(answer: str, gold: str) -> None:
    """Read any text up to the symbolic queries."""
    for kind in ("expression", "list", "text", "float"):
        grade = try_grade(GradeTask(rf"\boxed{{{answer}}}", gold, kind, PLAIN, meta={"tolerance": 0.1}), {}, {})
        assert grade is None or grade.path != "fault", grade


# -- hostile answers among good ones ---------------------------------------------------------------------

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
    """Good answers between hostile ones get their usual verdicts; the limits stop what the filter misses."""
    good = [task(r"\sqrt{8}", r"2\sqrt{2}"), task(r"\sqrt{8}", r"3\sqrt{2}"), task("1/2", "0.5")]
    gold = r"\frac{x+1}{y}"
    hostile = [task(gold, text.replace("\\boxed", "\\fbox")) for text in HOSTILE]
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


@pytest.mark.turn(2, days=4)
@pytest.mark.slow
def test_512_good_answers_among_288_hostile_ones_on_an_idle_and_a_busy_machine() -> None:
    """The good answers get the verdicts that they get alone, also while other processes take the cores."""
    golds = ((r"\ln 8", r"3\ln 2"), (r"\ln 8", r"2\ln 3"), ("1/2", "0.5"), ("B", "C", "choice"))
    good = [task(*golds[index % 4]) for index in range(512)]
    hostile = [task(r"\frac{x+1}{y}", (HOSTILE * 2)[kind]) for kind in range(36) for _ in range(8)]
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
