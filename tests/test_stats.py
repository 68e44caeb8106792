"""Intervals against their definitions, tables and closed forms; smoothing by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.stats import cluster_sums, estimate, running_mean, score_interval, sign_test, smooth

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


# -- problems that were made from one --------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 1.0, 0.25, 1 / 3]), max_size=30), st.randoms())
def test_clusters_of_one_value_change_nothing(scores: list[float], random) -> None:
    labels = random.sample([f"seed {i}" for i in range(len(scores))], len(scores))
    assert repr(score_interval(np.array(scores), labels)) == repr(score_interval(np.array(scores)))
    values = [math.nan if score == 0.25 else score - 0.5 for score in scores]
    for bounds in ((-1, 1), (-math.inf, math.inf)):
        clustered = estimate(values, clusters=labels, bounds=bounds)
        assert repr(clustered) == repr(estimate(values, bounds=bounds))


def test_a_clustered_estimate_by_hand() -> None:
    # 1, 2 | 6: mean 3, residuals -2 - 1 = -3 and 3; variance 2/1 x (9 + 9) / 3^2 = 4
    # df 1: t_.975 = 12.7062, t_.8 = 1.3764
    result = estimate([1.0, 6.0, math.nan, 2.0], clusters=["a", "b", "c", "a"])
    assert (result.num, result.mean, result.std) == (3, 3.0, pytest.approx(math.sqrt(7)))
    assert (result.low, result.high) == (pytest.approx(3 - 12.7062 * 2, 1e-4), pytest.approx(3 + 12.7062 * 2, 1e-4))
    assert result.detectable == pytest.approx((12.7062 + 1.3764) * 2, 1e-4)


@given(st.lists(st.sampled_from([0.0, 0.25, 1 / 3, 1.0]), min_size=2, max_size=20), st.integers(2, 10))
def test_copies_of_a_value_in_its_cluster_are_one_value(scores: list[float], copies: int) -> None:
    values = np.array(scores)
    labels = np.repeat(np.arange(len(values)), copies)
    once, copied = estimate(values, bounds=(-1, 1)), estimate(values.repeat(copies), clusters=labels, bounds=(-1, 1))
    assert [copied.low, copied.high, copied.detectable] == pytest.approx([once.low, once.high, once.detectable])
    assert score_interval(values.repeat(copies), labels) == pytest.approx(score_interval(values))


def test_copies_without_a_cluster_look_like_new_knowledge() -> None:
    """The fault: 16 copies make the interval four times as narrow."""
    values = np.linspace(0, 1, 400)
    wide, narrow = (estimate(some) for some in (values, values.repeat(16)))
    assert (wide.high - wide.low) / (narrow.high - narrow.low) == pytest.approx(4, rel=0.01)
    wide, narrow = (np.diff(score_interval(some)) for some in (values, values.repeat(16)))
    assert wide / narrow == pytest.approx(4, rel=0.1)


def test_clusters_of_different_sizes_weigh_what_they_hold() -> None:
    # 200 clusters of one score, a quarter right, and 200 of three equal ones, three quarters right: 500 of 800.
    # r = .375 (50), -.625 (150), 1.125 (150), -1.875 (50); error = sqrt(431.25) / 800 = .02596
    sizes = np.array([1, 3] * 200)
    labels = np.repeat(np.arange(400), sizes)
    scores = np.repeat(np.array([1, 1, 0, 1, 0, 1, 0, 0] * 50), sizes)
    low, high = score_interval(scores, labels)
    assert (low, high) == pytest.approx((0.625 - Z * 0.02596, 0.625 + Z * 0.02596), abs=0.005)
    clustered = estimate(scores, clusters=labels)
    assert (clustered.low, clustered.high) == pytest.approx(
        (0.625 - 1.966 * 0.02596, 0.625 + 1.966 * 0.02596), abs=1e-4
    )
    order = np.random.default_rng(0).permutation(800)
    assert score_interval(scores[order], [f"p{label}" for label in labels[order]]) == (low, high)


def test_clusters_that_are_alike_are_no_point() -> None:
    """Seven right scores in two clusters are two right scores; gains and losses that cancel are as many zeros."""
    assert score_interval(np.ones(7), list("aaabbbb")) == score_interval(np.ones(2))
    assert score_interval(np.full(5, 1 / 3), list("aabbb")) == score_interval(np.array([1 / 3, 1 / 3]))
    cancelled = estimate([1, -1, 0.5, -0.5, 0], clusters=list("aabbc"), bounds=(-1, 1))
    zeros = estimate([0, 0, 0], bounds=(-1, 1))
    assert (cancelled.low, cancelled.high) == pytest.approx((zeros.low, zeros.high))


def test_one_cluster_tells_nothing() -> None:
    alone = estimate([1.0, 0.0, 1.0], clusters=["a"] * 3)
    assert (alone.num, alone.mean, alone.has_interval) == (3, pytest.approx(2 / 3), False)
    assert score_interval(np.array([1, 0, 1]), ["a"] * 3) == pytest.approx((0, 1))


def test_the_intervals_of_correlated_variants_hold_what_they_say() -> None:
    """60 seeds of ten variants, 300 times. Misses of 5 % are due, of 300 up to 27 (5 % + three errors of 1.3 %)."""
    rng = np.random.default_rng(0)
    seeds = np.repeat(np.arange(60), 10)
    misses = dict.fromkeys(
        ("score", "score, no clusters", "change", "change, no clusters", "sign", "sign, variants"), 0
    )
    for _ in range(300):
        ease_S = rng.beta(0.7, 0.7, size=60)  # variants of a seed correlate by 1 / (1 + .7 + .7) = .42
        tilt_S = rng.normal(scale=0.3, size=60)  # a different model is better on some seeds and worse on others
        a = rng.random(600) < ease_S[seeds]
        b = rng.random(600) < np.clip(0.5 + tilt_S, 0, 1)[seeds]
        change = b.astype(float) - a
        sums, _ = cluster_sums(change, seeds)
        for name, clusters in ((", no clusters", None), ("", seeds)):
            low, high = score_interval(a, clusters)
            misses[f"score{name}"] += not low <= 0.5 <= high
            misses[f"change{name}"] += estimate(change, clusters=clusters, bounds=(-1, 1)).excludes_zero
        for name, values in (("sign", sums), ("sign, variants", change)):
            misses[name] += sign_test(int((values > 0).sum()), int((values < 0).sum())) < 0.05
    assert max(misses["score"], misses["change"], misses["sign"]) <= 27
    assert min(count for name, count in misses.items() if ", " in name) > 60  # a fifth, as if all were independent


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
