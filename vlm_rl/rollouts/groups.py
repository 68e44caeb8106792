"""Groups with unfinished responses, in memory and in the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.data.prompts import PromptCache
from vlm_rl.types import EpisodeStart, Problem, Prompt, Rollout

_COLUMNS = {  # of a rollout; its experts are never stored, since replay_routing refuses what would need them
    "problem_id": pa.string(),
    "index": pa.int64(),
    "ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float32()),
    "text": pa.string(),
    "stop_reason": pa.string(),
    "policy_version": pa.int64(),
    "older": pa.list_(pa.list_(pa.int64(), 2)),
}
_SCHEMA = pa.schema({"prompt_tokens": pa.int64(), "epoch": pa.int64()} | _COLUMNS)


@dataclass(frozen=True, slots=True, eq=False)
class GroupInProgress:
    """A prompt whose responses are being sampled."""

    problem: Problem
    prompt_tokens: int
    rollouts: tuple[Rollout, ...]  # all G; before the first token they are empty and "unfinished"
    epoch: int = 0  # in which the prompt was taken
    start: EpisodeStart | None = None  # what an environment shows first

    def asked(self, prompts: PromptCache) -> Prompt:
        """Return the prompt as a sampler gets it."""
        prompt = prompts.with_start(self.problem, self.start)
        return replace(prompt, epoch=self.epoch) if self.epoch else prompt


def empty_group(
    problem: Problem, prompt_tokens: int, *, responses: int, epoch: int = 0, start: EpisodeStart | None = None
) -> GroupInProgress:
    """Return a group without a token."""
    ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    rollouts = (Rollout(problem.id, index, ids, logprobs, "", "unfinished", 0) for index in range(responses))
    return GroupInProgress(problem, prompt_tokens, tuple(rollouts), epoch, start)


def save_groups(groups: Sequence[GroupInProgress], path: Path) -> None:
    """Write the groups, a row per response. Without groups, write nothing."""
    rows: list[dict[str, Any]] = [
        {"prompt_tokens": group.prompt_tokens, "epoch": group.epoch}
        | {name: getattr(rollout, name) for name in _COLUMNS}
        for group in groups
        for rollout in group.rollouts
    ]
    if rows:
        pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), path, compression="zstd")


def load_groups(path: Path, problems: Iterable[Problem]) -> tuple[GroupInProgress, ...]:
    """Return the groups that `save_groups` wrote, in their order; none if there is no file."""
    if not path.exists():
        return ()
    by_id = {problem.id: problem for problem in problems}
    groups: list[GroupInProgress] = []
    rollouts: list[Rollout] = []
    rows = pq.read_table(path, schema=_SCHEMA).to_pylist()
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        prompt_tokens, epoch = row.pop("prompt_tokens"), row.pop("epoch") or 0  # None: an older checkpoint
        arrays = {"ids": np.array(row["ids"], np.int32), "logprobs": np.array(row["logprobs"], np.float32)}
        rollouts.append(Rollout(**row | arrays | {"older": tuple((v, n) for v, n in row["older"])}))
        if after is None or after["index"] == 0:
            groups.append(GroupInProgress(by_id[row["problem_id"]], prompt_tokens, tuple(rollouts), epoch))
            rollouts = []
    return tuple(groups)
