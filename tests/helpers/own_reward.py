"""Reward functions as a user would write them; configurations of tests name them."""

from __future__ import annotations

from vlm_rl.types import Grade, Problem


def short_words(problem: Problem, response: str, grade: Grade, length: int) -> float:
    return 1.0 if len(response) < 10 * length else 0.0


def letter_share(problem: Problem, response: str, grade: Grade, length: int) -> float:
    """Return the share of letters, which differs between the responses of an untrained model too."""
    return sum(character.isascii() and character.isalpha() for character in response) / max(1, len(response))


not_a_function = 3
