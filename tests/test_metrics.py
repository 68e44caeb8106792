"""The metrics of a step against hand arithmetic and identities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.graded_groups import RIGHT, WRONG, make_group
from vlm_rl.advantages import compute_advantages, leave_one_out
from vlm_rl.algorithms import ALGORITHMS
from vlm_rl.distributed import all_reduce_sums
from vlm_rl.losses import policy_loss, token_weights
from vlm_rl.metrics import (
    batch_metrics,
    difficulty_metrics,
    gradient_mass_metrics,
    length_pull_metrics,
    length_tenths,
    update_metrics,
)
from vlm_rl.types import Group, LossInputs


def test_batch_metrics_by_hand() -> None:
    # rewards 1.5, 0, 1.5, 0 and 0, 0, 0, 0; lengths 10, 20, 30, 40 and 8, 8, 8, 16
    first = make_group([10, 20, 30, 40], [RIGHT, WRONG, RIGHT, WRONG], [1, -1, 1, -1], cut=[3])
    second = make_group([8, 8, 8, 16], [WRONG] * 4, [0] * 4, verdicts=["wrong", "timeout", "error", "no_answer"])
    metrics = batch_metrics([first, second])
    assert metrics["reward"] == pytest.approx(3 / 8)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(4 * 0.75**2 / 3) / 2)  # the second group's is 0
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["verifier/timeout_rate"] == metrics["verifier/error_rate"] == 1 / 8
    assert metrics["rewards/accuracy/mean"] == 2 / 8
    assert metrics["rewards/format/mean"] == 1 / 8
    assert metrics["completions/mean_length"] == 140 / 8
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (8, 40)
    assert metrics["completions/mean_terminated_length"] == 100 / 7
    assert metrics["completions/clipped_ratio"] == 1 / 8
    assert metrics["num_tokens"] == 140
    assert metrics["length/correct_mean"] == 20
    assert metrics["length/wrong_mean"] == 100 / 6
    assert metrics["length/positive_mean"] == 20
    assert metrics["length/negative_mean"] == 30
    assert metrics["length/sign_gap"] == -10
    # population deviation over mean: sqrt(125)/25 and sqrt(12)/10
    assert metrics["length/group_cv"] == pytest.approx((math.sqrt(125) / 25 + math.sqrt(12) / 10) / 2)


def test_metrics_over_nothing_are_nan_and_nothing_else() -> None:
    metrics = batch_metrics([make_group([5, 5], [WRONG, WRONG], [0, 0])])
    undefined = {key for key, value in metrics.items() if math.isnan(value)}
    assert undefined == {
        "length/correct_mean",
        "length/positive_mean",
        "length/negative_mean",
        "length/sign_gap",
        "length/reward_correlation",
    }


def test_length_and_reward_that_rise_together_correlate() -> None:
    group = make_group([1, 2, 3], [(0.0, 0, 0), (0.5, 0, 0), (1.0, 0, 0)], [0, 0, 0])
    assert batch_metrics([group])["length/reward_correlation"] == pytest.approx(1.0)


def test_gradient_mass_by_hand() -> None:
    # ten responses of lengths 1 .. 10, each its own decile; token weights 1: mass = length x |A|
    lengths, advantages = list(range(1, 11)), [1.0, -1.0] * 5
    metrics = gradient_mass_metrics([make_group(lengths, [RIGHT] * 10, advantages)], np.ones((1, 10)))
    for length, advantage in zip(lengths, advantages, strict=True):
        sign, other = ("positive", "negative") if advantage > 0 else ("negative", "positive")
        assert metrics[f"gradient_mass/{sign}/decile_{length}"] == pytest.approx(length / 55)
        assert metrics[f"gradient_mass/{other}/decile_{length}"] == 0


def test_gradient_mass_of_no_signal_is_zero() -> None:
    metrics = gradient_mass_metrics([make_group([3, 4], [RIGHT, RIGHT], [0, 0])], np.ones((1, 2)))
    assert set(metrics.values()) == {0.0}


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Group], str]:
    """Graded groups with advantages, and the rule that gave them."""
    name = draw(st.sampled_from(sorted(ALGORITHMS)))
    num_prompts, num_responses = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    part = st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5]), st.sampled_from([-0.3, -0.1, 0.0]))
    groups = []
    for _ in range(num_prompts):
        parts = draw(st.lists(part, min_size=num_responses, max_size=num_responses))
        lengths = draw(st.lists(st.integers(1, 40), min_size=num_responses, max_size=num_responses))
        rewards = np.array([[sum(p) for p in parts]])
        groups.append(make_group(lengths, parts, compute_advantages(ALGORITHMS[name].advantage, rewards)[0].tolist()))
    return groups, name


def weights_of(groups: Sequence[Group], name: str) -> np.ndarray:
    lengths = np.stack([group.lengths_G for group in groups])
    advantages = np.stack([group.advantages_G for group in groups])
    return token_weights(ALGORITHMS[name].aggregation, lengths, advantages, max_tokens=40)


@given(batches())
def test_shares_of_gradient_mass_add_up(batch: tuple[list[Group], str]) -> None:
    groups, name = batch
    total = sum(gradient_mass_metrics(groups, weights_of(groups, name)).values())
    has_signal = any(group.advantages_G.any() for group in groups)
    assert total == pytest.approx(1.0 if has_signal else 0.0)


@given(batches())
def test_the_parts_of_the_pull_add_up(batch: tuple[list[Group], str]) -> None:
    groups, name = batch
    metrics = length_pull_metrics(groups, weights_of(groups, name))
    parts = sum(metrics[f"length_pull/{part}"] for part in ("accuracy", "format", "overlong"))
    assert parts == pytest.approx(metrics["length_pull/total"], rel=1e-9, abs=1e-9)


def test_a_reward_on_the_mean_pulls_nothing() -> None:
    """Leave-one-out of .9, 1.2, 1.5: the middle one's advantage is -2e-16, its distance from the mean exactly 0."""
    parts = [(1.0, 0.0, -0.1), (1.0, 0.5, -0.3), (1.0, 0.5, 0.0)]
    advantages = leave_one_out(np.array([[sum(part) for part in parts]]))[0]
    metrics = length_pull_metrics(
        [group := make_group([5, 9, 7], parts, advantages.tolist())], weights_of([group], "rloo")
    )
    assert all(map(math.isfinite, metrics.values()))
    shares = [metrics[f"length_pull/{part}"] for part in ("accuracy", "format", "overlong")]
    assert sum(shares) == pytest.approx(metrics["length_pull/total"]) and shares[0] == 0


