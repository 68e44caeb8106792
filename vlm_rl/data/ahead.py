"""Batches that are drawn while earlier ones train: rollout.ahead (docs/scaling.md). Their files, and their age.

A token's age is the number of steps that have begun with later weights than those which drew it: 0 on policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlm_rl.data.carry_over import GroupInProgress, load_groups, save_groups
from vlm_rl.types import Group, Problem, Rollout

_FILE = "batch_of_step_{:06d}.parquet"


@dataclass(frozen=True, slots=True, eq=False)
class BatchAhead:
    """The groups of one later step, on all ranks."""

    step: int  # the number of steps before it
    groups: tuple[GroupInProgress, ...]  # with the responses of an earlier process; without, they are to be drawn


def save_batches(batches: Sequence[BatchAhead], folder: Path) -> None:
    """Write each batch into a file of its own."""
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
        ahead: rollout.ahead, the largest age there can be.
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
