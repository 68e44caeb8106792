"""Numbers with their uncertainty, and the smoothing that makes a noisy curve readable.

One policy for evaluation, report, study and demo. Every interval is a 95 % interval, cut at the values that
its number can have:

share of problems solved          scores of 0 and 1: Wilson's interval (`score_interval`)
mean of other scores in [0, 1]    several samples a problem, partial credit: percentile bootstrap over the problems
                                  (`score_interval`), because the samples of a problem are not independent
paired difference over problems   Student's t over the differences, cut at what a difference can be (`estimate`)
mean or difference over seeds     Student's t, one value per run, cut in the same way (`estimate`)
the same, where all are equal     how much the rest may differ: exact, and wider for fewer values (`estimate`)

Problems that were made from one problem (DynaMath's variants of a seed, MathVerse's versions) are right and wrong
together. `clusters` says which values belong together. Whole clusters then take the place of the values, as Miller
recommends for evaluations (2024, arXiv:2411.00640):

scores in [0, 1]                  a cluster counts as one score, its mean, by the rules above; clusters of different
                                  sizes and means: percentile bootstrap over them, sum of scores over number of
                                  scores (`score_interval`)
mean or paired difference         Student's t over n values in C clusters, with C - 1 degrees of freedom and the
                                  cluster-robust variance C/(C - 1) sum_c r_c^2 / n^2, where r_c is the sum of the
                                  residuals in cluster c (Cameron and Miller 2015; `estimate`); where all r_c are 0,
                                  the interval of C equal values

With one value in each cluster, both are exactly what they are without clusters.

Wins against losses are judged by the exact sign test (`sign_test`). Curves are smoothed by `smooth`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # loads scipy.stats at its first use: over a second that most commands never need

Clusters = Sequence[str] | np.ndarray  # a label for each value; those of one label belong together

_RESAMPLES = 2000
_RESAMPLES_AT_A_TIME = 100  # bounds the memory: 100 x 5,000 problems are 4 MB


def cluster_sums(values: np.ndarray, clusters: Clusters) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of the values in each cluster."""
    place = np.unique(np.asarray(clusters), return_inverse=True)[1]
    return np.bincount(place, weights=values), np.bincount(place)


def score_interval(scores_P: np.ndarray, clusters: Clusters | None = None) -> tuple[float, float]:
    """Return the 95 % interval of the mean of scores in [0, 1], one per problem; (nan, nan) for none.

    Scores of 0 and 1 get Wilson's interval (Wilson 1927), others the percentile bootstrap. Equal scores get Wilson's
    too: the bootstrap would be a point, as if more problems could not change it. The same scores have the same
    interval on every page and in every file, whatever their order: they are sorted, and the resamples are fixed.
    `clusters` says which problems belong together, as in the module's docstring.
    """
    scores_P = np.asarray(scores_P, dtype=np.float64)
    if clusters is not None:
        sum_C, size_C = cluster_sums(scores_P, clusters)
        if len(size_C) < len(scores_P):
            mean_C = (sum_C / size_C).round(12)  # equal up to rounding is equal
            if (size_C != size_C[0]).any() and (mean_C != mean_C[0]).any():
                order = np.lexsort((mean_C, size_C))
                return _bootstrap(_ratio, (mean_C * size_C)[order], size_C[order])
            scores_P = mean_C
    scores_P = np.sort(scores_P)
    num = len(scores_P)
    if not num:
        return math.nan, math.nan
    assert scores_P.min() >= 0 and scores_P.max() <= 1
    if np.isin(scores_P, (0, 1)).all() or (scores_P == scores_P[0]).all():
        # A sum of equal fractions lies between two counts: the interval covers both.
        total = scores_P.sum().round(9)  # thirty thirds add up to more than ten
        fewest, most = (_wilson(int(end(total)), num) for end in (np.floor, np.ceil))
        return fewest[0], most[1]
    return _bootstrap(np.mean, scores_P)


def _ratio(sum_C: np.ndarray, size_C: np.ndarray, axis: int = -1) -> np.ndarray:
    return sum_C.sum(axis=axis) / size_C.sum(axis=axis)


