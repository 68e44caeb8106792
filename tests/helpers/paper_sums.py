"""The aggregations as the papers write them: nested sums over groups, responses and tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

EXPONENT = 0.75  # of `variance`, the default of algorithm.length_exponent


def paper_sum(name: str, terms: list[list[list[Tensor]]], advantages: np.ndarray, *, max_tokens: int) -> Tensor:
    """Return the aggregation of terms[group][response][token] by the paper's own formula."""
    flat = [response for group in terms for response in group]
    num = len(flat)
    zero = torch.zeros((), dtype=torch.float64)
    if name == "sequence":
        return sum((sum(r, zero) / len(r) for r in flat if r), zero) / num
    if name == "token":
        return sum((sum(r, zero) for r in flat), zero) / sum(len(r) for r in flat)
    if name == "length_weighted":
        return sum((sum(r, zero) for r in flat), zero) / num
    if name == "constant":
        return sum((sum(r, zero) for r in flat), zero) / (num * max_tokens)
    if name == "variance":  # VL Norm's weights L^-a / sum_j L_j^-a of responses, whose terms are sums over L_max
        powers = [len(r) ** -EXPONENT for r in flat if r]
        total = sum((len(r) ** -EXPONENT * sum(r, zero) for r in flat if r), zero)
        return total / (sum(powers) * num / len(powers) * max_tokens)
    total = zero
    if name == "group_token":
        for group in terms:
            if tokens := sum(len(r) for r in group):
                total = total + sum((sum(r, zero) for r in group), zero) / tokens
        return total / len(terms)
    assert name == "balanced"
    for group, row in zip(terms, advantages, strict=True):
        for sign in (1, -1):
            subset = [r for r, a in zip(group, row, strict=True) if np.sign(a) == sign]
            tokens = sum(len(r) for r in subset)
            if tokens:
                total = total + len(subset) / len(group) * sum((sum(r, zero) for r in subset), zero) / tokens
    return total / len(terms)
