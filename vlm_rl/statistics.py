"""Numbers with their uncertainty."""

from __future__ import annotations

import numpy as np

_RESAMPLES_AT_A_TIME = 100  # bounds the index matrix: 100 x 5,000 problems are 4 MB


def bootstrap_interval(
    scores_P: np.ndarray, *, seed: int = 0, confidence: float = 0.95, num_resamples: int = 2000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over problems; (nan, nan) for none.

    `scores_P` holds one number per problem (with k samples: their mean), because the samples of a problem
    are not independent. When all scores are equal the interval is a point: it knows no other value.
    """
    assert 0 < confidence < 1 and num_resamples > 0
    scores_P = np.asarray(scores_P, dtype=np.float64)
    if len(scores_P) == 0:
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    means: list[np.ndarray] = []
    for start in range(0, num_resamples, _RESAMPLES_AT_A_TIME):
        size = min(_RESAMPLES_AT_A_TIME, num_resamples - start)
        means.append(scores_P[rng.integers(len(scores_P), size=(size, len(scores_P)))].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def random_derangement(size: int, rng: np.random.Generator) -> np.ndarray:
    """A random permutation in one cycle, so that nothing stays in its place (Sattolo's algorithm)."""
    assert size >= 2, "a single element cannot move"
    order = np.arange(size)
    for last in range(size - 1, 0, -1):
        other = int(rng.integers(last))  # strictly below `last`: that makes it one cycle
        order[[last, other]] = order[[other, last]]
    return order
