r"""The grader's verdicts: the corpus, the table of docs/grading.md, and values that are equal or not by construction.

grading_cases.jsonl holds one case a line: {class, gold, answer_type, response, verdict, why, choices?, tolerance?}.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_rl import cli
from vlm_rl.grading.grader import Grader, GradeTask, try_grade
from vlm_rl.grading.latex import clean
from vlm_rl.grading.rational import TooLargeError, parse_rational
from vlm_rl.grading.reasons import PHRASES
from vlm_rl.templates import TEMPLATES

HERE = Path(__file__).resolve().parent
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (HERE / "grading_cases.jsonl").read_text(encoding="utf-8").splitlines()
]
PLAIN = TEMPLATES["plain"]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=1, timeout=5.0) as grader:
        yield grader


# -- the corpus ----------------------------------------------------------------------------------------


def test_the_corpus_covers_every_class_and_is_half_refusals() -> None:
    verdicts = Counter(case["verdict"] for case in CASES)
    assert len(CASES) >= 800
    assert len(CASES) - verdicts["correct"] >= len(CASES) / 2
    assert len({case["class"] for case in CASES}) >= 24
    assert all(case["why"] for case in CASES)


@pytest.mark.slow
def test_the_corpus_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graded.jsonl"
    assert cli.main(["grade", "--file", str(HERE / "grading_cases.jsonl"), "--out", str(out)]) == 0
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{**case, "verdict": ""} for case in CASES] == [
        {key: "" if key == "verdict" else row[key] for key in case} for case, row in zip(CASES, graded, strict=True)
    ]
    different = [
        f"{case['class']}: {case['response'][-60:]!r} for {case['gold']!r} is {row['verdict']} ({row['path']}: "
        f"{row['reason']}), not {case['verdict']}: {case['why']}"
        for case, row in zip(CASES, graded, strict=True)
        if case["verdict"] != row["verdict"]
    ]
    assert different == []
    assert all(row["reason"] and row["path"] not in ("", "fault") for row in graded)
    rules = {row["path"] for row in graded if row["verdict"] in ("correct", "wrong")}
    assert rules <= PHRASES.keys(), "every rule has its two phrases in vlm_rl/grading/reasons.py"
    summary = capsys.readouterr().out
    assert f"{len(CASES)} responses" in summary and "grader version" in summary


def test_every_gold_of_the_corpus_accepts_itself() -> None:
    for case in CASES:
        for gold in case["gold"] if isinstance(case["gold"], list) else [case["gold"]]:
            if case["answer_type"] != "choice":  # a text that two options share names neither
                task = GradeTask(rf"\boxed{{{gold}}}", gold, case["answer_type"], PLAIN)
                grade = try_grade(task, {}, {})  # needs no worker: it is the same text
                assert grade is not None and grade.correct, (gold, grade)


def documented() -> list[tuple[str, str, str, bool]]:
    """Return (gold, type, answer, equal) of every cell of the table in docs/grading.md."""
    rows = []
    for line in (HERE.parents[1] / "docs" / "grading.md").read_text(encoding="utf-8").splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) or [cell.strip()] for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[1][0] in ("expression", "integer", "list", "text", "choice"):
            (gold,), (kind,), same, other = cells
            rows += [(gold, kind, answer, True) for answer in same]
            rows += [(gold, kind, answer, False) for answer in other]
    return rows


def test_the_documented_table_is_true(grader: Grader) -> None:
    rows = documented()
    assert len(rows) > 90
    tasks = [GradeTask(rf"\boxed{{{answer}}}", gold, kind, PLAIN) for gold, kind, answer, _ in rows]  # type: ignore[arg-type]
    wrong = [
        (row, grade.reason)
        for row, grade in zip(rows, grader.grade_many(tasks), strict=True)
        if grade.verdict != ("correct" if row[3] else "wrong")
    ]
    assert wrong == []


# -- equal and unequal by construction -------------------------------------------------------------------

RATIONALS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4)


def notations(value: Fraction) -> list[str]:
    """Return the same number in different notations."""
    above, below = value.numerator, value.denominator
    minus, size = "-" if above < 0 else "", abs(above)
    spellings = [
        rf"\frac{{{above}}}{{{below}}}",
        rf"{minus}\dfrac{{{3 * size}}}{{{3 * below}}}",
        f"{minus}{size}/{below}",
        rf"\left({above} \div {below}\right)",
        rf"x = {above}/{below}",
        f"{'−' * (above < 0)}{size}/{below}",
        rf"\frac{{{100 * above}}}{{{below}}}\%",
        rf"\text{{{above}/{below}}}",
    ]
    if below == 1:
        spellings += [f"{above:,}", f"{above}.0", f"{above:,}".replace(",", r"\,"), rf"{above}00\times10^{{-2}}"]
    elif size > below:
        spellings.append(rf"{minus}{size // below}\frac{{{size % below}}}{{{below}}}")
    return spellings


@given(RATIONALS, st.data())
@settings(max_examples=150)
def test_a_number_in_a_different_notation_is_equal(value: Fraction, data: st.DataObject) -> None:
    gold = f"{value.numerator}/{value.denominator}"
    answer = data.draw(st.sampled_from(notations(value)))
    with Grader() as grader:  # starts no worker: exact rules decide on numbers
        grade = grader.grade(rf"\boxed{{{answer}}}", gold=gold, answer_type="expression", template=PLAIN)
    assert grade.correct, (gold, answer, grade)


@given(RATIONALS, RATIONALS, st.data())
@settings(max_examples=150)
def test_a_different_number_is_not_equal(value: Fraction, other: Fraction, data: st.DataObject) -> None:
    if other in (value, 100 * value):  # 100 x as 100 x % is x, which is asked for
        return
    gold = f"{value.numerator}/{value.denominator}"
    answer = data.draw(st.sampled_from(notations(other)))
    with Grader() as grader:
        grade = grader.grade(rf"\boxed{{{answer}}}", gold=gold, answer_type="expression", template=PLAIN)
    assert grade.verdict == "wrong", (gold, answer, grade)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=6, unique=True), st.randoms())
@settings(max_examples=60)
def test_sets_have_no_order_and_tuples_do(numbers: list[int], random: Any) -> None:
    shuffled = random.sample(numbers, len(numbers))
    gold, answer = (", ".join(map(str, items)) for items in (numbers, shuffled))
    with Grader() as grader:

        def equal(left: str, right: str) -> bool:
            return grader.grade(rf"\boxed{{{right}}}", gold=left, answer_type="expression", template=PLAIN).correct

        assert equal(rf"\{{{gold}\}}", rf"\{{{answer}\}}")
        assert not equal(rf"\{{{gold}\}}", rf"\{{{answer}, 51\}}")
        if len(numbers) > 1:
            assert equal(f"({gold})", f"({answer})") == (numbers == shuffled)


@given(st.integers(1, 400), st.integers(1, 12), st.integers(-9, 9))
@settings(max_examples=60)
def test_roots_are_decided_exactly(radicand: int, factor: int, offset: int) -> None:
    gold = rf"{offset}+{factor}\sqrt{{{radicand}}}"
    same = rf"\frac{{{factor * radicand}}}{{\sqrt{{{radicand}}}}}+{offset}"
    other = rf"{offset}+{factor}\sqrt{{{radicand + 1}}}"
    with Grader() as grader:
        verdicts = [
            grader.grade(rf"\boxed{{{text}}}", gold=gold, answer_type="expression", template=PLAIN)
            for text in (same, other)
        ]
    assert [grade.verdict for grade in verdicts] == ["correct", "wrong"]
    assert verdicts[0].path in ("closed_form", "number")


@given(st.fractions(max_denominator=10**9), st.sampled_from(["\\frac{%d}{%d}", "%d/%d", "\\dfrac{%d}{%d}"]))
def test_fractions_are_read_exactly(number, form: str) -> None:
    text = form % (number.numerator, number.denominator)
    assert parse_rational(clean(text)) == number


@given(st.integers(), st.integers(min_value=0, max_value=12))
def test_decimals_are_read_exactly(digits: int, places: int) -> None:
    # -7 with 3 places is -0.007: the sign comes in front of the padded digits.
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
