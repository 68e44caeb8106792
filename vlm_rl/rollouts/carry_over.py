"""Groups that one step begins and a later one ends: rollout.carry_over (docs/performance.md).

A step trains on the first prompts_per_step groups that are complete. The others are in progress: they continue in the
next step, behind the tokens they have, and are part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlm_rl.distributed import share
from vlm_rl.rollouts.groups import GroupInProgress, load_groups, save_groups
from vlm_rl.rollouts.sampling import Graded, GroupSampling, SourceState, StepPhase
from vlm_rl.samplers.base import InProcessSampler, OnGroup, SampleRequest
from vlm_rl.types import Group, Rollout

FILE = "groups_in_progress.parquet"


class CarryOver:
    """A vlm_rl.rollouts.source.RolloutSource whose steps do not wait for their longest responses."""

    def __init__(self, sampling: GroupSampling, sampler: InProcessSampler) -> None:
        self.in_progress: tuple[GroupInProgress, ...] = ()  # the newest first
        self._sampling, self._sampler = sampling, sampler
        self._prompts = sampling.new_prompts()  # of the step that comes next

    def next(self, step: int, count: int, phase: StepPhase) -> Graded:
        """See RolloutSource.next: exactly `count` groups. All others are then in progress."""
        new = self._sampling.take(self._missing(count), self._prompts, phase)
        graded, self.in_progress = self._sampling.grade(
            (*new, *self.in_progress),
            self._prompts,
            partial(self._sample, enough=len(share(range(count)))),
            step=step,
            phase=phase,
        )
        return graded

    def _missing(self, count: int) -> int:
        """Return how many groups to begin when a step needs `count` more of them."""
        return count + self._sampling.config.rollout.spare_groups - len(self.in_progress)

    def _sample(self, request: SampleRequest, on_group: OnGroup, *, enough: int) -> list[list[Rollout]]:
        """Continue this rank's groups until enough are complete: the oldest, which are the last, have priority."""
        last = len(request.prompts) - 1
        rollouts = self._sampler.generate_until(
            replace(request, prompts=request.prompts[::-1], begun=request.begun[::-1]),
            enough=enough,
            on_group=lambda index, group: on_group(last - index, group),
        )
        return rollouts[::-1]

    def arrange(self, step: int, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """See RolloutSource.arrange."""
        mixed_groups = mixed(groups, seed=self._sampling.config.seed, step=step)
        return mixed_groups, carry_metrics(mixed_groups, self.in_progress, version=self._sampler.policy_version)

    def begin(self, step: int, phase: StepPhase) -> AbstractContextManager[None]:
        """See RolloutSource.begin: the prompts that are new in the next step are built in a thread."""
        self._prompts = self._sampling.new_prompts()
        if step + 1 >= self._sampling.config.train.steps:
            return nullcontext()
        return self._sampling.building(self._prompts, self._missing(self._sampling.config.rollout.prompts_per_step))

    def state(self) -> SourceState:
        """See RolloutSource.state: every rank has all groups in progress already."""
        groups = self.in_progress
        info = {"versions": [self._sampler.policy_version]}
        return SourceState(info, lambda: lambda folder: save_groups(groups, folder / "learner" / FILE))

    def restore(self, folder: Path, info: Mapping[str, Any]) -> None:
        """See RolloutSource.restore."""
        self.in_progress = load_groups(folder / "learner" / FILE, self._sampling.problems)


def mixed(groups: Sequence[Group], *, seed: int, step: int) -> list[Group]:
    """Return the groups in random order: otherwise the oldest, which are long, would form one mini-batch."""
    order = np.random.Generator(np.random.Philox(key=[seed, step])).permutation(len(groups))
    return [groups[index] for index in order]


def carry_metrics(
    groups: Sequence[Group], in_progress: Sequence[GroupInProgress], *, version: int
) -> dict[str, float]:
    """Return how much of the batch earlier weights sampled, and how much is left for the next step.

    Args:
        groups: those that the step trains on.
        in_progress: those that the next step continues.
        version: the policy version of the step; a token's age is in optimizer steps.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ages = [version - rollout.versions_R for rollout in rollouts]
    tokens = np.concatenate([*ages, np.zeros(0, np.int64)])
    return {
        "carry_over/groups": float(len(in_progress)),
        "carry_over/unfinished": float(sum(r.stop_reason == "unfinished" for g in in_progress for r in g.rollouts)),
        "carry_over/older_responses": float(np.mean([age.max() > 0 for age in ages])) if ages else 0.0,
        "carry_over/older_tokens": float((tokens > 0).mean()) if len(tokens) else 0.0,
        "carry_over/age_mean": float(tokens.mean()) if len(tokens) else 0.0,
        "carry_over/age_max": float(tokens.max(initial=0)),
    }
