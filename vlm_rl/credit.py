"""Where a token gets its credit: a factor for each token from how much the image changes it, pure functions.

    S_t = e^d - d - 1,   d = lp(y_t given a blank image) - lp(y_t given the image),   clipped to [0, 10]

S_t is the k3 estimate of the divergence between both distributions at the sampled token, without gradient. A credit
multiplies a token's weight in the loss, and is known before the mini-batch is split. Arrays are [P][G][|y_i|]: a list
of groups, each a list of responses. None stands for a response to a prompt without images, whose credit is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

MOST = 10.0  # of S_t, in VPPO's code and in PGPO's
TINY = 1e-6  # a spread below it is none

Dependence = Sequence[Sequence["np.ndarray | None"]]
Credits = list[list["np.ndarray | None"]]


def visual_dependence(blind_logp_R: np.ndarray, logp_R: np.ndarray) -> np.ndarray:
    """Return S_t [R], float64, from a response's log-probs given a blank image and given its own."""
    gap_R = np.clip(blind_logp_R.astype(np.float64) - logp_R.astype(np.float64), -20, 20)
    return np.clip(np.exp(gap_R) - gap_R - 1, 0, MOST)


def uniform_credit(dependence: Dependence) -> Credits:
    """Return 1 for every token."""
    return [[None if s is None else np.ones(len(s)) for s in group] for group in dependence]


def top_visual_credit(dependence: Dependence, *, share: float = 0.4, floor: float = 0.9) -> Credits:
    """Return f_i for the share of a response's tokens with the largest S_t, else 0 (VPPO, arXiv 2510.09285).

        f_i = b + (b_max - b) minmax(mean_t S_it),   b_max = b + (1 - b) / mean_i minmax(mean_t S_it)

    with minmax and its mean over the responses of the mini-batch, so that the mean of f_i is 1. It scales A in the
    paper; all surrogates are linear in the size of A. ceil(share |y_i|) tokens are kept, of equal ones the first.

    Args:
        dependence: S_t of the mini-batch, on all ranks.
        share: of the tokens of a response.
        floor: b.
    """
    means = [float(s.mean()) for group in dependence for s in group if s is not None and len(s)]
    lowest, spread = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    scaled = [(mean - lowest) / spread for mean in means] if spread > TINY else []
    top = floor + (1 - floor) / float(np.mean(scaled)) if scaled else 1.0

    def credit(s_R: np.ndarray) -> np.ndarray:
        factor = floor + (top - floor) * (float(s_R.mean()) - lowest) / spread if scaled and len(s_R) else 1.0
        kept = np.argsort(-s_R, kind="stable")[: math.ceil(share * len(s_R))]
        credit_R = np.zeros(len(s_R))
        credit_R[kept] = factor
        return credit_R

    return [[None if s is None else credit(s) for s in group] for group in dependence]


def visual_credit(dependence: Dependence, *, threshold: float = 0.4) -> Credits:
    """Return weights that grow with S_t and sum to |y_i| in each response (PGPO, arXiv 2604.01840, eq. 6 and 7).

        I = minmax over the response of log(1 + S_t);   I / tau below tau, else 1 + 2 (I - tau) / (1 - tau)

    Args:
        dependence: S_t of the mini-batch.
        threshold: tau, in (0, 1).
    """

    def credit(s_R: np.ndarray) -> np.ndarray:
        logs_R = np.log1p(s_R)
        if not len(s_R) or np.ptp(logs_R) <= TINY:
            return np.ones(len(s_R))
        i_R = (logs_R - logs_R.min()) / np.ptp(logs_R)
        raw_R = np.where(i_R < threshold, i_R / threshold, 1 + 2 * (i_R - threshold) / (1 - threshold))
        return raw_R * len(s_R) / raw_R.sum()

    return [[None if s is None else credit(s) for s in group] for group in dependence]


CREDITS: dict[str, Callable[..., Credits]] = {
    "uniform": uniform_credit,
    "top_visual": top_visual_credit,
    "visual": visual_credit,
}


def dependence_metrics(
    dependence: Dependence, credit: Credits, is_correct: Sequence[Sequence[bool]]
) -> dict[str, float]:
    """Return the mean S_t of tokens, by verdict and by tenth of the response, and the share of tokens with credit.

    A mean over nothing is NaN. Only responses to prompts with images count.
    """
    pairs = [
        (s, c, correct)
        for group in zip(dependence, credit, is_correct, strict=True)
        for s, c, correct in zip(*group, strict=True)
        if s is not None and c is not None and len(s)
    ]
    empty = np.zeros(0)
    values = np.concatenate([s for s, _, _ in pairs] or [empty])
    tenth = np.concatenate([np.arange(len(s)) * 10 // len(s) for s, _, _ in pairs] or [empty])
    right = np.concatenate([np.full(len(s), correct) for s, _, correct in pairs] or [empty]).astype(bool)
    kept = np.concatenate([c > 0 for _, c, _ in pairs] or [empty])
    metrics = {}
    for name, member in (("", np.ones_like(right)), ("/correct", right), ("/wrong", ~right)):
        metrics[f"visual/dependence{name}"] = _mean(values[member])
        for n in range(10):
            metrics[f"visual/dependence{name}/tenth_{n + 1}"] = _mean(values[member & (tenth == n)])
    return {
        **metrics,
        "visual/credited": _mean(kept),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else math.nan
