"""Advantages: pure functions from the rewards [P, G] of P prompts to advantages of the same shape.

Everything is float64, and equal rewards (max == min) give exactly 0. In float32 the mean of eight equal rewards of
1.35 has a rounding error that the division by (std + 1e-6) turns into |A| = 0.106.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

EPSILON = 1e-6


def group_norm(rewards_PG: np.ndarray, *, ddof: int = 1) -> np.ndarray:
    """Return A_i = (r_i - mean) / (std + 1e-6) inside each group (GRPO, arXiv 2402.03300, section 4.1.2).

    ``ddof`` is 1 as in the public trainers; the paper's formula leaves it open.
    """
    centred_PG = group_center(rewards_PG)
    if rewards_PG.shape[1] == 1:
        return centred_PG
    return centred_PG / (rewards_PG.std(axis=1, ddof=ddof, keepdims=True) + EPSILON)


def group_center(rewards_PG: np.ndarray) -> np.ndarray:
    """Return A_i = r_i - mean (Dr.GRPO, arXiv 2503.20783, section 3.2)."""
    return _zero_where_equal(rewards_PG, rewards_PG - rewards_PG.mean(axis=1, keepdims=True))


def leave_one_out(rewards_PG: np.ndarray) -> np.ndarray:
    """Return A_i = r_i - mean of the other G - 1 rewards (RLOO, arXiv 2402.14740, equation 8)."""
    num_responses = rewards_PG.shape[1]
    if num_responses == 1:
        return np.zeros_like(rewards_PG)
    others_PG = (rewards_PG.sum(axis=1, keepdims=True) - rewards_PG) / (num_responses - 1)
    return _zero_where_equal(rewards_PG, rewards_PG - others_PG)


def compute_advantages(name: str, rewards_PG: np.ndarray, *, ddof: int = 1) -> np.ndarray:
    """Return the advantages of float64 rewards [P, G] by a named estimator.

    A reward of NaN marks a response that is left out: its advantage is 0, and the others get those of the smaller
    group.

    Args:
        name: a key of ADVANTAGES. Raises KeyError for any other.
        rewards_PG: one row per prompt.
        ddof: degrees of freedom of the standard deviation; only `group_norm` uses it.
    """
    assert rewards_PG.ndim == 2 and rewards_PG.dtype == np.float64, (rewards_PG.shape, rewards_PG.dtype)
    estimate = partial(group_norm, ddof=ddof) if name == "group_norm" else ADVANTAGES[name]
    there_PG = ~np.isnan(rewards_PG)
    if there_PG.all():
        return estimate(rewards_PG)
    advantages_PG = np.zeros_like(rewards_PG)
    for row, there_G in enumerate(there_PG):
        if there_G.any():
            advantages_PG[row, there_G] = estimate(rewards_PG[row : row + 1, there_G])
    return advantages_PG


def _zero_where_equal(rewards_PG: np.ndarray, advantages_PG: np.ndarray) -> np.ndarray:
    degenerate_P1 = rewards_PG.max(axis=1, keepdims=True) == rewards_PG.min(axis=1, keepdims=True)
    return np.where(degenerate_P1, 0.0, advantages_PG)


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "group_norm": group_norm,
    "group_center": group_center,
    "leave_one_out": leave_one_out,
}
