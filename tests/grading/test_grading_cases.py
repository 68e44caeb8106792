r"""The grader through its command: the corpus, the table of docs/grading.md, files, and values made on purpose.

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
from vlm_rl.grading.closed_form import parse_closed_form
from vlm_rl.grading.grader import Grader, GradeTask, extract
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
    summary = capsys.readouterr().out
    assert f"{len(CASES)} responses" in summary and "grader version" in summary


def documented() -> list[tuple[str, str, str, bool]]:
    """(gold, type, answer, equal) of every cell of the table in docs/grading.md."""
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


# -- the command -----------------------------------------------------------------------------------------


def test_a_file_keeps_its_fields_and_order(tmp_path: Path) -> None:
    rows = [
        {"id": "b", "gold": ["0.01", "0.02"], "response": r"\boxed{0.02}", "note": {"kept": [1]}},
        {"gold": 27.0, "response": r"\boxed{27}"},
        {"id": 3, "gold": "B", "response": r"\boxed{6 cm}", "choices": ["4 cm", "5 cm", "6 cm"]},
        {"gold": 2.0944, "response": r"\boxed{\frac{2\pi}{3}}", "tolerance": 0.001},
        {"gold": "x", "response": "\ud800 nothing"},
        {"gold": "6 cm", "response": r"\boxed{C}", "choices": ["4 cm", "5 cm", "6 cm"]},  # choices make it a choice
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert cli.main(["grade", "--file", str(source), "--out", str(out)]) == 0
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["verdict"] for row in graded] == ["correct", "correct", "wrong", "correct", "no_answer", "correct"]
    added = {"verdict", "extracted", "path", "reason"}
    assert [{key: value for key, value in row.items() if key not in added} for row in graded] == rows
    assert all(row.keys() >= added for row in graded)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["not JSON"]),
        ("[1]", ["[1]", "object"]),
        ('{"gold": "1"}', ["'response'"]),
        ('{"response": "1"}', ["'gold'"]),
        ('{"gold": "1", "response": 5}', ["response is 5"]),
        ('{"gold": null, "response": "5"}', ["gold", "None"]),
        ('{"gold": [], "response": "5"}', ["gold is []"]),
        ('{"gold": " ", "response": "5"}', ["gold is empty"]),
        ('{"gold": "1", "response": "5", "answer_type": "maths"}', ["'maths'", "expression"]),
        ('{"gold": "1", "response": "5", "tolerance": "x"}', ["tolerance is 'x'"]),
        ('{"gold": "1", "response": "5", "tolerance": -1}', ["tolerance is -1"]),
        ('{"gold": "1", "response": "5", "choices": "AB"}', ["choices is 'AB'"]),
        (b'{"gold": "1", "response": "\\udcff"}'.decode("unicode_escape"), ["UTF-8"]),
    ],
)
def test_a_bad_line_is_one_message_with_its_number(tmp_path: Path, capsys, line: str, words: list[str]) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = json.dumps({"gold": "1", "response": r"\boxed{1}"})
    source.write_bytes(f"{good}\n\n{line}\n".encode(errors="surrogateescape"))
    assert cli.main(["grade", "--file", str(source), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and f"{source} line 3: " in message
    assert all(word in message for word in words), message
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [[], ["--gold", "1"], ["--file", "x"], ["--out", "x"], ["--file", "x", "--out", "y", "--gold", "1"]],
)
def test_half_a_question_is_refused(capsys, arguments: list[str]) -> None:
    assert cli.main(["grade", *arguments]) == 2
    assert capsys.readouterr().err.startswith("vlm-rl: ")


# -- equal and unequal by construction -------------------------------------------------------------------

RATIONALS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4)


def notations(value: Fraction) -> list[str]:
    """The same number in other spellings."""
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
def test_a_number_in_another_notation_is_equal(value: Fraction, data: st.DataObject) -> None:
    gold = f"{value.numerator}/{value.denominator}"
    answer = data.draw(st.sampled_from(notations(value)))
    with Grader() as grader:  # starts no worker: numbers are decided here
        grade = grader.grade(rf"\boxed{{{answer}}}", gold=gold, answer_type="expression", template=PLAIN)
    assert grade.correct, (gold, answer, grade)


@given(RATIONALS, RATIONALS, st.data())
@settings(max_examples=150)
def test_another_number_is_not(value: Fraction, other: Fraction, data: st.DataObject) -> None:
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


PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    r"\boxed{",
    r"\boxed {",
    "{",
    "}",
    "\\",
    "5",
    "\u200b",
    "｛",
]


LURES = [
    *(
        "{1\\over",
        r"\text{",
        r"\frac{",
        r"\sqrt",
        "½",
        "=",
        "=x",
        "a=b=",
        "x=",
        "A and ",
        "Option ",
        "word ",
        "|",
        ",",
        r"k\in Z ",
        "^1",
        ":",
        "1:",
    ),
    *(
        "1,",
        "1'",
        "1.",
        "(1,2)",
        "]0,1[",
        "&#52;",
        "<b>",
        "*",
        "{,}",
        r"\approx 1",
        r"\dot1",
        "is ",
        " to ",
        "one ",
        "m/",
    ),
]


@pytest.mark.timeout(120)  # each takes milliseconds; one that runs away takes hours
@pytest.mark.parametrize("lure", LURES)
def test_no_repeated_lure_runs_away(lure: str) -> None:
    """The longest answer that is looked at, before the symbolic judge, which is not asked here."""
    from vlm_rl.grading.grader import _grade

    answer = (lure * 8000)[:7990]
    for gold, kind, choices in (("x=2", "expression", ()), ("3:4", "list", ()), ("B", "choice", ("4 cm", "5 cm"))):
        task = GradeTask(rf"\boxed{{{answer}}} \boxed{{5}}", gold, kind, PLAIN, choices)  # type: ignore[arg-type]
        grade = _grade(task, {}, {})
        assert grade is None or (grade.path != "fault" and not grade.correct)


@pytest.mark.parametrize("outcome", ["timeout", "error"])
def test_a_comparison_without_a_verdict_is_never_silent(outcome: Any) -> None:
    from vlm_rl.grading.grader import _grade

    task, wanted = GradeTask(r"\boxed{\ln 3}", r"\ln 2", "expression", PLAIN), {}
    assert _grade(task, {}, wanted) is None
    grade = _grade(task, dict.fromkeys(wanted, (outcome, "it took too long")), {})
    assert grade is not None and (grade.verdict, grade.reason) == (outcome, "it took too long")


def test_one_response_asks_for_a_bounded_number_of_comparisons() -> None:
    from vlm_rl.grading.grader import MAX_ASKED, _grade

    for size, verdict in ((6, None), (7, "error")):  # 36 and 49 pairs
        gold, answer = (rf"\{{{','.join(rf'{name} {n}x' for n in range(size))}\}}" for name in (r"\sin", r"\cos"))
        wanted: dict[Any, None] = {}
        grade = _grade(GradeTask(rf"\boxed{{{answer}}}", gold, "expression", PLAIN), {}, wanted)
        assert (grade.verdict if grade else None) == verdict
        assert len(wanted) == min(size * size, MAX_ASKED)


def test_a_closed_form_has_a_bounded_cost() -> None:
    root = r"(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11})^{100}"
    assert parse_closed_form(root.replace("100", "10")) is not None
    for text in ("+".join([root] * 16), "+".join(["(a+1)^{59}"] * 90), "*".join(["(a+b+c+d+1)^{2}"] * 60)):
        assert parse_closed_form(text) is None


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=30).map("".join))
@settings(max_examples=400)
def test_extraction_never_raises(response: str) -> None:
    for template in TEMPLATES.values():
        texts, why = extract(response, template)
        assert bool(texts) != bool(why)


SYMBOLS = [
    *r"0123456789.,+-*/^_!(){}[]<>=|%'&$ xyeinπ√±∞½²٣५",
    *(r"\frac", r"\sqrt", r"\pi", r"\pm", r"\{", r"\}", r"\cup", r"\le", r"\text{", r"\left(", r"\binom"),
    *(" or ", " cm"),
]
GOLDS = ["5", "x+1", r"\{1,2\}", "(0,1]", "x>2"]


@given(st.lists(st.sampled_from(SYMBOLS), max_size=25).map("".join), st.sampled_from(GOLDS))
@settings(max_examples=400)
def test_no_text_is_a_fault_of_ours(answer: str, gold: str) -> None:
    """Up to the symbolic judge, which is not asked here."""
    from vlm_rl.grading.grader import _grade

    for kind in ("expression", "list", "text", "float"):
        grade = _grade(GradeTask(rf"\boxed{{{answer}}}", gold, kind, PLAIN, meta={"tolerance": 0.1}), {}, {})
        assert grade is None or grade.path != "fault", grade


def test_the_golds_of_the_alternatives_are_tried_in_turn(grader: Grader) -> None:
    for gold, verdict in ((("9^{9^{9^9}}", "5"), "correct"), (("4", "6"), "wrong")):
        assert grader.grade(r"\boxed{5}", gold=gold, answer_type="expression", template=PLAIN).verdict == verdict