def _bootstrap(statistic: Callable[..., Any], *columns: np.ndarray) -> tuple[float, float]:
    """Return the percentile interval of a statistic of columns whose rows are resampled with replacement."""
    resampled = scipy.stats.bootstrap(
        columns,
        statistic,
        paired=len(columns) > 1,
        n_resamples=_RESAMPLES,
        batch=_RESAMPLES_AT_A_TIME,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(resampled.confidence_interval.low), float(resampled.confidence_interval.high)


def _wilson(num_right: int, num: int) -> tuple[float, float]:
    low, high = scipy.stats.binomtest(num_right, num).proportion_ci(method="wilson")
    return float(low), float(high)


def sign_test(won: int, lost: int) -> float:
    """Return P of a split at least this uneven if both sides are equally likely: two-sided, exact; 1 for none."""
    return float(scipy.stats.binomtest(won, won + lost).pvalue) if won + lost else 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of values with its uncertainty; NaN where too few of them are independent."""

    num: int
    mean: float
    std: float  # of one value, ddof 1
    low: float  # ends of the 95 % interval of the mean
    high: float
    detectable: float  # the smallest true mean that a two-sided test at 5 % finds with a power of 80 %

    @property
    def has_interval(self) -> bool:
        """Tell whether there were enough values for an interval."""
        return not math.isnan(self.low)

    @property
    def excludes_zero(self) -> bool:
        """Tell whether the interval exists and lies wholly above or below 0."""
        return self.has_interval and (self.low > 0 or self.high < 0)


def estimate(
    values: Sequence[float] | np.ndarray,
    *,
    clusters: Clusters | None = None,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """Return mean, 95 % t interval and detectable difference of values; NaN among them does not count.

    The values are independent, except for those of one of `clusters` (the module's docstring). The detectable
    difference is (t_.975 + t_.80) std / sqrt(n) with n - 1 degrees of freedom. `bounds` are the least and the largest
    value there can be, at which the interval is cut: (0, 1) for a share, (-1, 1) for a difference of shares. A single
    value or cluster has no interval.

    The t interval of equal values is a point, as if no other value could differ. Between bounds they get an exact one
    instead. If a share u of all values differs, n values miss it with probability (1 - u)^n, which is 2.5 % at
    u = 1 - 0.025^(1/n) (Clopper and Pearson 1934). The ends are the means with such a share at either bound, and the
    detectable difference is the longer side. Differences of 1 exclude 0 where the sign test does: from six on.
    """
    known = np.asarray(values, dtype=np.float64)
    there = ~np.isnan(known)
    known = known[there]
    num = len(known)
    mean = float(known.mean()) if num else math.nan
    if num < 2:
        return Estimate(num, mean, math.nan, math.nan, math.nan, math.nan)
    std = float(known.std(ddof=1))
    count, spread = num, std  # of what is independent
    if clusters is not None:
        sum_C, _ = cluster_sums(known - mean, np.asarray(clusters)[there])
        if len(sum_C) == 1:
            return Estimate(num, mean, std, math.nan, math.nan, math.nan)
        if len(sum_C) < num:
            count = len(sum_C)
            spread = float(np.sqrt((sum_C**2).sum() / (count - 1))) * count / num
    error = spread / math.sqrt(count)
    half = float(scipy.stats.t.ppf(0.975, count - 1)) * error
    detectable = half + float(scipy.stats.t.ppf(0.8, count - 1)) * error
    low, high = mean - half, mean + half
    if spread < 1e-9 and np.isfinite(bounds).all():
        unseen = 1 - 0.025 ** (1 / count)
        low, high = mean - unseen * (mean - bounds[0]), mean + unseen * (bounds[1] - mean)
        detectable = max(mean - low, high - mean)
    return Estimate(num, mean, std, max(bounds[0], low), min(bounds[1], high), detectable)


# -- curves and shuffles -------------------------------------------------------------------------


def running_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Return the centred mean over `window` (odd) neighbours; fewer at the two ends, so nothing is invented there.

    A value that is not finite stays as it is and changes no neighbour.
    """
    kernel = np.ones(window)
    finite = np.isfinite(y)
    total = np.convolve(np.where(finite, y, 0.0), kernel, mode="same")
    count = np.convolve(finite.astype(np.float64), kernel, mode="same")
    return np.where(finite, total / np.maximum(count, 1.0), y)


def smooth(y: np.ndarray) -> np.ndarray:
    """Return the running mean over about a twentieth of the values, at least 5; fewer than 12 stay as they are."""
    return running_mean(y, max(5, len(y) // 20) | 1) if len(y) >= 12 else y


def random_derangement(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random permutation in one cycle, so that nothing stays in its place (Sattolo's algorithm)."""
    assert size >= 2, "a single element cannot move"
    order = np.arange(size)
    for last in range(size - 1, 0, -1):
        other = int(rng.integers(last))  # strictly below `last`: that makes it one cycle
        order[[last, other]] = order[[other, last]]
    return order
