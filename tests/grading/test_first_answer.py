"""Where reasoning first states the right answer: places worked by hand, identities, hostile texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vlm_rl
from vlm_rl.errors import UserError
from vlm_rl.grading import first_answer as module
from vlm_rl.grading.first_answer import (
    MAX_GRADED,
    differ_as_numbers,
    find_first_answer,
    reasoning_span,
    stated_values,
    statements,
)
from vlm_rl.grading.grader import Grader, GradeTask, try_grade
from vlm_rl.templates import TEMPLATES

# (reasoning before the statement's end, the rest of it, gold): each reasoning is the two joined
CASES = [
    ("We add: 2 + 3 = 5.", " Wait, let me check: 3 + 2 = 5. Yes.", "5"),
    ("First 3 of 9. So there are 5 red squares.", " Hmm", "5"),  # 3 and 9 in passing; the number behind the verb
    (r"The area is $\frac{1}{2}\cdot 3 = 1.5$.", " Alternatively 2.", "3/2"),
    ("It must be option (B).", " Or A? B.", "B"),
    ("row 1 has 3.5 and\nthe sum is 1,200", "\nthat is all", "1200"),
    ("The capital is Paris.", " It lies on the Seine.", "paris"),
    ("a1 red 1 a2 red 2", " check a1 red 1 a2 red 2", "2"),
    (r"Thus \boxed{7}.", " I am sure that it is 8.", "7"),
    ("The result: **12**.", " Good.", "12"),
    ("so 12", "", "12"),
]


@pytest.mark.parametrize(("before", "after", "gold"), CASES)
@pytest.mark.parametrize("frame", ["<think>{}</think>\\boxed{{0}}", " <think>\n{} ", "{}\\boxed{{0}}"])
def test_the_place_and_the_share(before: str, after: str, gold: str, frame: str) -> None:
    if frame.startswith("{}") and r"\boxed" in before:
        pytest.skip("a box in a response without a block is the answer, not the reasoning")
    found = vlm_rl.first_answer(frame.format(before + after), gold)
    assert found is not None
    begin = frame.index("{}")
    assert found.end == begin + len(before)
    assert found.after == len(after)
    assert found.share_after == pytest.approx(len(after) / len(before + after))


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("", "3"),
        ("<think></think>\\boxed{3}", "3"),  # the answer alone is not reasoning
        ("<think>3 of the squares are red, and 2 are not</think>\\boxed{3}", "3"),  # in passing, at the beginning
        ("<think>It is 4.</think> So 3. \\boxed{3}", "3"),
        ("<think>The height is 35.</think>", "3"),
    ],
)
def test_what_is_no_statement_of_the_answer(response: str, gold: str) -> None:
    assert vlm_rl.first_answer(response, gold) is None


@given(st.text(alphabet="ab 1.=\n!?)*$wait check", max_size=80))
def test_statements_are_in_order_apart_and_leave_out_white_space_alone(text: str) -> None:
    parts = list(statements(text))
    assert all(text[start:end] == text[start:end].strip() != "" for start, end in parts)
    ends = [0, *(place for part in parts for place in part), len(text)]
    assert ends == sorted(ends)
    gaps = [text[a:b] for a, b in zip(ends[::2], ends[1::2], strict=True)]
    assert not "".join(gaps).strip()


@given(st.text(alphabet="<think>/ ab\n\\boxed{}", max_size=60))
def test_the_reasoning_lies_before_what_closes_it(response: str) -> None:
    start, end = reasoning_span(response)
    assert 0 <= start <= end <= len(response)
    assert response[start:end] == response[start:end].strip()
    if "</think>" in response:
        assert end <= response.rindex("</think>")


_NUMBERS = st.from_regex(r"-?[0-9]{1,4}(\.[0-9]{1,2})?", fullmatch=True)
_QUESTIONS = st.sampled_from(["", "What percentage is red?", "What is the ratio?", "What time is it?"])


@given(_NUMBERS, _NUMBERS, _QUESTIONS, st.sampled_from(["integer", "float", "expression", "text", "list"]))
def test_numbers_that_differ_are_never_equal_to_the_grader(value: str, gold: str, question: str, kind: str) -> None:
    """The shortcut agrees with the grader it spares."""
    if differ_as_numbers(value, [gold]):
        task = GradeTask(rf"\boxed{{{value}}}", gold, kind, TEMPLATES["plain"], question=question)  # pyright: ignore
        grade = try_grade(task, {}, {})
        assert grade is not None and not grade.correct


def test_a_value_is_what_a_statement_ends_with() -> None:
    assert stated_values("of 9 squares there are 5 red ones") == ["5 red ones", "5"]
    assert stated_values("x = y = 3/4.") == ["3/4"]
    assert stated_values(r"so \boxed{4} of 5") == ["4"]
    assert stated_values("nothing to see") == []
    assert stated_values("it is blue", gold="Blue") == ["blue"]


def test_symbolic_values_count_where_a_grader_is_given() -> None:
    task = GradeTask(
        r"<think>We get $\sin(x)^2 + \cos(x)^2 + x$. Then more.</think>", "x+1", "expression", TEMPLATES["plain"]
    )
    assert find_first_answer(task)[0] is None
    with Grader(workers=1) as grader:
        found = find_first_answer(task, grader=grader)[0]
    assert found is not None and found.after == len(" Then more.")


def test_a_hostile_response_costs_a_bounded_number_of_comparisons() -> None:
    numbers = " ".join(f"{i},000." for i in range(5_000, 20_000))
    found, count = find_first_answer(GradeTask(numbers, "3", "integer", TEMPLATES["plain"]))
    assert found is None and count == MAX_GRADED


def test_hostile_texts_are_cut_in_time_linear_in_their_length() -> None:
    """Doubling the text doubles the work: measured in statements and values, not by a clock."""
    for unit in ("= ", "$", "\\boxed{", "is ", ".!?)", "(", "wait ", "-"):
        sizes = [
            sum(len(stated_values(f"{unit * n}"[a:b])) + 1 for a, b in statements(unit * n)) for n in (500, 1000)
        ]
        assert sizes[1] <= 2 * sizes[0] + 2, unit


@pytest.mark.slow
def test_symbolic_comparisons_end_after_a_few_that_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that exhaust the workers' CPU limit are given up, with real workers."""
    monkeypatch.setattr(module, "MAX_UNDECIDED", 1)
    slow = " ".join(rf"We get $\cos({i}x)^{{9}}\sin({i}y)^{{9}}\tan(z)^{{9}}$." for i in range(2, 8))
    task = GradeTask(f"<think>{slow}</think>", r"\sin(x)+1", "expression", TEMPLATES["plain"])
    with Grader(workers=1, timeout=0.05) as grader:
        assert find_first_answer(task, grader=grader)[0] is None


