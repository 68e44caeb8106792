"""Advantages that look beyond the sum of rewards in a prompt's group, and terms for length: pure functions.

``decoupled_norm`` (GDPO) normalises each part of the reward separately, ``shrunk_baseline`` (EBPO) shrinks a group's
baseline towards the mean reward of all steps, ``pass_rate_penalty`` is a part of the reward that depends on the
group, and ``brevity_bonus`` is added to positive advantages. Everything is float64; NaN marks a response that is left
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlm_rl.advantages import EPSILON


def decoupled_norm(parts_KPG: np.ndarray, weights_K: Sequence[float], *, ddof: int = 1) -> np.ndarray:
    """Return A = whiten(sum_k w_k (r_k - mean_g r_k) / std_g r_k) [P, G] (GDPO, arXiv 2601.05242).

    The groups' means are 0 by construction, so that whitening over the batch divides by the standard deviation over
    all its responses. A part on which a group agrees adds nothing there; a response that is left out has advantage 0.
    Nothing is added to the groups' deviations: the whitening would amplify what that leaves of parts that cancel.

    Args:
        parts_KPG: the reward's parts, each with its weight in the reward, which this cancels.
        weights_K: w_k.
        ddof: degrees of freedom of all standard deviations.
    """
    normed = [np.stack([_normed(part_G, ddof) for part_G in part_PG]) for part_PG in parts_KPG]
    sum_PG = np.tensordot(np.asarray(weights_K, dtype=np.float64), np.stack(normed), axes=1)
    return _whitened(np.where(np.isnan(parts_KPG[0]), np.nan, sum_PG), ddof)


def _normed(values_G: np.ndarray, ddof: int) -> np.ndarray:
    """Return (values - mean) / std of those that are there; 0 for the others, and where all are equal."""
    there = values_G[~np.isnan(values_G)]
    if there.size < 2 or there.max() == there.min():
        return np.zeros_like(values_G)
    return np.nan_to_num((values_G - there.mean()) / there.std(ddof=ddof), nan=0.0)


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and summed squared deviations of a stream of numbers (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def merged(self, values: np.ndarray) -> Moments:
        """Return the moments with these numbers too."""
        if not values.size:
            return self
        count, mean = self.count + values.size, float(values.mean())
        gap = mean - self.mean
        squares = float(((values - mean) ** 2).sum()) + gap**2 * self.count * values.size / count
        return Moments(count, self.mean + gap * values.size / count, self.squares + squares)

    @property
    def variance(self) -> float:
        """Return the population's variance; 0 of no numbers."""
        return self.squares / max(self.count, 1)


@dataclass(frozen=True, slots=True)
class RewardHistory:
    """The rewards of all steps so far. `restored` reads what dataclasses.asdict and JSON made of it."""

    rewards: Moments = Moments()  # of all responses
    means: Moments = Moments()  # of the means of their groups

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> RewardHistory:
        """Return the history of a checkpoint."""
        return cls(Moments(**state["rewards"]), Moments(**state["means"]))

    def merged(self, rewards_PG: np.ndarray) -> RewardHistory:
        """Return the history with a batch's rewards too; rows may be padded with NaN."""
        there = [row[~np.isnan(row)] for row in rewards_PG]
        means = np.array([row.mean() for row in there if row.size])
        return RewardHistory(self.rewards.merged(rewards_PG[~np.isnan(rewards_PG)]), self.means.merged(means))

    def shrinkage(self, size: int) -> float:
        """Return s = (sigma^2 / G) / (sigma^2 / G + tau^2) of a group of `size` responses; 0 while nothing varies."""
        noise = self.rewards.variance / size
        total = noise + self.means.variance
        return noise / total if total > 0 else 0.0


def shrunk_baseline(rewards_PG: np.ndarray, history: RewardHistory, *, ddof: int = 1) -> np.ndarray:
    """Return A = whiten(r - V), V = (1 - s) mean_g + s mean_all [P, G] (EBPO, arXiv 2602.05165).

    The form is as summarised, not read. sigma^2 and tau^2 are the variances of all rewards and of all groups' means
    so far. A group that is all alike keeps an advantage: below 0 where its reward is below that of all steps.

    Args:
        rewards_PG: one row per prompt.
        history: with this batch in it.
        ddof: degrees of freedom of the batch's standard deviation.
    """
    centred_PG = np.full_like(rewards_PG, np.nan)
    for row, rewards_G in enumerate(rewards_PG):
        there_G = ~np.isnan(rewards_G)
        if there_G.any():
            s = history.shrinkage(int(there_G.sum()))
            baseline = (1 - s) * rewards_G[there_G].mean() + s * history.rewards.mean
            centred_PG[row, there_G] = rewards_G[there_G] - baseline
    return _whitened(centred_PG, ddof)


def _whitened(values_PG: np.ndarray, ddof: int) -> np.ndarray:
    """Return the values with mean 0 and standard deviation 1 over the batch; 0 for NaN, and where all are equal."""
    there = values_PG[~np.isnan(values_PG)]
    if there.size < 2 or there.max() == there.min():
        return np.zeros_like(values_PG)
    return np.nan_to_num((values_PG - there.mean()) / (there.std(ddof=ddof) + EPSILON), nan=0.0)


def pass_rate_penalty(lengths_G: np.ndarray, is_correct_G: np.ndarray, scale: float) -> np.ndarray:
    """Return -scale * (share of right responses) * |y_i| / (longest of the group) [G], as prime-rl's length term.

    A prompt that nobody solves is not shortened. The arguments hold the responses of a group that are not left out.
    """
    return -scale * is_correct_G.mean() * lengths_G / np.maximum(lengths_G.max(), 1)


def brevity_bonus(advantages_PG: np.ndarray, lengths_PG: np.ndarray, *, scale: float, cap: float) -> np.ndarray:
    """Return scale * clip((L_ref - |y_i|) / L_ref, 0, cap) / cap where A_i > 0, else 0, as QGLAS has it.

    The form is as summarised, not read. L_ref is the mean length of the group's responses with A > 0, so no negative
    response is pushed by its length.

    Args:
        advantages_PG: A.
        lengths_PG: tokens of each response.
        scale: the largest bonus.
        cap: the shortening that earns it, as a share of L_ref.
    """
    positive_PG = advantages_PG > 0
    counts_P1 = np.maximum(positive_PG.sum(axis=1, keepdims=True), 1)
    reference_P1 = np.maximum((lengths_PG * positive_PG).sum(axis=1, keepdims=True) / counts_P1, 1)
    shorter_PG = np.clip((reference_P1 - lengths_PG) / reference_P1, 0, cap) / cap
    return np.where(positive_PG, scale * shorter_PG, 0.0)
