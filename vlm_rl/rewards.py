"""Rewards: accuracy + format + overlong, and the parts that the configuration turns on, each kept apart.

    R = accuracy * [correct] + format * [well formed]
        + min(0, ((L_max - L_buffer) - |y|) / L_buffer * factor)
        - repetition * (share of the response's n-grams that repeat an earlier one)
        + brevity * [correct] * (1 - |y| / L_max)
        + function_weight * (the user's own function)
        + sum of weight * value over the user's named functions, iou, point_in_box and judge

The weights of the first three are those of the LUSPO paper (arXiv 2602.05261): 1, 0.5, and a factor of 0.3 with
L_max 4096 and L_buffer 512. The overlong term is DAPO's (arXiv 2503.14476), where the factor is 1. The other parts
are off by default. |y| counts the generated tokens, the end-of-sequence token included.

[correct] is the grader's verdict, unless a part has the role accuracy: then it is [value >= 0.5]. A part with the
role logged is in no sum.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from vlm_rl.config import RewardConfig, RewardPartConfig
from vlm_rl.errors import UserError
from vlm_rl.grading.grader import Grader, task_of
from vlm_rl.reward_parts.functions import UserFunction
from vlm_rl.reward_parts.grounding import GroundingReward
from vlm_rl.reward_parts.judge import Judge
from vlm_rl.templates import Template
from vlm_rl.types import Call, Grade, Outcome, Problem, Prompt, Reward, Rollout

ScoringItem = tuple[Problem, Prompt, Rollout]
RIGHT_FROM = 0.5  # the value from which a part with the role accuracy calls a response right


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


class RewardFunction:
    """Turns rollouts into rewards. It holds no state but the grader's workers, the user's functions and the judge."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        template: Template,
        max_tokens: int,
        grader: Grader,
        is_stopped: Callable[[], bool] = lambda: False,
        model_type: str = "",
        judge_cache: Path = Path("judge_cache"),
    ) -> None:
        """Start the processes of the configured functions. Raises UserError where a part cannot be used.

        Args:
            config: the parts and their weights.
            template: says where the answer is and what a well-formed response is.
            max_tokens: longest response in tokens.
            grader: judges the answers. It stays the caller's to close.
            is_stopped: tells whether the step is going to be abandoned. Functions and judge are then not waited for.
            model_type: the model's, which says what its coordinates mean.
            judge_cache: folder of the judge's replies, where the configuration names none.
        """
        self.config = config
        self.template = template
        self.max_tokens = max_tokens
        self.grader = grader
        self._is_stopped = is_stopped
        self._grounding = {
            name: GroundingReward(name, section, template=template, model_type=model_type)
            for name, section in (("iou", config.iou), ("point_in_box", config.point_in_box))
            if section is not None
        }
        self._judge = Judge(config.judge, cache=judge_cache) if config.judge else None
        self._functions = _start_functions(config)
        self._may_fail = {*config.functions, *(["judge"] if config.judge else [])}

    def check_golds(self, problems: Sequence[Problem]) -> None:
        """Raise UserError where a reward for boxes or points is on, and no problem has a gold box.

        And where answers are programs, and this machine cannot run them in a sandbox.
        """
        self.grader.check_programs(problems)
        if self._grounding and not any("box" in problem.meta for problem in problems):
            raise UserError(
                f"reward.{next(iter(self._grounding))} is on, but no problem of data.train has a gold box: prepare "
                "the set with a box column (docs/data.md), or leave the reward out"
            )

    def score(self, items: Sequence[ScoringItem]) -> list[Reward]:
        """Return one reward per item, in order. The graded text is the prompt's prefill plus the sampled text."""
        texts = [prompt.prefill + rollout.text for _, prompt, rollout in items]
        tasks = [task_of(problem, text, self.template) for (problem, _, _), text in zip(items, texts, strict=True)]
        grades = self.grader.grade_many(tasks)
        calls: list[Call] = [
            (problem, text, grade, len(rollout.ids))
            for (problem, _, rollout), text, grade in zip(items, texts, grades, strict=True)
        ]
        outcomes, costs = self._ask(calls)
        for name, reward in self._grounding.items():
            outcomes[name] = [
                reward.outcome(problem, text, prompt.images[0].size if prompt.images else (1, 1))
                for (problem, prompt, _), text in zip(items, texts, strict=True)
            ]
        return [
            self._reward(call, item[2], {name: values[index] for name, values in outcomes.items()}, cost)
            for index, (item, call, cost) in enumerate(zip(items, calls, costs, strict=True))
        ]

    def abort(self) -> None:
        """Stop functions, which may never return, judge and programs; a `score` that waits for them ends."""
        self.grader.stop_programs()
        for part in (*self._functions.values(), *([self._judge] if self._judge else [])):
            part.abort()

    def close(self) -> None:
        """End the processes of the user's functions."""
        for function in self._functions.values():
            function.close()

    def _ask(self, calls: Sequence[Call]) -> tuple[dict[str, list[Outcome]], list[dict[str, int]]]:
        """Return what functions and judge say, by name, and what each call cost; all are asked at the same time."""
        if not calls or not (self._functions or self._judge):
            return {}, [{} for _ in calls]
        with ThreadPoolExecutor(len(self._functions) + 1) as pool:
            asked = {
                name: pool.submit(function.outcomes, calls, is_stopped=self._is_stopped)
                for name, function in self._functions.items()
            }
            judged = pool.submit(self._judge.verdicts, calls, is_stopped=self._is_stopped) if self._judge else None
            try:
                outcomes = {name: call.result() for name, call in asked.items()}
                verdicts = judged.result() if judged else []
            except BaseException:  # a function that stops the run: the others are not waited for
                self.abort()
                raise
        if not verdicts:
            return outcomes, [{} for _ in calls]
        return outcomes | {"judge": [v.outcome for v in verdicts]}, [v.cost for v in verdicts]

    def _reward(
        self, call: Call, rollout: Rollout, outcomes: Mapping[str, Outcome], cost: Mapping[str, int]
    ) -> Reward:
        """Add up the parts of one response.

        Args:
            call: the problem, the graded text and its grade.
            rollout: the response.
            outcomes: of the functions, iou, point_in_box and the judge, by name.
            cost: of asking the judge.
        """
        _, text, grade, _ = call
        sections = self.config.named_parts
        if "function" in outcomes:
            sections = {"function": RewardPartConfig(weight=self.config.function_weight), **sections}
        for name, section in sections.items():
            if section.role == "accuracy":
                grade = regraded(grade, name, outcomes[name])
        parts, logged = self._parts(text, rollout, grade), {}
        for name, section in sections.items():
            outcome = outcomes[name]
            if section.role == "part":
                parts[name] = section.weight * outcome if isinstance(outcome, float) else 0.0
            else:
                logged[name] = outcome if isinstance(outcome, float) else float("nan")
        reasons = {name: outcome if isinstance(outcome, str) else "" for name, outcome in outcomes.items()}
        unjudged = grade.verdict in ("timeout", "error") or any(
            reason and sections[name].role == "part" for name, reason in reasons.items()
        )
        return Reward(
            parts,
            grade,
            dropped=self.config.undecided == "drop" and unjudged,
            logged=logged,
            undecided={name: reason for name, reason in reasons.items() if name in self._may_fail},
            cost=cost,
        )

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


