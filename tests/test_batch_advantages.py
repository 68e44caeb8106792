"""GDPO, EBPO and the terms for length: by hand, against loops in float64, and in a step's groups."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.graded_groups import RIGHT, WRONG, make_group
from vlm_rl.batch_advantages import (
    Moments,
    RewardHistory,
    brevity_bonus,
    decoupled_norm,
    pass_rate_penalty,
    shrunk_baseline,
)
from vlm_rl.config import AlgorithmConfig
from vlm_rl.hadw import Belief
from vlm_rl.rollouts.collect import advantages_of, with_advantages, with_group_length

NAN = math.nan


@st.composite
def reward_tables(draw: st.DrawFn, *, parts: int = 2) -> np.ndarray:
    """Rewards [parts, P, G] of few values, so that groups often agree; some responses are left out of all parts."""
    shape = (parts, draw(st.integers(1, 4)), draw(st.integers(2, 5)))
    cells = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=math.prod(shape), max_size=math.prod(shape)))
    table = np.array(cells).reshape(shape)
    table[:, np.random.default_rng(draw(st.integers(0, 99))).random(shape[1:]) < 0.1] = NAN
    return table


def whitened(values: list[float]) -> list[float]:
    there = [v for v in values if not math.isnan(v)]
    if len(there) < 2 or max(there) == min(there):
        return [0.0] * len(values)
    mean = sum(there) / len(there)
    std = math.sqrt(sum((v - mean) ** 2 for v in there) / (len(there) - 1))
    return [0.0 if math.isnan(v) else (v - mean) / (std + 1e-6) for v in values]


def test_gdpo_by_hand() -> None:
    # Accuracy 1, 0 and format 0, 1 in one group: the sums are equal, and so are the normed parts' with equal weights.
    # Weight 2 of accuracy leaves +-(2 - 1) / sqrt 2, whitened over the batch with the other group's zeros:
    # x, -x, 0, 0 has the standard deviation x sqrt(2/3).
    parts = np.array([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.5, 0.5]]])
    assert not decoupled_norm(parts, [1, 1]).any()
    wanted = math.sqrt(3 / 2)
    np.testing.assert_allclose(decoupled_norm(parts, [2, 1]), [[wanted, -wanted], [0, 0]], rtol=1e-5)


@given(table=reward_tables(), weights=st.tuples(st.floats(0.1, 2), st.floats(0.1, 2)))
def test_gdpo_is_its_equation(table: np.ndarray, weights: tuple[float, float]) -> None:
    sums = []
    for p, g in np.ndindex(table.shape[1:]):
        total = NAN if math.isnan(table[0, p, g]) else 0.0
        for part, weight in zip(table, weights, strict=True):
            group = [v for v in part[p] if not math.isnan(v)]
            if len(group) > 1 and max(group) > min(group):
                mean = sum(group) / len(group)
                std = math.sqrt(sum((v - mean) ** 2 for v in group) / (len(group) - 1))
                total += weight * (part[p, g] - mean) / std
        sums.append(total)
    computed = decoupled_norm(table, weights)
    np.testing.assert_allclose(computed.ravel(), whitened(sums), rtol=1e-7, atol=1e-8)


@given(table=reward_tables(), scale=st.floats(0.5, 20))
def test_a_part_s_size_cancels_in_gdpo(table: np.ndarray, scale: float) -> None:
    larger = table * np.array([scale, 1.0])[:, None, None]
    np.testing.assert_allclose(decoupled_norm(larger, [1, 1]), decoupled_norm(table, [1, 1]), atol=1e-6)


def test_ebpo_by_hand() -> None:
    # Rewards 1 0 | 0 0 | 1 1: mean 1/2, variance 1/4; group means 1/2, 0, 1 with variance 1/6. G = 2:
    # s = (1/8) / (1/8 + 1/6) = 3/7, V = 4/7 mean_g + 3/14, so r - V = 1/2 -1/2 | -3/14 -3/14 | 3/14 3/14.
    rewards = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    history = RewardHistory().merged(rewards)
    assert history.shrinkage(2) == pytest.approx(3 / 7)
    values = np.array([1 / 2, -1 / 2, -3 / 14, -3 / 14, 3 / 14, 3 / 14])
    computed = shrunk_baseline(rewards, history)
    np.testing.assert_allclose(computed.ravel(), values / (values.std(ddof=1) + 1e-6), rtol=1e-9)
    assert (computed[1] < 0).all() and (computed[2] > 0).all(), "groups that agree keep a signal"


@given(table=reward_tables(parts=3))
def test_ebpo_is_its_equation_after_any_number_of_steps(table: np.ndarray) -> None:
    history = RewardHistory()
    for rewards in table:
        history = history.merged(rewards)
    everything = [v for v in table.ravel() if not math.isnan(v)]
    means = [np.nanmean(row) for rewards in table for row in rewards if not np.isnan(row).all()]
    if not everything:
        assert not shrunk_baseline(table[-1], history).any()
        return
    centred = []
    for row in table[-1]:
        group = [v for v in row if not math.isnan(v)]
        noise = np.var(everything) / max(len(group), 1)
        s = noise / (noise + np.var(means)) if noise + np.var(means) > 1e-12 else 0.0
        centred += [v - (1 - s) * np.mean(group) - s * np.mean(everything) if group else NAN for v in row]
    np.testing.assert_allclose(shrunk_baseline(table[-1], history).ravel(), whitened(centred), rtol=1e-5, atol=1e-6)


@given(
    values=st.lists(st.floats(-5, 5), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=4).map(sorted),
)
def test_moments_do_not_depend_on_the_chunks(values: list[float], cuts: list[int]) -> None:
    moments = Moments()
    for chunk in np.split(np.array(values), cuts):
        moments = moments.merged(chunk)
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert moments.variance == pytest.approx(np.var(values), abs=1e-8)


def test_the_history_comes_back_from_a_checkpoint() -> None:
    history = RewardHistory().merged(np.array([[1.0, 0.1], [NAN, 0.3]]))
    assert RewardHistory.restored(json.loads(json.dumps(asdict(history)))) == history


def test_the_penalty_by_pass_rate_by_hand() -> None:
    # 3 of 4 right: .25 * .75 at the longest. Nobody right: nothing.
    lengths = np.array([10, 20, 5, 40])
    penalty = pass_rate_penalty(lengths, np.array([True, True, False, True]), 0.25)
    np.testing.assert_allclose(penalty, [-0.046875, -0.09375, -0.0234375, -0.1875], rtol=1e-12)
    assert not pass_rate_penalty(lengths, np.zeros(4, dtype=bool), 0.25).any()


def test_the_bonus_by_hand() -> None:
    # The positive ones have 10 and 30 tokens, 20 on average: 10 is half of that shorter, the whole bonus at cap .5
    # and half of it at cap 1. A negative response of 1 token gets nothing.
    advantages, lengths = np.array([[1.0, 1.0, -2.0, 0.0]]), np.array([[10, 30, 1, 1]])
    assert brevity_bonus(advantages, lengths, scale=0.2, cap=0.5).tolist() == [[0.2, 0, 0, 0]]
    np.testing.assert_allclose(brevity_bonus(advantages, lengths, scale=0.2, cap=1.0), [[0.1, 0, 0, 0]])


def test_a_group_s_length_is_a_part_of_its_rewards() -> None:
    group = make_group([10, 20, 40], [RIGHT, WRONG, RIGHT], [0, 0, 0])
    group = replace(group, rewards=(*group.rewards[:2], replace(group.rewards[2], dropped=True)))
    assert with_group_length(group, 0.0) is group
    found = [reward.parts["group_length"] for reward in with_group_length(group, 0.4).rewards]
    assert found == pytest.approx([-0.1, -0.2, 0.0])  # one of two right; the dropped one is neither long nor right
    assert with_group_length(group, 0.4).rewards[0].total == pytest.approx(1.4)


def test_a_step_s_advantages_by_each_rule() -> None:
    groups = [make_group([4, 8], [RIGHT, WRONG], [0, 0]), make_group([4, 8], [WRONG, WRONG], [0, 0])]
    history = RewardHistory().merged(np.array([[1.5, 0.0], [0.0, 0.0]]))
    parts = np.array([[[1.0, 0], [0, 0]], [[0.5, 0], [0, 0]], [[0.0, 0], [0, 0]]])
    options = AlgorithmConfig(gdpo_weights={"format": 0.5})
    gdpo, metrics = advantages_of(groups, options, baseline="gdpo", history=history)
    np.testing.assert_allclose(gdpo, decoupled_norm(parts, [1.0, 0.5, 1.0]))
    assert metrics == {}
    ebpo, metrics = advantages_of(groups, options, baseline="ebpo", history=history)
    np.testing.assert_allclose(ebpo, shrunk_baseline(np.array([[1.5, 0.0], [0.0, 0.0]]), history))
    assert metrics == {"ebpo/shrinkage": history.shrinkage(2), "ebpo/mean_reward": 0.375}
    assert ebpo[1, 0] < 0
    options = AlgorithmConfig(length_bonus=0.3)
    two_right = [make_group([4, 8, 3], [RIGHT, RIGHT, WRONG], [0, 0, 0])]
    plain, _ = advantages_of(two_right, AlgorithmConfig(), baseline="group_norm", history=history)
    longer, _ = with_advantages(
        two_right, options, baseline="group_norm", beliefs=(Belief(), Belief()), history=history
    )
    np.testing.assert_allclose(longer[0].advantages_G - plain[0], [0.3 * (2 / 6) / 0.5, 0, 0], atol=1e-12)
