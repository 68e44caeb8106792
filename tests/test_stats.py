"""Intervals against their definitions, tables and closed forms; smoothing by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.stats import estimate, running_mean, score_interval, sign_test, smooth

Z = 1.959964


@given(st.integers(0, 300), st.integers(1, 300))
def test_a_share_gets_the_ends_that_are_just_not_rejected(right: int, count: int) -> None:
    """Wilson's definition: |share - end| = z sqrt(end (1 - end) / n), inside [0, 1] and around the share."""
    scores = np.arange(count) < right
    share = scores.mean()
    low, high = score_interval(scores)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        assert abs(share - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / count), abs=1e-6)


def test_a_perfect_share_is_no_point() -> None:
    """At a share of 1 Wilson's interval begins at n / (n + z^2), at 0 it ends at z^2 / (n + z^2)."""
    assert score_interval(np.ones(256)) == pytest.approx((256 / (256 + Z**2), 1), abs=1e-6)
    assert score_interval(np.zeros(10)) == pytest.approx((0, Z**2 / (10 + Z**2)), abs=1e-6)
    assert np.isnan(score_interval(np.array([]))).all()


def test_partial_scores_get_the_bootstrap() -> None:
    low, high = score_interval(np.array([0.25, 0.75] * 200))
    # standard error .25 / sqrt(400) = .0125; quantiles of 2,000 draws wander a little
    assert (low, high) == pytest.approx((0.5 - Z * 0.0125, 0.5 + Z * 0.0125), abs=0.003)


def test_the_order_of_the_problems_is_no_part_of_an_interval() -> None:
    scores = np.linspace(0, 1, 41) ** 2  # so many values that other draws have a different interval
    orders = [np.random.default_rng(seed).permutation(scores) for seed in range(5)]
    assert {score_interval(order) for order in orders} == {score_interval(scores)}


def test_equal_partial_scores_are_no_point() -> None:
    """Three halves: between one and two right of three."""
    low, high = score_interval(np.full(3, 0.5))
    assert (low, high) == (score_interval(np.array([1, 0, 0]))[0], score_interval(np.array([1, 1, 0]))[1])


@pytest.mark.parametrize(("share", "count"), [(1 / 3, 30), (1 / 7, 700), (0.1, 10_000)])
def test_equal_partial_scores_that_sum_to_a_count_have_its_interval(share: float, count: int) -> None:
    """In floating point thirty thirds are above ten."""
    assert score_interval(np.full(count, share)) == score_interval(np.arange(count) < round(share * count))


def test_the_bootstrap_of_many_problems_is_bounded_in_memory() -> None:
    import tracemalloc

    scores = np.linspace(0, 1, 5000)
    score_interval(scores[:10])  # imports what it needs
    tracemalloc.start()
    score_interval(scores)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6  # all 2,000 draws at once are 160 MB


@pytest.mark.parametrize(("df", "quantile"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423)])
def test_the_t_interval_has_the_tabulated_quantile(df: int, quantile: float) -> None:
    values = np.arange(df + 1.0)
    error = values.std(ddof=1) / math.sqrt(df + 1)
    result = estimate(values)
    assert result.high - result.mean == pytest.approx(quantile * error, rel=1e-4)
    assert result.mean - result.low == pytest.approx(quantile * error, rel=1e-4)


def test_an_estimate_by_hand() -> None:
    # 1, 2, 6, NaN: mean 3, deviations -2, -1, 3, variance 14 / 2 = 7; df 2: t_.975 = 4.3027, t_.8 = 1.0607
    result = estimate([1.0, 2.0, 6.0, math.nan])
    error = math.sqrt(7 / 3)
    assert (result.num, result.mean, result.std) == (3, 3.0, pytest.approx(math.sqrt(7)))
    assert (result.low, result.high) == (
        pytest.approx(3 - 4.3027 * error, 1e-4),
        pytest.approx(3 + 4.3027 * error, 1e-4),
    )
    assert result.detectable == pytest.approx((4.3027 + 1.0607) * error, 1e-4)
    assert result.has_interval and not result.excludes_zero
    assert estimate([5.0, 5.5, 6.0]).excludes_zero and estimate([-5.0, -5.5, -6.0]).excludes_zero


def test_one_value_has_no_interval() -> None:
    single = estimate([4.0])
    assert (single.num, single.mean, single.has_interval, single.excludes_zero) == (1, 4.0, False, False)
    assert math.isnan(single.detectable) and math.isnan(estimate([]).mean)


def test_an_interval_is_cut_at_what_is_possible() -> None:
    gain = estimate([1.0, 0.0], bounds=(-1, 1))  # .5 +- 6.35
    assert (gain.low, gain.high) == (-1, 1)
    share = estimate([0.1, 0.2, 0.1], bounds=(0, 1))
    assert share.low == 0 and share.high == estimate([0.1, 0.2, 0.1]).high


@pytest.mark.parametrize("count", [2, 5, 6, 100])
@pytest.mark.parametrize("value", [1.0, 0.0, -1.0, 1 / 3])
def test_equal_differences_are_no_point(count: int, value: float) -> None:
    """Up to a share u of others, all alike has a chance of 2.5 %: (1 - u)^n = .025. They may be -1 or 1."""
    result = estimate(np.full(count, 2 / 3) - (2 / 3 - value), bounds=(-1, 1))  # equal up to rounding
    share = 1 - 0.025 ** (1 / count)
    assert result.low == pytest.approx(value - share * (value + 1))
    assert result.high == pytest.approx(value + share * (1 - value))
    assert result.detectable == pytest.approx(max(result.high - value, value - result.low))
    assert estimate(np.full(count, value)).low == pytest.approx(value)  # nothing is known without bounds


@pytest.mark.parametrize("won", range(2, 9))
def test_problems_that_are_all_won_settle_what_the_sign_test_settles(won: int) -> None:
    assert estimate(np.ones(won), bounds=(-1, 1)).excludes_zero is (sign_test(won, 0) < 0.05)


@pytest.mark.parametrize(("won", "lost", "p"), [(0, 0, 1), (5, 0, 2 / 32), (3, 1, 10 / 16), (4, 4, 1)])
def test_the_sign_test_counts_tosses(won: int, lost: int, p: float) -> None:
    assert sign_test(won, lost) == pytest.approx(p)


def test_the_running_mean_by_hand() -> None:
    # window 3: (1+2)/2, (1+2+6)/3, (2+6+7)/3, (6+7)/2
    np.testing.assert_allclose(running_mean(np.array([1.0, 2, 6, 7]), 3), [1.5, 3, 5, 6.5])
    gap = np.array([1.0, np.nan, 3, 5])  # (1)/1, NaN, (3+5)/2, (3+5)/2
    np.testing.assert_allclose(running_mean(gap, 3), [1, np.nan, 4, 4])


def test_a_curve_is_smoothed_over_five_steps_or_a_twentieth() -> None:
    bump = np.zeros(60)
    bump[30] = 10
    assert (smooth(bump) > 0).sum() == 5 and smooth(bump)[30] == 2
    long = np.zeros(400)
    long[200] = 21
    assert (smooth(long) > 0).sum() == 21 and smooth(long)[200] == pytest.approx(1)
    np.testing.assert_array_equal(smooth(bump[25:36]), bump[25:36])  # eleven values stay as they are
