"""The part of a reward in the role accuracy: it says what a right answer is, in training and in evaluations alike.

    part = open_accuracy(config.reward, template=template, model_type="qwen2_5_vl", judge_cache=folder)
    grades = part.grades(items, texts, grades)

A comparison of texts says nothing about a box. So problems whose answer is a gold box need such a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.rewards.grounding import is_answered_by_boxes
from vlm_rl.rewards.part import GradedResponse, Part, PartVerdict
from vlm_rl.types import Grade, Outcome, Problem, Prompt, Rollout

RIGHT_FROM = 0.5  # the value from which the part calls a response right
BOX_REMEDY = "set reward.iou.role to accuracy, or that of point_in_box, a judge or a function of yours"
_HOW_TO_ASK = {
    "weight",
    "role",
    "url",
    "api_key_env",
    "concurrency",
    "timeout",
    "retries",
    "cache",
}  # no verdict changes


class AccuracyPart:
    """A part that grades responses instead of the grader."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.name = part.name

    def grades(
        self, items: Sequence[tuple[Problem, Prompt, Rollout]], texts: Sequence[str], grades: Sequence[Grade]
    ) -> list[Grade]:
        """Return the grade of each response; the grader's own where the part does not apply.

        Args:
            items: the responses.
            texts: what was graded: the prompt's prefill and the sampled text.
            grades: the grader's.
        """
        graded = zip(items, texts, grades, strict=True)
        responses = [GradedResponse(*item, text, grade) for item, text, grade in graded]
        return self.grades_by(responses, self._part.verdicts(responses))

    def grades_by(self, responses: Sequence[GradedResponse], verdicts: Sequence[PartVerdict]) -> list[Grade]:
        """Return the grades by what the part has already said of the responses."""
        return [
            regraded(response.grade, self.name, verdict.outcome)
            for response, verdict in zip(responses, verdicts, strict=True)
        ]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that decide the grades, as plain JSON."""
        section = self._part.section.model_dump(mode="json", exclude=_HOW_TO_ASK)
        return {"name": self.name, **section, **self._part.facts}

    def close(self) -> None:
        """End the process of a user's function."""
        self._part.close()


def check_boxes(problems: Iterable[Problem], part: AccuracyPart | None, *, remedy: str) -> None:
    """Raise UserError if answers are gold boxes, and nothing but a comparison of texts would judge them."""
    if part is None and (boxed := [problem.id for problem in problems if is_answered_by_boxes(problem)]):
        raise UserError(
            f"the answers of {len(boxed)} problems, such as {boxed[0]!r}, are boxes, which nobody writes to the same "
            f"digit: a comparison of their texts would be no accuracy; {remedy}"
        )


def regraded(grade: Grade, name: str, outcome: Outcome) -> Grade:
    """Return the grade by a part with the role accuracy; the grader's own where the part does not apply."""
    if outcome is None:
        return grade
    if isinstance(outcome, str):
        return replace(grade, verdict="error", path=name, reason=outcome)
    verdict = "correct" if outcome >= RIGHT_FROM else "wrong"
    return replace(
        grade, verdict=verdict, path=name, reason=f"{name} gives {outcome:.3g}; right from {RIGHT_FROM} on"
    )