def test_errors_are_those_of_grade() -> None:
    with pytest.raises(UserError, match="gold is empty"):
        vlm_rl.first_answer("3", [])
    with pytest.raises(UserError, match="answer_type is 'number'"):
        vlm_rl.first_answer("3", "3", answer_type="number")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("reasoning", "gold", "question", "start"),
    [
        ("We have 2x+1=7. So 2x=6, x=3.", "7", "Solve 2x+1=7.", None),
        ("Given x + y = 5. Then we add. The total is 5.", "5", "If x+y=5, what is the sum?", "The total"),
        ("We know a=5. Then 3+2=5.", "5", "Let a=5 and b=3. Find 3+2.", "Then"),
        ("So 2x = 6, x = 3.", "3", "Solve 2x=6.", "So"),
        ("x=15. No.", "15", "Solve 2x=150.", "x=15"),
        ("所以一共有十二个。再检查一遍。", "12", "", "所以"),
        ("先看图。答案是12。再检查。", "12", "", "答案"),
        ("先看图。等于五。好。", "5", "", "等于"),
        ("Look. There are twelve apples. Let me check.", "12", "", "There"),
        ("Look. So the answer is twenty-one. Hmm.", "21", "", "So"),
    ],
)
def test_the_questions_equation_is_no_answer_and_words_are_numbers(
    reasoning: str, gold: str, question: str, start: str | None
) -> None:
    response = f"<think>{reasoning}</think>"
    found = vlm_rl.first_answer(response, gold, question=question)
    assert (found and response[found.start : found.end].startswith(start or "?")) is (True if start else None)
