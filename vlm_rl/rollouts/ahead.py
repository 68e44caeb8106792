"""Batches that are sampled while earlier ones train: rollout.ahead (docs/scaling.md). Their files, and their age.

A token's age is the number of steps that have begun with later weights than those which sampled it: 0 on policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlm_rl.data.prompts import PromptCache
from vlm_rl.distributed import gather_shares
from vlm_rl.rollouts.groups import GroupInProgress, load_groups, save_groups
from vlm_rl.rollouts.sampling import Graded, GroupSampling, SourceState, StepPhase
from vlm_rl.samplers.base import BackgroundSampler, OnGroup, SampleRequest
from vlm_rl.types import Group, Problem, Rollout

_FILE = "batch_of_step_{:06d}.parquet"


@dataclass(frozen=True, slots=True, eq=False)
class BatchAhead:
    """The groups of one later step, on all ranks."""

    step: int  # the number of steps before it
    groups: tuple[GroupInProgress, ...]  # with an earlier process's responses, or yet to be sampled


class Ahead:
    """A vlm_rl.rollouts.source.RolloutSource whose batches servers sample while earlier steps train."""

    def __init__(self, sampling: GroupSampling, sampler: BackgroundSampler) -> None:
        self.batches: tuple[BatchAhead, ...] = ()  # of later steps, the next one first
        self._sampling, self._sampler = sampling, sampler
        self._earlier: tuple[int, ...] = ()  # the versions with which the last steps before the current one began
        self._most = sampling.config.rollout.oldest_age
        self._prompts: dict[int, PromptCache] = {}  # by step: of the current one, and of those that are begun

    @property
    def versions(self) -> tuple[int, ...]:
        """Return the policy versions with which the last steps began, the current one last."""
        return (*self._earlier, self._sampler.policy_version)

    def next(self, step: int, count: int, phase: StepPhase) -> Graded:
        """See RolloutSource.next: the batch that was begun for the step, or else new groups, sampled on the spot."""
        self._begin_restored()
        prompts = self._prompts.setdefault(step, self._sampling.new_prompts())
        if self.batches and self.batches[0].step == step:
            groups, sample, self.batches = self.batches[0].groups, self._take, self.batches[1:]
        else:
            groups, sample = self._sampling.take(count, prompts, phase), self._sample
        graded, _ = self._sampling.grade(groups, prompts, sample, step=step, phase=phase)
        ages = [oldest(group.rollouts, self.versions) for group in graded.groups]
        unfit = {place: "stale" for place, age in enumerate(ages) if age > self._most}
        waiting = sum(len(batch.groups) for batch in self.batches)
        return replace(graded, unfit=unfit, waiting=waiting)

    def _sample(self, request: SampleRequest, on_group: OnGroup) -> list[list[Rollout]]:
        return self._sampler.generate(request, on_group=on_group)

    def _take(self, request: SampleRequest, on_group: OnGroup) -> list[list[Rollout]]:
        return self._sampler.take(request.step, on_group)

    def arrange(self, step: int, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """See RolloutSource.arrange."""
        return list(groups), age_metrics(groups, self.versions, ahead=self._sampling.config.rollout.ahead)

    def begin(self, step: int, phase: StepPhase) -> AbstractContextManager[None]:
        """See RolloutSource.begin: servers sample the batches of the next rollout.ahead steps from now on.

        The batch of the step before is dropped here: during that step a stop could still save it.
        """
        config = self._sampling.config
        self._sampler.forget(step - 1)
        self._prompts.pop(step - 1, None)
        self._earlier = self.versions[-config.rollout.ahead :]
        first = self.batches[-1].step + 1 if self.batches else step + 1
        for later in range(first, min(step + config.rollout.ahead, config.train.steps - 1) + 1):
            prompts = self._sampling.new_prompts()
            groups = self._sampling.take(config.rollout.prompts_per_step, prompts, phase)
            self.batches = (*self.batches, BatchAhead(later, tuple(groups)))
            self._begin(self.batches[-1], prompts)
        return nullcontext()

    def _begin(self, batch: BatchAhead, prompts: PromptCache) -> None:
        self._prompts[batch.step] = prompts
        self._sampler.begin(self._sampling.request(batch.groups, prompts, step=batch.step))

    def _begin_restored(self) -> None:
        """Begin the batches of a checkpoint, which had to wait until the servers had the weights."""
        for batch in self.batches:
            if batch.step not in self._prompts:
                self._begin(batch, self._sampling.new_prompts())

    def state(self) -> SourceState:
        """See RolloutSource.state: the files have the groups that are complete when they are gathered."""
        return SourceState({"versions": list(self.versions)}, partial(self._files, self.batches))

    def _files(self, batches: Sequence[BatchAhead]) -> Callable[[Path], None]:
        sampled = [self._as_sampled(batch) for batch in batches]
        return lambda folder: save_batches(sampled, folder / "learner")

    def _as_sampled(self, batch: BatchAhead) -> BatchAhead:
        """Return a batch with the groups that are complete by now, of all ranks."""
        if batch.step not in self._prompts:  # restored, and not begun yet
            return batch
        sampled = gather_shares(self._sampler.sampled(batch.step))
        groups = (
            group if rollouts is None else replace(group, rollouts=tuple(rollouts))
            for group, rollouts in zip(batch.groups, sampled, strict=True)
        )
        return replace(batch, groups=tuple(groups))

    def restore(self, folder: Path, info: Mapping[str, Any]) -> None:
        """See RolloutSource.restore."""
        self._earlier = tuple(info.get("versions", ())[:-1])  # none: an older checkpoint
        self.batches = load_batches(folder / "learner", self._sampling.problems)


def save_batches(batches: Sequence[BatchAhead], folder: Path) -> None:
    """Write one file for each batch."""
    for batch in batches:
        save_groups(batch.groups, folder / _FILE.format(batch.step))


def load_batches(folder: Path, problems: Sequence[Problem]) -> tuple[BatchAhead, ...]:
    """Return the batches that `save_batches` wrote, the next one first."""
    files = sorted(folder.glob(_FILE.replace("{:06d}", "*")))
    return tuple(BatchAhead(int(path.stem.rpartition("_")[2]), load_groups(path, problems)) for path in files)


def ages(rollout: Rollout, versions: Sequence[int]) -> np.ndarray:
    """Return the age of each token, int64 [R].

    Args:
        rollout: the response.
        versions: the policy versions that the last steps began with, the current one last.
    """
    return len(versions) - np.searchsorted(np.asarray(versions), rollout.versions_R, side="right")


def oldest(rollouts: Iterable[Rollout], versions: Sequence[int]) -> int:
    """Return the age of the oldest token of a group."""
    return max(int(ages(rollout, versions).max(initial=0)) for rollout in rollouts)


def age_metrics(groups: Sequence[Group], versions: Sequence[int], *, ahead: int) -> dict[str, float]:
    """Return mean and largest age of a batch's tokens, the share of each age, and of responses of several versions.

    Args:
        groups: those that the step trains on.
        versions: as in `ages`.
        ahead: rollout.ahead, the largest possible age.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = np.concatenate([np.zeros(0, np.int64), *(ages(rollout, versions) for rollout in rollouts)])
    shares = {f"ahead/age_{age}": float((tokens == age).mean()) if len(tokens) else 0.0 for age in range(ahead + 1)}
    return {
        "ahead/age_mean": float(tokens.mean()) if len(tokens) else 0.0,
        "ahead/age_max": float(tokens.max(initial=0)),
        "ahead/mixed_responses": float(np.mean([bool(rollout.older) for rollout in rollouts])) if rollouts else 0.0,
        **shares,
    }
