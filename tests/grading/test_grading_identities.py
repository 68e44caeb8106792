r"""Identities that the grader must keep: an inequality times a number, a time on two clocks, a share in percent.

None of them needs math-verify: no worker is started.
"""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_rl.grading.grader import GradeTask, try_grade
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import AnswerType

X: AnswerType = "expression"
FACTORS = st.fractions(min_value=Fraction(1, 20), max_value=50, max_denominator=20)
BOUNDS = st.fractions(min_value=-100, max_value=100, max_denominator=12)
SIGNS = st.sampled_from(["<", ">", r"\le ", r"\ge "])
TURNED = {"<": ">", ">": "<", r"\le ": r"\ge ", r"\ge ": r"\le "}
TIMES = st.integers(0, 24 * 60 - 1)


def equal(gold: str, answer: str, kind: AnswerType = X, question: str = "") -> bool:
    """Return whether the answer is graded correct, by exact rules alone."""
    wanted = {}
    task = GradeTask(rf"\boxed{{{answer}}}", gold, kind, TEMPLATES["plain"], question=question)
    grade = try_grade(task, {}, wanted)
    assert grade is not None and grade.verdict in ("correct", "wrong"), (gold, answer, grade, wanted)
    return grade.correct


def latex(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


@given(FACTORS, BOUNDS, BOUNDS, SIGNS)
@settings(max_examples=80)
def test_an_inequality_keeps_its_meaning_times_a_number(
    factor: Fraction, bound: Fraction, offset: Fraction, sign: str
) -> None:
    gold, scaled = f"x{sign}{latex(bound)}", factor * (bound + offset)
    left = rf"{latex(factor)}x+({latex(factor * offset)})"
    assert equal(gold, f"{left}{sign}{latex(scaled)}")
    assert equal(gold, f"-({left}){TURNED[sign]}{latex(-scaled)}")
    assert equal(gold, f"{latex(scaled)}{TURNED[sign]}{left}")
    assert not equal(gold, f"{left}{TURNED[sign]}{latex(scaled)}")
    assert not equal(gold, f"-({left}){sign}{latex(-scaled)}")
    assert not equal(gold, f"{left}{sign}{latex(scaled + 1)}")
    assert not equal(gold, f"x{sign}{latex(bound)} or x=1")


@given(TIMES, TIMES)
@settings(max_examples=80)
def test_a_time_equals_only_itself_on_either_clock(first: int, second: int) -> None:
    def spelled(minutes: int) -> tuple[str, str]:
        hour, minute = divmod(minutes, 60)
        return f"{hour:02}:{minute:02}", f"{hour % 12 or 12}:{minute:02} {'PM' if hour >= 12 else 'AM'}"

    (long, short), (other_long, other_short) = spelled(first), spelled(second)
    assert equal(short, short.lower(), "text") and equal(long, f"{long}:00")
    if not 60 <= first < 13 * 60:  # else the long one does not say which half of the day it means
        assert equal(short, long, "text") and equal(long, short)
    assert equal(long, other_long) == equal(short, other_short, "text") == (first == second)


@given(st.decimals(min_value=Fraction(1, 100), max_value=1000, places=2))
def test_a_percentage_is_its_numeral_and_its_value(number: Fraction) -> None:
    share = f"{number / 100:f}"
    assert equal(rf"{number}\%", f"{number}") and equal(rf"{number}\%", share) and equal(share, rf"{number}\%")
    assert not equal(f"{number}", rf"{number}\%")
    assert equal(f"{number}", rf"{number}\%", question="What percentage is it?")
    assert not equal(rf"{number}\%", f"{number + 1}") and not equal(rf"{number}\%", f"{100 * number}")


@given(st.integers(1000, 10**12), st.sampled_from([",", r",\!", r"{,}", r"\,", r",\!\!", r"\!,", r",\! "]))
def test_thousands_are_no_list_whatever_separates_them(number: int, separator: str) -> None:
    spelled = f"{number:,}".replace(",", separator)
    kinds: list[AnswerType] = ["integer", "expression"]
    if "!" in separator or "{" in separator:
        kinds.append("list")
    for kind in kinds:
        assert equal(spelled, str(number), kind)
        assert equal(str(number), spelled, kind)
        assert not equal(spelled, str(number + 1), kind)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from("xyvT"), st.sampled_from("tsx"))
def test_a_derivative_is_compared_with_its_coefficient(first: int, second: int, above: str, below: str) -> None:
    derivative = rf"\frac{{d{above}}}{{d{below}}}"
    assert equal(f"{first}{derivative}", f"{second}{derivative}") == (first == second)
    assert equal(f"{first}{derivative}+a=b", f"b-a={first}{derivative}")
    assert equal(derivative, f"d{above}/d{below}") and not equal(derivative, rf"\frac{{{above}}}{{{below}}}")


@given(st.lists(st.integers(0, 5), min_size=2, max_size=4), st.integers(1, 9))
def test_a_ratio_may_be_multiplied_only_where_no_term_is_zero(terms: list[int], factor: int) -> None:
    gold, answer = (":".join(str(n * term) for term in terms) for n in (1, factor))
    assert equal(gold, answer) == (gold == answer or 0 not in terms)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=5), st.lists(st.integers(-9, 9), min_size=1, max_size=5))
def test_sets_are_equal_as_sets_in_both_directions(first: list[int], second: list[int]) -> None:
    left, right = (rf"\{{{','.join(map(str, numbers))}\}}" for numbers in (first, second))
    assert equal(left, right) == equal(right, left) == (set(first) == set(second))
