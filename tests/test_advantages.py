"""Advantages by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.advantages import ADVANTAGES, compute_advantages


def rewards(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


def test_group_norm_by_hand() -> None:
    # rewards 1, 0, 0, 1: mean 1/2, squared deviations 4 * 1/4 = 1, std = sqrt(1 / (4 - ddof))
    sample = compute_advantages("group_norm", rewards([1, 0, 0, 1]))
    population = compute_advantages("group_norm", rewards([1, 0, 0, 1]), ddof=0)
    np.testing.assert_allclose(sample, [[s * 0.5 / (3**-0.5 + 1e-6) for s in (1, -1, -1, 1)]], rtol=1e-12)
    np.testing.assert_allclose(population, [[s * 0.5 / (0.5 + 1e-6) for s in (1, -1, -1, 1)]], rtol=1e-12)


def test_group_center_by_hand() -> None:
    # mean of 1.5, 0, 0 is 0.5
    np.testing.assert_allclose(compute_advantages("group_center", rewards([1.5, 0, 0])), [[1.0, -0.5, -0.5]])


def test_leave_one_out_by_hand() -> None:
    # the others of 1.5 average 0; the others of a 0 average 0.75
    np.testing.assert_allclose(compute_advantages("leave_one_out", rewards([1.5, 0, 0])), [[1.5, -0.75, -0.75]])


def test_each_group_stands_alone() -> None:
    both = compute_advantages("group_norm", rewards([1, 0, 0, 1], [3, 3, 3, 4]))
    np.testing.assert_array_equal(both[:1], compute_advantages("group_norm", rewards([1, 0, 0, 1])))
    np.testing.assert_array_equal(both[1:], compute_advantages("group_norm", rewards([3, 3, 3, 4])))


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("value", [0.0, 1.35, 1 / 3, -0.15])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_equal_rewards_give_exactly_zero(name: str, value: float, size: int) -> None:
    assert not compute_advantages(name, rewards([value] * size)).any()


def test_a_group_of_one_is_zero_beside_real_groups_too() -> None:
    for name in ADVANTAGES:
        assert compute_advantages(name, rewards([5.0], [2.0])).tolist() == [[0.0], [0.0]]


@given(st.lists(st.floats(-2, 2).map(lambda x: round(x, 3)), min_size=2, max_size=16), st.randoms())
def test_order_of_responses_does_not_matter(values: list[float], random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    for name in ADVANTAGES:
        plain = compute_advantages(name, rewards(values))
        shuffled = compute_advantages(name, rewards([values[i] for i in order]))
        np.testing.assert_allclose(shuffled, plain[:, order], atol=1e-9)
        assert abs(plain.sum()) < 1e-6 * max(1.0, np.abs(plain).max())


@pytest.mark.parametrize("name", ["group_norm", "group_center", "leave_one_out"])
def test_a_response_that_is_not_there_changes_nothing_for_the_others(name: str) -> None:
    rewards_PG = np.array([[1.0, math.nan, 0.0, 0.5], [math.nan] * 4, [math.nan, 1.0, math.nan, math.nan]])
    advantages_PG = compute_advantages(name, rewards_PG)
    smaller_G = compute_advantages(name, np.array([[1.0, 0.0, 0.5]]))[0]
    assert advantages_PG[0].tolist() == [smaller_G[0], 0.0, smaller_G[1], smaller_G[2]]
    assert not advantages_PG[1:].any()


def test_groups_do_not_mix_and_may_have_two_responses() -> None:
    rewards_PG = np.array([[1.0, 0.0], [3.0, 1.0], [1.35, 1.35]])
    assert compute_advantages("leave_one_out", rewards_PG).tolist() == [
        [1, -1],
        [2, -2],
        [0, 0],
    ]  # A = r - the other reward
    assert compute_advantages("group_center", rewards_PG).tolist() == [[0.5, -0.5], [1, -1], [0, 0]]