def test_the_pull_of_a_sequence_mean_is_a_covariance() -> None:
    """GRPO: c_i = 1/N, so with one group the pull is cov(A, length), here of a right long and a wrong short one."""
    group = make_group([30, 10], [RIGHT, WRONG], [0.7, -0.7])
    metrics = length_pull_metrics([group], weights_of([group], "grpo"))
    assert metrics["length_pull/total"] == pytest.approx((0.7 * 10 + -0.7 * -10) / 2)
    assert metrics["length_pull/accuracy"] == pytest.approx(2 * metrics["length_pull/format"])  # 1 against .5
    assert metrics["length_pull/overlong"] == 0


def test_the_pull_of_a_length_weighted_sum_is_centred_at_the_groups_mean() -> None:
    """LUSPO: c_i = |y_i| / N, here 15 and 5 around a mean of 20; c A no longer adds up to 0 over the group."""
    metrics = length_pull_metrics(
        [group := make_group([30, 10], [RIGHT, WRONG], [0.7, -0.7])], weights_of([group], "luspo")
    )
    assert metrics["length_pull/total"] == pytest.approx(15 * 0.7 * 10 + 5 * -0.7 * -10)


def test_the_pull_names_the_part_that_shortens() -> None:
    """Both right and well formed; the long one pays the penalty, so only that part pulls, and it shortens."""
    group = make_group([40, 10], [(1.0, 0.5, -0.3), (1.0, 0.5, 0.0)], [-0.7, 0.7])
    metrics = length_pull_metrics([group], weights_of([group], "grpo"))
    assert metrics["length_pull/overlong"] == pytest.approx(metrics["length_pull/total"])
    assert metrics["length_pull/total"] < 0
    assert metrics["length_pull/accuracy"] == metrics["length_pull/format"] == 0


def test_difficulty_metrics_by_hand() -> None:
    # belief .5: the first prompt (pass rate .25) is hard, the second (.75) easy; A = 0 does not count
    phi = np.array([[2.0, 1.0, 9.0], [1.0, 3.0, 5.0]])
    advantages = np.array([[1.0, -1.0, 0.0], [1.0, -1.0, -1.0]])
    metrics = difficulty_metrics(phi, advantages, [0.25, 0.75], 0.5)
    assert metrics == {"hadw/weight_hard": 1.5, "hadw/weight_easy": 3.0}


def test_clipping_is_counted_by_sign_and_length() -> None:
    """Four responses of 3, 1, 2 and 1 tokens: their tenths are 7, 0, 5 and 2, equal lengths in their order.

    With bounds of .8 and 1.2 the ratios .5 of negative and 1.5 of positive advantages are clipped.
    """
    lengths = [3, 1, 2, 1]
    assert length_tenths(np.array(lengths)).tolist() == [7, 0, 5, 2]
    ratios = torch.tensor([0.5, 1.0, 0.5, 1.5, 1.5, 0.5, 0.5], dtype=torch.float64)
    inputs = LossInputs(
        old_logp_K=torch.zeros(7, dtype=torch.float64),
        sampler_logp_K=None,
        response_K=torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)),
        lengths_n=torch.tensor(lengths),
        advantages_n=torch.tensor([-1.0, 1.0, 2.0, 0.0]),
        weights_n=torch.ones(4),
        tenth_n=torch.tensor([7, 0, 5, 2]),
    )
    rule = partial(policy_loss, ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.2, cap=2.0)
    _, sums = rule(ratios.log(), torch.zeros(7), inputs)
    twice = all_reduce_sums({name: 2 * value for name, value in sums.items()})  # counts add up over micro-batches
    deciles = {key: value for key, value in update_metrics([twice]).items() if "decile" in key}
    assert deciles == {
        "clip_ratio/negative/decile_8": pytest.approx(2 / 3),
        "clip_ratio/positive/decile_1": 1.0,
        "clip_ratio/positive/decile_6": 0.5,
    }


def test_update_metrics_by_hand() -> None:
    """Two optimizer steps of 10 and 30 tokens: token means weigh them 1 : 3."""
    sums = [
        {"tokens": 10.0, "entropy": 5.0, "clipped_low": 1.0, "clipped_high": 0.0, "gap": 1.0, "policy_loss": 2.0},
        {"tokens": 30.0, "entropy": 3.0, "clipped_low": 1.0, "clipped_high": 4.0, "gap": 1.0, "policy_loss": 4.0},
    ]
    metrics = update_metrics(sums)
    assert metrics["entropy"] == pytest.approx(8 / 40)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(2 / 40)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(4 / 40)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(6 / 40)
    assert metrics["rollout/logprob_gap"] == pytest.approx(2 / 40)
    assert metrics["loss/policy"] == 3.0
    assert "kl" not in metrics
    assert update_metrics([{"tokens": 4.0, "kl": 2.0}])["kl"] == 0.5
