"""From logits to a sampled token and its log-prob; pure functions of tensors.

B is the number of rows, V the vocabulary. The order is the learner's and vLLM's: ban, temperature, truncation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def process_logits(
    logits_BV: Tensor, *, banned: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """Return the logits [B, V] of the distribution that is sampled from, float32; we report their log_softmax.

    Args:
        logits_BV: of the model.
        banned: int64, ids that come out at minus infinity.
        temperature: divides the logits; 0 (greedy) leaves them unchanged, and nothing is truncated.
        top_p: keeps the smallest set of most likely tokens whose mass reaches this; 1 is off.
        top_k: keeps this many of the largest logits, with the ties of the last one; 0 is off.
    """
    scaled_BV = logits_BV.float().index_fill(1, banned, float("-inf"))
    if temperature == 0:
        return scaled_BV
    scaled_BV = scaled_BV / temperature
    if 0 < top_k < scaled_BV.shape[1]:
        kth_B1 = scaled_BV.topk(top_k, dim=1).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < kth_B1, float("-inf"))
    if top_p < 1:
        descending_BV, order_BV = scaled_BV.sort(dim=1, descending=True, stable=True)
        probs_BV = descending_BV.double().softmax(1)
        before_BV = probs_BV.cumsum(1) - probs_BV  # mass of the more likely tokens
        drop_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(1, order_BV, before_BV >= top_p)
        scaled_BV = scaled_BV.masked_fill(drop_BV, float("-inf"))
    return scaled_BV


def sample(scaled_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Sample token ids [B] by inverse CDF in float64, with one uniform number in [0, 1) per row.

    It is the first token whose cumulative mass exceeds the number: a token of mass 0 is never sampled.
    """
    cdf_BV = scaled_BV.double().softmax(1).cumsum(1)
    total_B = cdf_BV[:, -1]
    # Rounding must not carry u * total to the total itself, beyond the last token.
    point_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cdf_BV, point_B[:, None], right=True)[:, 0]


def log_probs(scaled_BV: Tensor, ids_B: Tensor) -> Tensor:
    """Return the log-probs [B] of the sampled ids, float32."""
    return scaled_BV.log_softmax(1).gather(1, ids_B[:, None])[:, 0]


def uniforms(seeds: list[int], count: int) -> Tensor:
    """Return [len(seeds), count] float64 on the CPU; row i depends only on seeds[i] and count."""
    rows = [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)
