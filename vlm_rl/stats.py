"""Numbers with their uncertainty, and the running mean that makes a noisy curve readable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_RESAMPLES_AT_A_TIME = 100  # bounds the index matrix: 100 x 5,000 problems are 4 MB


def score_interval(scores_P: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean of scores in [0, 1]: bootstrap, or Wilson's where all scores are equal.

    Equal scores (all right, all wrong) have no spread to draw from: the bootstrap would be a point, as if
    more problems could not change it. (nan, nan) for none.
    """
    scores_P = np.asarray(scores_P, dtype=np.float64)
    if len(scores_P) and (scores_P == scores_P[0]).all():
        return wilson_interval(float(scores_P[0]), len(scores_P))
    return bootstrap_interval(scores_P, seed=seed)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share of `count` trials (Wilson 1927): a point for no share.

    For scores that need not be 0 or 1 it is on the safe side: of all values in [0, 1] with one mean
    those vary most.
    """
    assert 0 <= share <= 1 and count > 0
    z = NormalDist().inv_cdf(0.975)
    shrink = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / shrink
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / shrink
    # The share lies inside; rounding must not push it out.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def bootstrap_interval(
    scores_P: np.ndarray, *, seed: int = 0, confidence: float = 0.95, num_resamples: int = 2000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over problems; (nan, nan) for none.

    `scores_P` holds one number per problem (with k samples: their mean), because the samples of a problem
    are not independent. Equal scores give a point: see `score_interval`.
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


def running_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` (odd) neighbours; fewer at the two ends, so nothing is invented there.

    What is not finite stays as it is and spreads nowhere.
    """
    kernel = np.ones(window)
    finite = np.isfinite(y)
    total = np.convolve(np.where(finite, y, 0.0), kernel, mode="same")
    count = np.convolve(finite.astype(np.float64), kernel, mode="same")
    return np.where(finite, total / np.maximum(count, 1.0), y)


def smooth(y: np.ndarray) -> np.ndarray:
    """Return the running mean over about a twentieth of the values, at least 5; fewer than 12 stay as they are."""
    return running_mean(y, max(5, len(y) // 20) | 1) if len(y) >= 12 else y


# -- Student's t ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of independent values with its uncertainty; NaN where `num` values do not allow it."""

    num: int
    mean: float
    std: float  # of one value, ddof 1
    low: float  # ends of the 95 % t interval of the mean
    high: float
    detectable: float  # the smallest true mean that a test at 5 %, two-sided, finds with a power of 80 %

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.low)

    @property
    def excludes_zero(self) -> bool:
        return self.has_interval and (self.low > 0 or self.high < 0)


def estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean, 95 % t interval and detectable difference of a few values; those that are NaN do not count.

    The detectable difference is (t_.975 + t_.80) std / sqrt(n) with n - 1 degrees of freedom. One value has
    no interval.
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    num = len(known)
    mean = float(known.mean()) if num else math.nan
    if num < 2:
        return Estimate(num, mean, math.nan, math.nan, math.nan, math.nan)
    std = float(known.std(ddof=1))
    error = std / math.sqrt(num)
    half = t_quantile(0.975, num - 1) * error
    return Estimate(num, mean, std, mean - half, mean + half, half + t_quantile(0.8, num - 1) * error)


def t_quantile(probability: float, df: float) -> float:
    """The quantile of Student's t distribution with `df` degrees of freedom, by bisection of its CDF."""
    assert 0 < probability < 1 and df > 0
    if probability < 0.5:
        return -t_quantile(1 - probability, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < probability:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:  # until no number lies between
        low, high = (middle, high) if t_cdf(middle, df) < probability else (low, middle)
    return high if probability > 0.5 else 0.0


def t_cdf(t: float, df: float) -> float:
    """P(T <= t) = 1 - I_x(df/2, 1/2) / 2 with x = df / (df + t^2), for t >= 0."""
    if t < 0:
        return 1 - t_cdf(-t, df)
    return 1 - incomplete_beta(df / 2, 0.5, df / (df + t * t)) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), to about 1e-14 (DLMF 8.17.22)."""
    assert a > 0 and b > 0 and 0 <= x <= 1
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _beta_fraction(a, b, x))


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)) of DLMF 8.17.22, by the modified Lentz algorithm."""
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for n in range(1, 1000):
        m = n // 2
        if n % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + term * d or tiny)
        c = 1 + term / c or tiny
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
