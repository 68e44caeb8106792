r"""Scores, ranges, years, sizes and phone numbers are no calculations, and an answer of type text never is one.

The numerals of a form are what counts, so that what is expected follows from the two texts alone.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vlm_rl.grading.grader import GradeTask, try_grade
from vlm_rl.grading.written_forms import parse_form
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import AnswerType

NUMBERS = st.integers(1, 99)


def equal(gold: str, answer: str, kind: AnswerType = "expression", question: str = "") -> bool:
    """Return whether the answer is graded correct by exact rules, without a worker."""
    task = GradeTask(rf"\boxed{{{answer}}}", gold, kind, TEMPLATES["plain"], question=question)
    grade = try_grade(task, {}, {})
    assert grade is not None and grade.verdict in ("correct", "wrong"), (gold, answer, grade)
    return grade.correct


@given(NUMBERS, NUMBERS, st.integers(1, 50), st.sampled_from(["expression", "text", "list"]))
def test_a_score_is_not_its_difference(first: int, second: int, shift: int, kind: AnswerType) -> None:
    assert equal(f"{first}-{second}", f"{first}–{second}", kind)
    assert not equal(f"{first}-{second}", f"{first + shift}-{second + shift}", kind)
    assert not equal(f"{first}-{second}", str(first - second), kind)
    assert not equal(f"{first}-{second}", f"{second}-{first}", kind) or first == second


@given(st.lists(st.integers(0, 255), min_size=3, max_size=4), st.integers(1, 9))
def test_numerals_between_points_are_an_address(numbers: list[int], digit: int) -> None:
    address = ".".join(map(str, numbers))
    assume(not re.fullmatch(r"[1-9][0-9]{0,2}(\.[0-9]{3})+", address))  # 1.000.000 is a million
    assert equal(address, address) and equal(f"v{address}", f"v {address}")
    for other in (f"{address}{digit}", f"{digit}{address}", f"{address}.{digit}", address[: address.rindex(".")]):
        assert not equal(address, other), (address, other)


@given(st.from_regex(r"[A-Z][0-9]{1,2}[A-Z][1-9]", fullmatch=True), NUMBERS)
def test_a_letter_in_front_of_a_digit_is_a_name(code: str, number: int) -> None:
    assert equal(code, f" {code} ") and equal(f"{code}-{number}", f"{code} - {number}")
    assert not equal(code, code[0] + code[-2:]) and not equal(code, f"{code}{number}")
    assert not equal(f"{code}-{number}", f"-{number}+{code}")


@pytest.mark.parametrize(
    ("gold", "same", "other"),
    [
        ("192.168.0.1", ("192.168.0.1",), ("192.168.1.0", "192.168.0.10", "192.168")),
        ("10.0.0.0/8", ("10.0.0.0/8",), ("10.0.0.0/9", "10")),
        ("2.10.0", ("2.10.0",), ("2.1.0", "2.10")),
        ("v2.10", ("v2.10",), ("v2.1", "2.1")),
        ("1.000.000", ("1000000", "1,000,000"), ("1.000",)),
        ("e4", ("e4",), ("4e", "e^4", "e5")),
        ("e2-e4", ("e2-e4", "e2–e4"), ("-2e", "e1-e3", "e4-e2")),
        ("A1", ("A_1", "A1"), ("A", "1A")),
        ("x1", ("x_1", "x_{1}"), ("x", "x2")),
        ("0x1F", ("0x1F",), ("0", "0x2F")),
    ],
)
def test_codes_are_compared_by_their_characters(gold: str, same: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert [answer for answer in same if not equal(gold, answer)] == []
    assert [answer for answer in other if equal(gold, answer)] == []


@given(NUMBERS, NUMBERS)
def test_a_size_is_not_its_product(first: int, second: int) -> None:
    assume(first != second)
    assert equal(f"{first}x{second}", rf"{first}\times {second}") and equal(
        f"{first} x {second}", f"{first} by {second}"
    )
    assert not equal(rf"{first}\times{second}", str(first * second))
    assert not equal(f"{first}x{second}", f"{second}x{first}")
    assert not equal(f"{first}x{second}", f"{2 * first}x{second / 2}")


@pytest.mark.parametrize(
    ("gold", "same", "other"),
    [
        ("5-7", ("5 to 7", "from 5 to 7", "between 5 and 7", "(5-7)", "5--7", "5至7"), ("-2", "6-8", "7-5", "5:7")),
        ("5 to 7", ("5-7",), ("6-8", "-2")),
        ("5-7 cm", ("5 cm - 7 cm", "5 cm to 7 cm", "5-7"), ("6-8 cm", "-2 cm", "5-7 m")),
        (r"\$5-\$7", (r"\$5–\$7", r"\$5 to \$7"), (r"\$6-\$8", r"-\$2")),
        (r"20-30\%", (r"20\%-30\%", r"20\% to 30\%"), (r"-10\%", r"30-40\%")),
        ("1/2-3/4", ("1/2 to 3/4",), ("-1/4", "1/4-1/2")),
        ("-5--3", ("-5 to -3",), ("-2", "-4--2")),
        ("1914-1918", ("1914 to 1918", "1914–18"), ("-4", "1915-1919")),
        ("2019/20", ("2019/2020", "2019-20", "2019–2020"), ("4038/40", "2018/19")),
        ("9/11/2001", ("9/11/2001",), ("9/22011", "11/9/2001")),
        ("555-1234", ("555 1234", "555.1234"), ("-679", "556-1235", "1234-555")),
        ("555-0123", ("555-0123",), ("555-123", "432")),
        ("(212) 555-0123", ("212-555-0123", "212 555 0123"), ("(212) 555-0124", "118537")),
        ("1-800-555-0199", ("1 800 555 0199",), ("1-800-556-0200", "-1553")),
        ("4-4-2", ("4–4–2",), ("-2", "4-2-4", "5-5-2")),
        (r"3 cm \times 4 cm", ("3 x 4 cm", "3 cm by 4 cm"), ("12 cm^2", r"4 cm \times 3 cm")),
        ("8.5 x 11 inches", ("8.5 by 11 inches", r"8.5\times11"), ("93.5", "11 x 8.5 inches")),
        (r"2\times3\times5", (r"5\times3\times2",), ("30", r"2\times15", r"6\times5")),
        (r"2\times3\times4", (r"2 x 3 x 4",), ("24", r"4\times3\times2")),
        ("3-2, 1-0", ("3-2, 1-0",), ("4-3, 2-1", "1, 1")),
        (r"\{3-2, 4-0\}", (r"\{4-0, 3-2\}",), (r"\{1, 4\}", r"\{4-3, 5-1\}")),
    ],
)  # fmt: skip
def test_numerals_with_signs_between_them_are_compared_one_by_one(
    gold: str, same: tuple[str, ...], other: tuple[str, ...]
) -> None:
    assert [answer for answer in same if not equal(gold, answer)] == []
    assert [answer for answer in other if equal(gold, answer)] == []


@pytest.mark.parametrize(
    ("gold", "same", "other"),
    [
        ("120/80", ("120 / 80", r"\frac{120}{80}"), ("3/2", "1.5", "240/160")),
        ("9/11", ("9/11",), ("18/22", r"\frac{18}{22}")),
        ("3:4", ("3:4", "3 : 4"), ("6:8", "3/4", "0.75")),
        ("2+3", ("2 + 3",), ("5", "3+2")),
        ("2^3", ("2^{3}",), ("8",)),
        ("5!", ("5!",), ("120",)),
        ("007", ("007",), ("7",)),
        (r"50\%", (r"50\%",), ("0.5",)),
        ("120/80, 1/2", ("120/80, 1/2",), ("3/2, 2/4",)),
        (r"\{120/80, 3\}", (r"\{3, 120/80\}",), (r"\{3/2, 3\}",)),
        ("1,000", ("1000", "1000.0"), ("1001",)),
        ("twelve", ("12", "Twelve"), ("13",)),
        ("12 cm", ("12 centimetres",), ("13 cm",)),
        ("A-", ("A−", "a-", r"\text{A-}"), ("A", "A+", "B-")),
        ("A", ("a",), ("A-", "A+")),
        ("Type O-", ("type O−.",), ("Type O", "Type O+")),
        ("O- blood", ("o- blood",), ("O blood", "O+ blood")),
        ("X-ray", ("X ray", "x-ray"), ("X",)),
    ],
)  # fmt: skip
def test_nothing_is_computed_in_a_text(gold: str, same: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert [answer for answer in same if not equal(gold, answer, "text")] == []
    assert [answer for answer in other if equal(gold, answer, "text")] == []


def test_calculations_stay_calculations() -> None:
    for gold, answer in (("5", "17-12=5"), ("1/2", "2/4"), ("3:4", "6:8"), ("3", "3.0"), ("-3", "(-3)")):
        assert equal(gold, answer), (gold, answer)
    for gold, answer in ((r"3\times10^5", "300000"), (r"2^3\times5", "40"), ("x-2", "-2+x"), ("3-2i", "-2i+3")):
        assert equal(gold, answer), (gold, answer)


def test_a_root_without_brackets_is_no_code() -> None:
    assert parse_form("sqrt2") is None and parse_form("H1N1") is not None


def test_a_factorization_has_no_order_where_the_question_asks_for_one() -> None:
    assert equal(r"2\times3", r"3\times2", question="Write 6 as a product of prime factors.")
    assert not equal(r"2\times3", r"3\times2", question="What size is the matrix?")
