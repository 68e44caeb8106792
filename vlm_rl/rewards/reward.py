"""Rewards: a sum of parts, each a line of the registry PARTS.

    R = accuracy * [correct] + format * [well formed]
        + min(0, ((L_max - L_buffer) - |y|) / L_buffer * factor)
        - repetition * (share of the response's n-grams that repeat an earlier one)
        + brevity * [correct] * (1 - |y| / L_max)
        + tool_use * [correct] * [a tool was called, and answered]
        + function_weight * (the user's own function)
        + sum of weight * value over the user's named functions, iou, point_in_box, judge and reward_model

The weights of the first three are those of the LUSPO paper (arXiv 2602.05261): 1, 0.5, and a factor of 0.3 with
L_max 4096 and L_buffer 512. The overlong term is DAPO's (arXiv 2503.14476), where the factor is 1. The other parts
are off by default. |y| counts the generated tokens, the end-of-sequence token included.

[correct] is the grader's verdict, unless a part has the role accuracy: then it is [value >= 0.5]. A part with the
role logged is in no sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vlm_rl.config import RewardConfig
from vlm_rl.errors import UserError, near
from vlm_rl.grading.grader import Grader, task_of
from vlm_rl.rewards.accuracy import BOX_REMEDY, AccuracyPart, check_boxes
from vlm_rl.rewards.formulas import brevity, coin, correct, formula, overlong, repetition, tool_use, well_formed
from vlm_rl.rewards.functions import open_function, open_functions
from vlm_rl.rewards.grounding import open_grounding
from vlm_rl.rewards.judge import open_judge
from vlm_rl.rewards.part import GradedResponse, Opener, Part, PartVerdict, RewardSetup
from vlm_rl.rewards.reward_model import open_reward_model
from vlm_rl.templates import Template
from vlm_rl.types import Grade, Problem, Prompt, Reward, Rollout

# In the order in which they are added; vlm_rl.rewards.part says what an entry does. A key is a part's name in the
# metrics, except for the functions, which the user names.
PARTS: dict[str, Opener] = {
    "accuracy": formula(correct, lambda config: config.accuracy, is_optional=False),
    "format": formula(well_formed, lambda config: config.format, is_optional=False),
    "overlong": formula(overlong, lambda config: 1.0),
    "coin": formula(coin, lambda config: config.coin),
    "repetition": formula(repetition, lambda config: config.repetition),
    "brevity": formula(brevity, lambda config: config.brevity),
    "tool_use": formula(tool_use, lambda config: config.tool_use),
    "function": open_function,
    "functions": open_functions,
    "iou": open_grounding,
    "point_in_box": open_grounding,
    "judge": open_judge,
    "reward_model": open_reward_model,
}

ScoringItem = tuple[Problem, Prompt, Rollout]


class RewardFunction:
    """Turns rollouts into rewards. It holds no state but the grader's workers and what the parts hold."""

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
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        """Open the parts that are on. Raises UserError if one cannot be used.

        Args:
            config: the parts and their weights.
            template: says where the answer is and what a well-formed response is.
            max_tokens: longest response in tokens.
            grader: judges the answers. It stays the caller's to close.
            is_stopped: tells whether the step is going to be abandoned. Functions and judge are then not waited for.
            model_type: the model's, which says what its coordinates mean.
            judge_cache: folder of the judge's replies, where the configuration names none.
            functions: of this process, by the name behind cell: in their paths.
        """
        self._drops_undecided = config.undecided == "drop"
        self._has_group_length = config.group_length > 0
        self._template = template
        self._grader = grader
        self._parts: list[Part] = []
        setup = RewardSetup(config, template, max_tokens, model_type, judge_cache, is_stopped, functions)
        with ExitStack() as opened:
            for name, open_part in PARTS.items():
                for part in open_part(name, setup):
                    opened.callback(part.close)
                    self._parts.append(part)
            self._opened = opened.pop_all()
        judges = (AccuracyPart(part) for part in self._parts if part.section.role == "accuracy")
        self._accuracy = next(judges, None)  # at most one, as the configuration has checked

    def check_golds(self, problems: Sequence[Problem]) -> None:
        """Raise UserError if a part is not for these problems, such as one for boxes where no problem has any.

        Also raise UserError if answers are programs that this machine cannot run in a sandbox, or boxes that would
        only be compared as text.
        """
        self._grader.check_programs(problems)
        check_boxes(problems, self._accuracy, remedy=BOX_REMEDY)
        for part in self._parts:
            part.check(problems)

    def check_names(self, names: Iterable[str], *, key: str) -> None:
        """Raise UserError if the configuration's `key` names a part that this reward does not have."""
        known = [*(part.name for part in self._parts), *(["group_length"] if self._has_group_length else [])]
        for name in names:
            if name not in known:
                hint = near(name, known, otherwise=f"its parts are {', '.join(known)}")
                raise UserError(f"{key} names {name!r}, which is no part of this run's reward: {hint}")

    def score(self, items: Sequence[ScoringItem], *, groups: Sequence[int] = ()) -> list[Reward]:
        """Return one reward per item, in order. The graded text is the prompt's prefill plus the sampled text.

        `groups` has the number of each item's group. Items of a group are adjacent. Empty: all items form one group.
        """
        if not items:
            return []
        groups = groups or [0] * len(items)
        texts = [prompt.prefill + rollout.text for _, prompt, rollout in items]
        tasks = [task_of(problem, text, self._template) for (problem, _, _), text in zip(items, texts, strict=True)]
        grades = self._grader.grade_many(tasks)
        responses = [
            GradedResponse(*item, text, grade, group)
            for item, text, grade, group in zip(items, texts, grades, groups, strict=True)
        ]
        verdicts = self._ask([part for part in self._parts if not part.follows_grade], responses)
        if self._accuracy is not None:
            grades = self._accuracy.grades_by(responses, verdicts[self._accuracy.name])
            responses = [replace(response, grade=grade) for response, grade in zip(responses, grades, strict=True)]
        verdicts |= {part.name: part.verdicts(responses) for part in self._parts if part.follows_grade}
        return [
            self._reward(response.grade, {name: said[index] for name, said in verdicts.items()})
            for index, response in enumerate(responses)
        ]

    def abort(self) -> None:
        """Stop functions, which may never return, judge and programs; a `score` that waits for them ends."""
        self._grader.stop_programs()
        for part in self._parts:
            part.abort()

    def close(self) -> None:
        """End the processes of the user's functions."""
        self._opened.close()

    def _ask(self, parts: Sequence[Part], responses: Sequence[GradedResponse]) -> dict[str, list[PartVerdict]]:
        """Ask all parts at the same time, and return each one's scores of the responses by its name."""
        if not parts:
            return {}
        with ThreadPoolExecutor(len(parts)) as pool:
            asked = {part.name: pool.submit(part.verdicts, responses) for part in parts}
            try:
                return {name: call.result() for name, call in asked.items()}
            except BaseException:  # a function that stops the run: the others are not waited for
                self.abort()
                raise

    def _reward(self, grade: Grade, verdicts: Mapping[str, PartVerdict]) -> Reward:
        """Add up what the parts say of one response."""
        values: dict[str, float] = {}
        logged: dict[str, float] = {}
        undecided: dict[str, str] = {}
        cost: dict[str, int] = {}
        is_undecided = grade.verdict in ("timeout", "error")
        for part in self._parts:
            outcome = verdicts[part.name].outcome
            reason = outcome if isinstance(outcome, str) else ""
            if part.section.role == "part":
                values[part.name] = part.section.weight * outcome if isinstance(outcome, float) else 0.0
                is_undecided = is_undecided or bool(reason)
            else:
                logged[part.name] = outcome if isinstance(outcome, float) else float("nan")
            if part.may_fail:
                undecided[part.name] = reason
            cost.update(verdicts[part.name].cost)
        dropped = self._drops_undecided and is_undecided
        return Reward(values, grade, dropped=dropped, logged=logged, undecided=undecided, cost=cost)


def open_accuracy(
    config: RewardConfig,
    *,
    template: Template,
    model_type: str,
    judge_cache: Path,
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> AccuracyPart | None:
    """Open the part with the role accuracy alone, for an evaluation; None if the grader decides.

    Args:
        config: the reward, at most one of whose parts has that role.
        template: says where the answer is.
        model_type: the model's, which says what its coordinates mean.
        judge_cache: folder of the judge's replies, where the configuration names none.
        functions: of this process, by the name behind cell: in their paths.

    Raises UserError if the part cannot be used.
    """
    name = config.accuracy_part
    if name is None:
        return None
    is_own = name in config.functions
    only = config.model_copy(update={"functions": {name: config.functions[name]}}) if is_own else config
    opener = "functions" if is_own else name
    setup = RewardSetup(only, template, 0, model_type, judge_cache, lambda: False, functions)
    return AccuracyPart(next(iter(PARTS[opener](opener, setup))))


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
        groups = [number for number, (_, items) in enumerate(taken) for _ in items]
        rewards = iter(self._function.score([item for _, items in taken for item in items], groups=groups))
        for index, items in taken:
            self._rewards[index] = tuple(next(rewards) for _ in items)
