"""Where the groups of a step come from: on policy, carried over from earlier steps, or begun ahead of their step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from vlm_rl.rollouts.ahead import Ahead
from vlm_rl.rollouts.carry_over import CarryOver
from vlm_rl.rollouts.sampling import Graded, GroupSampling, SourceState, StepPhase
from vlm_rl.samplers.base import BackgroundSampler, InProcessSampler, OnGroup, Sampler, SampleRequest
from vlm_rl.types import Group, Rollout


class RolloutSource(Protocol):
    """Gives each step its groups. Every rank makes the same calls; a step is the number of steps before it.

    A step calls `next` until it has enough groups, `arrange` when it knows which of them it trains on, and `begin`
    once before its update. `arrange` is no part of `next`, since the groups of a step are known after its last round.
    Between steps there are `state` and, at the beginning of a process, `restore`.
    """

    def next(self, step: int, count: int, phase: StepPhase) -> Graded:
        """Return about `count` groups for a step, with their rewards. Called again if too few of them are kept."""
        ...

    def arrange(self, step: int, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """Return the groups in the order in which the step trains on them, and the source's metrics of them."""
        ...

    def begin(self, step: int, phase: StepPhase) -> AbstractContextManager[None]:
        """Begin what the next steps need, with the weights of this one. Return a context in which the update runs."""
        ...

    def state(self) -> SourceState:
        """Return the state for a resume with the step that comes next. Copies nothing, and calls no other rank."""
        ...

    def restore(self, folder: Path, info: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        Args:
            folder: of the checkpoint.
            info: what its manifest holds.
        """
        ...


def make_source(sampling: GroupSampling, sampler: Sampler) -> RolloutSource:
    """Return the source of the configuration, which has already refused a sampler that does not suit it."""
    rollout = sampling.config.rollout
    if rollout.carry_over is not None:
        assert isinstance(sampler, InProcessSampler), sampler.name
        return CarryOver(sampling, sampler)
    if rollout.ahead:
        assert isinstance(sampler, BackgroundSampler), sampler.name
        return Ahead(sampling, sampler)
    return OnPolicy(sampling, sampler)


class OnPolicy:
    """The weights that a step begins with sample all of its responses."""

    def __init__(self, sampling: GroupSampling, sampler: Sampler) -> None:
        self._sampling, self._sampler = sampling, sampler
        self._prompts = sampling.new_prompts()  # of the step that comes next

    def next(self, step: int, count: int, phase: StepPhase) -> Graded:
        """See RolloutSource.next."""
        groups = self._sampling.take(count, self._prompts, phase)
        graded, _ = self._sampling.grade(groups, self._prompts, self._sample, step=step, phase=phase)
        return graded

    def _sample(self, request: SampleRequest, on_group: OnGroup) -> list[list[Rollout]]:
        return self._sampler.generate(request, on_group=on_group)

    def arrange(self, step: int, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """See RolloutSource.arrange."""
        return list(groups), {}

    def begin(self, step: int, phase: StepPhase) -> AbstractContextManager[None]:
        """See RolloutSource.begin: the prompts of the next step are built in a thread."""
        self._prompts = self._sampling.new_prompts()
        if step + 1 >= self._sampling.config.train.steps:
            return nullcontext()
        return self._sampling.building(self._prompts, self._sampling.config.rollout.prompts_per_step)

    def state(self) -> SourceState:
        """See RolloutSource.state: there are no files."""
        return SourceState({"versions": [self._sampler.policy_version]})

    def restore(self, folder: Path, info: Mapping[str, Any]) -> None:
        """See RolloutSource.restore: earlier steps leave nothing."""
