"""Groups with the prompts and weights that a run would give them, and their packed rows, for the other scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlm_rl.learner.packing import Chunk, PackedRow, PositionFunction, pack_row
from vlm_rl.types import Group, Problem, Prompt, Rollout


@dataclass(frozen=True)
class WeighedGroup:
    """A prompt's responses, with the advantage and the token weight of each."""

    prompt: Prompt
    rollouts: Sequence[Rollout]
    advantages_G: np.ndarray
    weights_G: np.ndarray


def pack(chunks: Sequence[Chunk], groups: Sequence[WeighedGroup], positions: PositionFunction) -> PackedRow:
    """Pack the chunks as the trainer does, without the log-probs of a sampler: there was none."""
    problem = Problem(id="", question="", images=(), answer="", answer_type="text")
    row = pack_row(
        chunks,
        groups=[Group(problem, tuple(group.rollouts), (), group.advantages_G) for group in groups],
        prompts={index: group.prompt for index, group in enumerate(groups)},
        weights_PG=np.stack([group.weights_G for group in groups]),
        positions=positions,
    )
    return replace(row, loss=replace(row.loss, sampler_logp_K=None))