def regraded(grade: Grade, name: str, outcome: Outcome) -> Grade:
    """Return the grade by a part with the role accuracy; the grader's own where the part does not apply."""
    if outcome is None:
        return grade
    if isinstance(outcome, str):
        return replace(grade, verdict="error", path=name, reason=outcome)
    verdict = "correct" if outcome >= RIGHT_FROM else "wrong"
    return replace(grade, verdict=verdict, path=name, reason=f"{name} is {outcome:.3g}; right from {RIGHT_FROM} on")


def _start_functions(config: RewardConfig) -> dict[str, UserFunction]:
    """Start the process of each function, by its part's name. Raises UserError where one cannot be imported."""
    with ExitStack() as started:
        functions: dict[str, UserFunction] = {}
        start = partial(UserFunction, timeout=config.function_timeout)
        if config.function and config.allow_function:
            functions["function"] = start(config.function)
            started.callback(functions["function"].close)
        for name, section in config.functions.items():
            stops_run, key = section.on_failure == "stop", f"reward.functions.{name}.path"
            functions[name] = start(section.path, key=key, stops_run=stops_run)
            started.callback(functions[name].close)
        started.pop_all()
    return functions


class Scoring:
    """Scores groups in a thread, while the sampler generates others.

    All groups that have arrived in the meantime go into one call of `RewardFunction.score`, which compares equal
    answers once and keeps every worker busy. A context manager: leaving it drops what is not scored yet, and
    leaving it by an exception kills the user's function too, for which the thread would wait.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[int, list[ScoringItem]]] = deque()
        self._calls: list[Future[None]] = []
        self._rewards: dict[int, tuple[Reward, ...]] = {}

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._waiting.clear()
        if kind is not None:
            self._function.abort()
        self._pool.shutdown(cancel_futures=True)

    def add(self, index: int, items: list[ScoringItem]) -> None:
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
