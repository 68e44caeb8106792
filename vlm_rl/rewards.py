"""Rewards: accuracy + format + overlong, and the parts that the configuration turns on, each kept apart.

    R = accuracy * [correct] + format * [well formed]
        + min(0, ((L_max - L_buffer) - |y|) / L_buffer * factor)
        - repetition * (share of the response's n-grams that repeat an earlier one)
        + brevity * [correct] * (1 - |y| / L_max)
        + function_weight * (the user's own function)

The weights of the first three are those of the LUSPO paper (arXiv 2602.05261): 1, 0.5, and a factor of 0.3 with
L_max 4096 and L_buffer 512. The overlong term is DAPO's (arXiv 2503.14476), where the factor is 1. The other parts
are off by default. |y| counts the generated tokens, the end-of-sequence token included.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import numpy as np

from vlm_rl.config import RewardConfig
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import Grader, task_of
from vlm_rl.templates import Template
from vlm_rl.types import Grade, Problem, Prompt, Reward, Rollout

Item = tuple[Problem, Prompt, Rollout]
UserFunction = Callable[[Problem, str, Grade, int], float]  # problem, response, grade, tokens -> part of the reward


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """Return 0 up to max_tokens - buffer tokens, then a line that reaches -factor at max_tokens. Buffer 0 is off."""
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


def load_reward_function(path: str) -> UserFunction:
    """Import the function `module.name`. Raises UserError, which names the key, if that fails."""
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"reward.function is {path!r}: {error}; give an importable module.function") from None
    if not callable(function):
        raise UserError(f"reward.function is {path!r}, a {type(function).__name__}; give a function")
    return cast(UserFunction, function)


class RewardFunction:
    """Turns rollouts into rewards. It holds no state but the grader's workers."""

    def __init__(self, config: RewardConfig, *, template: Template, max_tokens: int, grader: Grader) -> None:
        """Import the configured function, if there is one. Raises UserError where that fails."""
        self.config = config
        self.template = template
        self.max_tokens = max_tokens
        self.grader = grader
        allowed = config.function and config.allow_function
        self.function = load_reward_function(config.function) if allowed else None

    def score(self, items: Sequence[Item]) -> list[Reward]:
        """Return one reward per item, in order. The graded text is the prompt's prefill plus the sampled text."""
        texts = [prompt.prefill + rollout.text for _, prompt, rollout in items]
        tasks = [task_of(problem, text, self.template) for (problem, _, _), text in zip(items, texts, strict=True)]
        grades = self.grader.grade_many(tasks)
        rewards = []
        for (problem, _, rollout), text, grade in zip(items, texts, grades, strict=True):
            dropped = self.config.undecided == "drop" and grade.verdict in ("timeout", "error")
            rewards.append(Reward(self._parts(problem, text, rollout, grade), grade, dropped))
        return rewards

    def _parts(self, problem: Problem, text: str, rollout: Rollout, grade: Grade) -> dict[str, float]:
        config, length = self.config, len(rollout.ids)
        parts = {
            "accuracy": config.accuracy * grade.correct,
            "format": config.format * self.template.is_well_formed(text),
            "overlong": overlong_penalty(
                length, max_tokens=self.max_tokens, buffer=config.overlong_buffer, factor=config.overlong_factor
            ),
        }
        if config.coin:
            parts["coin"] = config.coin * flip_coin(rollout)
        if config.repetition:
            parts["repetition"] = -config.repetition * repeated_share(rollout.ids, ngram=config.repetition_ngram)
        if config.brevity:
            parts["brevity"] = config.brevity * grade.correct * (1 - length / self.max_tokens)
        if self.function is not None:
            value = float(self.function(problem, text, grade, length))
            if not math.isfinite(value):
                raise UserError(
                    f"reward.function {config.function} returned {value} for problem {problem.id!r}: "
                    "return a finite number"
                )
            parts["function"] = config.function_weight * value
        return parts


class Scoring:
    """Scores groups in a thread, while the sampler generates others.

    All groups that have arrived in the meantime go into one call of `RewardFunction.score`, which compares equal
    answers once and keeps every worker busy. A context manager: leaving it drops what is not scored yet.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[int, list[Item]]] = deque()
        self._calls: list[Future[None]] = []
        self._rewards: dict[int, tuple[Reward, ...]] = {}

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()
        self._pool.shutdown(cancel_futures=True)

    def add(self, index: int, items: list[Item]) -> None:
        """Queue a group's responses under a number of the caller's choice."""
        self._waiting.append((index, items))
        self._calls.append(self._pool.submit(self._score_waiting))

    def rewards(self) -> dict[int, tuple[Reward, ...]]:
        """Wait for all groups and return the rewards of each by its number. Raises what `score` raised."""
        for call in self._calls:
            call.result()
        return self._rewards

    def _score_waiting(self) -> None:
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        rewards = iter(self._function.score([item for _, items in taken for item in items]))
        for index, items in taken:
            self._rewards[index] = tuple(next(rewards) for _ in items)
