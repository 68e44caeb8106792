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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from vlm_rl.config import RewardConfig
from vlm_rl.grading.grader import Grader, task_of
from vlm_rl.reward_process import RewardProcess
from vlm_rl.templates import Template
from vlm_rl.types import Grade, Problem, Prompt, Reward, Rollout

Item = tuple[Problem, Prompt, Rollout]


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


class RewardFunction:
    """Turns rollouts into rewards. It holds no state but the grader's workers and the user's own function."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        template: Template,
        max_tokens: int,
        grader: Grader,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the process of the configured function, if there is one. Raises UserError where that fails.

        Args:
            config: the parts and their weights.
            template: says where the answer is and what a well-formed response is.
            max_tokens: longest response in tokens.
            grader: judges the answers. It stays the caller's to close.
            is_stopped: tells whether the step is going to be abandoned. The user's function is then not waited for.
        """
        self.config = config
        self.template = template
        self.max_tokens = max_tokens
        self.grader = grader
        self._is_stopped = is_stopped
        allowed = config.function and config.allow_function
        self._process = RewardProcess(config.function, timeout=config.function_timeout) if allowed else None

    def score(self, items: Sequence[Item]) -> list[Reward]:
        """Return one reward per item, in order. The graded text is the prompt's prefill plus the sampled text."""
        texts = [prompt.prefill + rollout.text for _, prompt, rollout in items]
        tasks = [task_of(problem, text, self.template) for (problem, _, _), text in zip(items, texts, strict=True)]
        grades = self.grader.grade_many(tasks)
        all_parts = [
            self._parts(text, rollout, grade)
            for (_, _, rollout), text, grade in zip(items, texts, grades, strict=True)
        ]
        if self._process is not None:
            calls = [
                (problem, text, grade, len(rollout.ids))
                for (problem, _, rollout), text, grade in zip(items, texts, grades, strict=True)
            ]
            for parts, value in zip(all_parts, self._process.values(calls, is_stopped=self._is_stopped), strict=True):
                parts["function"] = self.config.function_weight * value
        drops = self.config.undecided == "drop"
        return [
            Reward(parts, grade, dropped=drops and grade.verdict in ("timeout", "error"))
            for parts, grade in zip(all_parts, grades, strict=True)
        ]

    def abort(self) -> None:
        """Kill the user's function, which may never return; a `score` that waits for it ends."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process of the user's function."""
        if self._process is not None:
            self._process.close()

    def _parts(self, text: str, rollout: Rollout, grade: Grade) -> dict[str, float]:
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
        return parts


class Scoring:
    """Scores groups in a thread, while the sampler generates others.

    All groups that have arrived in the meantime go into one call of `RewardFunction.score`, which compares equal
    answers once and keeps every worker busy. A context manager: leaving it drops what is not scored yet, and
    leaving it by an exception kills the user's function too, for which the thread would wait.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[int, list[Item]]] = deque()
        self._calls: list[Future[None]] = []
        self._rewards: dict[int, tuple[Reward, ...]] = {}

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._waiting.clear()
        if kind is not None:
            self._function.abort()
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
