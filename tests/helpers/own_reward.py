"""A reward function as a user would write one; configurations of tests name it."""

from __future__ import annotations

from vlm_rl.types import Grade, Problem


def short_words(problem: Problem, response: str, grade: Grade, length: int) -> float:
    return 1.0 if len(response) < 10 * length else 0.0


not_a_function = 3
