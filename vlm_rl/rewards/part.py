"""What a part of the reward is: it gives each response of a batch a value, or says why there is none.

A part is opened from the configuration by its line in vlm_rl.rewards.reward.PARTS:

    def open_politeness(name: str, setup: RewardSetup) -> Iterator[Part]:
        if section := setup.config.politeness:
            yield Part(name, section, lambda responses: [PartVerdict(politeness(r.text)) for r in responses])

It yields nothing where the configuration leaves the part out, and raises UserError where the part cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_rl.config import RewardConfig, RewardPartConfig
from vlm_rl.templates import Template
from vlm_rl.types import Call, Grade, Outcome, Problem, Prompt, Rollout


@dataclass(frozen=True, slots=True, eq=False)
class RewardSetup:
    """What parts are opened with."""

    config: RewardConfig
    template: Template  # says where the answer is and what a well-formed response is
    max_tokens: int  # of the longest response
    model_type: str  # the model's, which says what its coordinates mean
    judge_cache: Path  # folder of the judge's replies, where the configuration names none
    is_stopped: Callable[[], bool]  # whether the step is going to be abandoned: nothing is waited for then
    functions: Mapping[str, Callable[..., Any]]  # of this process, by the name behind cell: in their paths


@dataclass(frozen=True, slots=True, eq=False)
class GradedResponse:
    """What a part looks at."""

    problem: Problem
    prompt: Prompt
    rollout: Rollout
    text: str  # the prompt's prefill and the sampled text
    grade: Grade
    group: int = 0  # the number of its group among those that are scored together

    @property
    def call(self) -> Call:
        """Return the call that users' functions and the judge get."""
        return self.problem, self.text, self.grade, len(self.rollout.ids)


@dataclass(frozen=True, slots=True)
class PartVerdict:
    """What a part says of one response, and what that took."""

    outcome: Outcome
    cost: Mapping[str, int] = field(default_factory=dict)  # of the judge, by chat_endpoint.batch.COSTS


def _nothing(*_: object) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part that the configuration turns on."""

    name: str  # in the metrics
    section: RewardPartConfig  # its weight and role
    verdicts: Callable[[Sequence[GradedResponse]], list[PartVerdict]]  # one for each response, in order
    follows_grade: bool = False  # asked after the others, with the grade that a part in the role accuracy gave
    may_fail: bool = False  # how often it has no value is counted, as rewards/NAME/undecided_rate
    check: Callable[[Sequence[Problem]], None] = _nothing  # raises UserError for problems that it is not for
    abort: Callable[[], None] = _nothing  # makes `verdicts` in another thread end
    close: Callable[[], None] = _nothing
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else decides its values, as plain JSON


Opener = Callable[[str, RewardSetup], Iterator[Part]]  # takes the part's name in the registry
