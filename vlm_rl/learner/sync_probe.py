"""The probe of a sync: the log-probs of a few sampled tokens, by the learner.

The checksum of the weights cannot see with what else an engine computes: copies that it packed, scales, constants,
its kernels. So after each sync the sampler answers one short prompt, and the learner gives the same tokens its own
log-probs. That costs a sampler RESPONSES responses of at most TOKENS tokens, and each rank one forward pass of a
prompt and these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from vlm_rl.data.prompts import rope_positions
from vlm_rl.learner.packing import Chunk, PackedRow, pack_row
from vlm_rl.learner.self_check import group_of
from vlm_rl.types import Prompt, Rollout

RESPONSES, TOKENS = 4, 2  # a prefill and one decoding step


def probe_gap(
    log_probs: Callable[[PackedRow], Tensor], model: nn.Module, prompt: Prompt, rollouts: Sequence[Rollout]
) -> float:
    """Return the mean absolute difference between the sampler's log-probs and the learner's, over all tokens.

    Args:
        log_probs: gives the learner's log-probs [K] of a row's response tokens.
        model: the learner's transformers model, which numbers the positions.
        prompt: what the sampler answered.
        rollouts: its responses.
    """
    row = pack_row(
        [Chunk(0, tuple(range(len(rollouts))))],
        groups=[group_of(prompt, rollouts)],
        prompts={0: prompt},
        weights_PG=np.zeros((1, len(rollouts))),
        positions=partial(rope_positions, model),
    )
    sampled_K = torch.from_numpy(np.concatenate([rollout.logprobs for rollout in rollouts]))
    return float((log_probs(row).cpu() - sampled_K).abs().mean())
