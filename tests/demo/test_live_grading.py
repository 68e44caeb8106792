"""A live answer to a stored problem is graded as the evaluation would grade it; a changed question is not."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.prepared_sets import write_problems
from vlm_rl.demo.live.ask_queue import AskState
from vlm_rl.demo.live.context import LiveExample
from vlm_rl.demo.live.grading import grade_reply, problem_to_grade
from vlm_rl.demo.live.html import columns_html
from vlm_rl.demo.live.replies import AskSettings, Reply
from vlm_rl.run.eval_result import EvalResult
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

SETTINGS = AskSettings()
STORED = Problem("p1", "Which?", (), "B", "choice", choices=("3 apples", "4 apples"))


def record(**changes: Any) -> dict[str, Any]:
    return {"problem_id": "p1", "question": "Which?", "gold": "B"} | changes


def evaluation(**summary: Any) -> EvalResult:
    return EvalResult("toy-test", 0, Path("none.parquet"), summary)


def think(answer: str) -> str:
    return f"<think>look</think><answer>\\boxed{{{answer}}}</answer>"


@pytest.mark.parametrize(("has_set", "verdict"), [(True, "correct"), (False, "wrong")])
def test_the_prepared_set_knows_the_options(tmp_path: Path, has_set: bool, verdict: str) -> None:
    """The record holds the letter alone: that "4 apples" is option B, only the set can say."""
    folder = write_problems([STORED], tmp_path / "toy-test")
    problem = problem_to_grade(record(), evaluation(), [str(folder)] if has_set else [])
    assert problem is not None
    assert grade_reply(problem, think("4 apples"), TEMPLATES["think_answer"]).verdict == verdict
    assert grade_reply(problem, think("B"), TEMPLATES["think_answer"]).verdict == "correct"
    assert grade_reply(problem, think("A"), TEMPLATES["plain"]).verdict == "wrong"


def test_without_a_gold_nothing_is_graded() -> None:
    assert problem_to_grade(record(gold=None), evaluation(), []) is None
    assert not LiveExample("p1", "Which?", None, None).is_asked("Which?", None)


def test_what_a_part_of_the_reward_decided_the_grader_does_not() -> None:
    assert problem_to_grade(record(), evaluation(accuracy_part={"name": "iou"}), []) is None
    assert problem_to_grade(record(), evaluation(accuracy_part=None), []) is not None


@pytest.mark.parametrize(
    ("text", "image", "is_asked"),
    [("Which?", b"png", True), (" Which?\n", b"png", True), ("Which one?", b"png", False), ("Which?", None, False)],
)
def test_only_the_problem_itself_is_graded(text: str, image: bytes | None, is_asked: bool) -> None:
    assert LiveExample("p1", "Which?", b"png", STORED).is_asked(text, image) == is_asked


@pytest.mark.parametrize(
    ("reply", "answer", "chip", "kind"),
    [
        (Reply("ended", think("B"), 9, 4, stop="stop"), "B", "✓ correct", "correct"),
        (Reply("ended", think("A"), 9, 4, stop="stop"), "A", "✗ wrong", "wrong"),
        (Reply("ended", think("A"), 9, 4, stop="stop"), None, "finished", ""),  # not a stored problem
        (Reply("ended", "x", 9, 4, stop="length"), None, "cut at the limit", "cut"),
    ],
)
def test_green_is_for_right_answers_alone(reply: Reply, answer: str | None, chip: str, kind: str) -> None:
    grades = {} if answer is None else {"a": grade_reply(STORED, think(answer), TEMPLATES["think_answer"])}
    page = columns_html(AskState(0, ["a"], [reply]), SETTINGS, colors={"a": "red"}, grades=grades)
    assert f'<span class="chip {kind}">{chip}</span>' in page
    assert all(grade.reason in page for grade in grades.values())
