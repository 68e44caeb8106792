"""The parts that are a formula of one response: its grade, its form, its length and its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from vlm_rl.config import RewardConfig, RewardPartConfig
from vlm_rl.rewards.part import GradedResponse, Opener, Part, PartVerdict, RewardSetup
from vlm_rl.types import Rollout


def formula(
    value: Callable[[GradedResponse, RewardSetup], float],
    weight: Callable[[RewardConfig], float],
    *,
    is_optional: bool = True,
) -> Opener:
    """Return the line of the registry for a formula.

    Args:
        value: of one response.
        weight: what it is multiplied by.
        is_optional: a weight of 0 leaves the part out, its metric too.
    """

    def open_part(name: str, setup: RewardSetup) -> Iterator[Part]:
        section = RewardPartConfig(weight=weight(setup.config))
        if section.weight or not is_optional:
            yield Part(
                name,
                section,
                lambda responses: [PartVerdict(float(value(response, setup))) for response in responses],
                follows_grade=True,
            )

    return open_part


def correct(response: GradedResponse, setup: RewardSetup) -> float:
    """Return 1 for a right answer, otherwise 0."""
    return response.grade.correct


def well_formed(response: GradedResponse, setup: RewardSetup) -> float:
    """Return 1 for a response in the template's format, otherwise 0.

    Of an episode the last turn is such a response, the earlier ones have their reasoning, and no call failed.
    """
    earlier = response.rollout.turns[:-1]
    return setup.template.is_well_formed(response.text) and all(
        setup.template.is_well_formed_turn(response.prompt.prefill + turn.text)
        and not (turn.observation and turn.observation.error)
        for turn in earlier
    )


def tool_use(response: GradedResponse, setup: RewardSetup) -> float:
    """Return 1 for a right answer after a call that was answered, otherwise 0 (DeepEyes, arXiv 2505.14362)."""
    answered = [turn.observation for turn in response.rollout.turns if turn.observation is not None]
    return response.grade.correct and any(observation.tool and not observation.error for observation in answered)


def overlong(response: GradedResponse, setup: RewardSetup) -> float:
    """Return the penalty for the response's length, which the configuration scales."""
    buffer, factor = setup.config.overlong_buffer, setup.config.overlong_factor
    return overlong_penalty(len(response.rollout.ids), max_tokens=setup.max_tokens, buffer=buffer, factor=factor)


def coin(response: GradedResponse, setup: RewardSetup) -> float:
    """Return 1 or 0 by the toss of a fair coin."""
    return flip_coin(response.rollout)


def repetition(response: GradedResponse, setup: RewardSetup) -> float:
    """Return minus the share of the response's n-grams that repeat an earlier one."""
    return -repeated_share(response.rollout.ids, ngram=setup.config.repetition_ngram)


def brevity(response: GradedResponse, setup: RewardSetup) -> float:
    """Return 1 for a right answer of no tokens, falling to 0 at the longest response; 0 for a wrong one."""
    return response.grade.correct * (1 - len(response.rollout.ids) / setup.max_tokens)


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """Return 0 up to max_tokens - buffer tokens, then a line that reaches -factor at max_tokens.

    Args:
        length: tokens of the response.
        max_tokens: the most that a response may have.
        buffer: tokens over which the penalty grows; 0 is off.
        factor: the largest penalty.
    """
    if buffer == 0:
        return 0.0
    return min(0.0, ((max_tokens - buffer) - length) / buffer * factor)


def flip_coin(rollout: Rollout) -> bool:
    """Return heads or tails, from the response's problem, index and policy version alone, never from its text."""
    key = f"{rollout.problem_id}\0{rollout.index}\0{rollout.policy_version}".encode()
    return hashlib.blake2b(key, digest_size=1).digest()[0] % 2 == 1


def repeated_share(ids: np.ndarray, *, ngram: int) -> float:
    """Return the share, 0 to 1, of the windows of `ngram` tokens that repeat an earlier window."""
    if len(ids) <= ngram:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(ids, ngram)
    return 1 - len({window.tobytes() for window in windows}) / len(windows)
