"""A reward without labels: the answer that most responses to a prompt give counts as right.

    reward:
      accuracy: 0
      allow_function: true
      functions:
        vote: {path: vlm_rl.rewards.votes.majority_vote}

As in test-time reinforcement learning (TTRL, arXiv 2504.16084). It is called in a process of its own, as functions of
users are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from vlm_rl.grading.grader import Grader
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Grade, Problem


def majority_vote(problem: Problem, responses: Sequence[str], grades: Sequence[Grade]) -> list[float]:
    r"""Return 1 for each response with the most frequent answer of its group, otherwise 0.

    Answers are equal where the grader says so: 1/2 votes with 0.5. A response without an answer has no vote, so one
    that was cut off before its answer has none. Where two answers are the most frequent, nobody is paid: TTRL takes
    the first, and so pays by the order of the responses. The gold has no part in it.

    Args:
        problem: says what kind of answer it asks for; its gold is not looked at.
        responses: all to its prompt.
        grades: the grader's, whose extracted answers vote.
    """
    answers = [grade.extracted for grade in grades]
    votes: dict[str, list[int]] = {}  # the first spelling of each answer -> places of the responses that give it
    for place, answer in enumerate(answers):
        if answer:
            known = next((first for first in votes if _are_equal(first, answer, problem)), answer)
            votes.setdefault(known, []).append(place)
    most = max(map(len, votes.values()), default=0)
    winners = [places for places in votes.values() if len(places) == most]
    paid = winners[0] if len(winners) == 1 else []
    return [float(place in paid) for place in range(len(answers))]


def _are_equal(first: str, second: str, problem: Problem) -> bool:
    if first == second or problem.answer_type == "code":
        return first == second
    how: dict[str, Any] = {"answer_type": problem.answer_type, "choices": problem.choices, "meta": problem.meta}
    plain = TEMPLATES["plain"]
    return _grader().grade(rf"\boxed{{{second}}}", gold=first, template=plain, **how).correct


@cache
def _grader() -> Grader:
    return Grader(workers=1)
