"""HA-DW against the numbers that its definition gives by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.advantages import compute_advantages
from vlm_rl.hadw import Belief, difficulty_weights, first_belief, published_weights, update_belief

HALF = Belief(ability=0.5)


def weights(pass_rate: float, advantage: float, belief: Belief = HALF) -> float:
    return float(difficulty_weights(np.array([[advantage]]), [pass_rate], belief, scale=1.3)[0, 0])


@pytest.mark.parametrize(
    ("pass_rate", "correct", "wrong"),
    # 1.3 exp(+-.375) = 1.891489 and .893476
    [(0.125, 1.891489, 0.893476), (0.875, 0.893476, 1.891489), (0.5, 1.3, 1.3)],
)
def test_vectors(pass_rate: float, correct: float, wrong: float) -> None:
    assert weights(pass_rate, 1.0) == pytest.approx(correct, abs=1e-6)
    assert weights(pass_rate, -1.0) == pytest.approx(wrong, abs=1e-6)


def test_all_right_or_all_wrong_groups_get_the_scale_alone() -> None:
    assert weights(0.0, -0.5) == weights(1.0, 0.5) == 1.3


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_the_scale_is_a_plain_factor(scale: float) -> None:
    # exp(+-.375) = 1.454991 and .687289
    phi_PG = difficulty_weights(np.array([[1.0, -1.0]]), [0.125], HALF, scale=scale)
    np.testing.assert_allclose(phi_PG, [[1.454991 * scale, 0.687289 * scale]], rtol=1e-6)


def test_each_group_has_its_own_gap() -> None:
    advantages = np.array([[1.0, -1.0, 0.0], [-2.0, 0.5, 0.5]])
    phi_PG = difficulty_weights(advantages, [0.25, 0.75], HALF, scale=1.0)
    up, down = np.exp(0.25), np.exp(-0.25)  # hard and right, easy and wrong go up
    np.testing.assert_allclose(phi_PG, [[up, down, 1.0], [up, down, down]], rtol=1e-12)


@given(st.integers(1, 7), st.floats(0.01, 0.99))
def test_weights_are_positive_and_lift_the_rare_outcome(correct: int, ability: float) -> None:
    """Right on a hard prompt and wrong on an easy one get at least lambda, the others at most."""
    rewards = np.array([[1.0] * correct + [0.0] * (8 - correct)])
    advantages = compute_advantages("group_norm", rewards)
    phi_PG = difficulty_weights(advantages, [correct / 8], Belief(ability=ability), scale=1.3)
    assert (phi_PG > 0).all()
    assert (np.sign(phi_PG * advantages) == np.sign(advantages)).all()
    is_hard = correct / 8 < ability
    lifted, lowered = (rewards == 1, rewards == 0) if is_hard else (rewards == 0, rewards == 1)
    assert (phi_PG[lifted] >= 1.3).all() and (phi_PG[lowered] <= 1.3).all()
    np.testing.assert_allclose(phi_PG[lifted][0] * phi_PG[lowered][0], 1.3**2, rtol=1e-12)


@pytest.mark.parametrize("pass_rate", [0.0, 0.5, 1.0])
def test_degenerate_groups_stay_exactly_zero(pass_rate: float) -> None:
    advantages = compute_advantages("group_norm", np.full((1, 8), 1.35))
    scaled = advantages * difficulty_weights(advantages, [pass_rate], Belief(ability=0.3), scale=1.3)
    assert not scaled.any() and not np.isnan(scaled).any()


def test_the_first_step_has_no_prior() -> None:
    assert weights(0.125, 1.0, Belief()) == 1.0


def test_belief_is_a_running_mean_until_the_window_is_full() -> None:
    belief = Belief()
    for accuracy, mean in [(0.2, 0.2), (0.4, 0.3), (0.9, 0.5)]:
        belief = update_belief(belief, accuracy, eta=5.0, window=3)
        assert belief.ability == pytest.approx(mean)
    assert belief.history == pytest.approx((0.2, 0.3, 0.5))


def test_the_window_decides_which_rule_moves_the_belief() -> None:
    # window 2: .2, then (.2 + .4) / 2 = .3. The third step is the first by eta_t: the population std of
    # .2 and .3 is .05, eta 4 gives .2, so .3 + .2 (.8 - .3) = .4 and not the mean .6 of the last two
    belief = Belief()
    for accuracy in (0.2, 0.4, 0.8):
        belief = update_belief(belief, accuracy, eta=4.0, window=2)
    assert belief.ability == pytest.approx(0.4)
    assert belief.history == pytest.approx((0.3, 0.4))
    assert belief.num_steps == 3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0, 100), st.integers(1, 6))
def test_belief_stays_a_fraction_and_its_state_short(accuracies: list[float], eta: float, window: int) -> None:
    belief = Belief()
    for accuracy in accuracies:
        before = belief
        belief = update_belief(belief, accuracy, eta=eta, window=window)
        assert belief.ability is not None and -1e-12 <= belief.ability <= 1 + 1e-12
        if before.num_steps >= window and before.ability is not None:  # never past the accuracy, never at rest
            moved, gap = belief.ability - before.ability, accuracy - before.ability
            assert 0.01 * abs(gap) - 1e-12 <= abs(moved) <= abs(gap) + 1e-12
            assert abs(gap) < 1e-9 or moved * gap > 0
    assert len(belief.history) == len(belief.accuracies) == min(window, len(accuracies))


def test_belief_moves_by_eta_times_the_spread_of_its_history() -> None:
    belief = Belief(ability=0.5, history=(0.4, 0.5, 0.6), accuracies=(0.4, 0.6, 0.8), num_steps=3)
    # population std of .4, .5, .6 is .0816497; eta 5 gives .4082483
    after = update_belief(belief, 0.9, eta=5.0, window=3)
    assert after.ability == pytest.approx(0.5 + 0.4082483 * 0.4, abs=1e-6)
    assert after.history == pytest.approx((0.5, 0.6, after.ability))
    # a constant history would never move: the step size stays at least .01 (and at most 1)
    still = replace(belief, history=(0.5, 0.5, 0.5))
    assert update_belief(still, 0.9, eta=5.0, window=3).ability == pytest.approx(0.5 + 0.01 * 0.4)
    assert update_belief(belief, 0.9, eta=1e3, window=3).ability == pytest.approx(0.9)


def test_hard_variant_is_a_moving_average() -> None:
    belief = Belief()
    for accuracy in (0.1, 0.2, 0.3, 0.7):
        belief = update_belief(belief, accuracy, eta=5.0, window=3, variant="hard")
    assert belief.ability == pytest.approx((0.2 + 0.3 + 0.7) / 3)


def test_a_constant_belief_weighs_from_the_first_step_on() -> None:
    belief = first_belief(variant="constant", threshold=0.4)
    weights = difficulty_weights(np.array([[1.0, -1.0]]), [0.25], belief, scale=1.3)
    np.testing.assert_allclose(weights, [[1.3 * np.exp(0.15), 1.3 * np.exp(-0.15)]])
    for accuracy in (0.9, 0.1, 0.8):
        belief = update_belief(belief, accuracy, eta=5.0, window=2, variant="constant")
    assert (belief.ability, belief.num_steps) == (0.4, 3)


def test_the_published_code_compares_mean_rewards_with_batches_that_include_the_present_one() -> None:
    """Batches of mean reward .2, .5 and 1.1, a window of 2: the belief is .8 for the third batch itself.

    A group with rewards 1.5 and -.3 has mean .6, so it is hard: 1.5 exp(.2) for the right, 1.5 exp(-.2) for the
    other. A mean of 1 is not a special case: rewards 1.5 and .5 are easy, 1.5 exp(-.2) and 1.5 exp(.2).
    """
    belief = Belief()
    for mean in (0.2, 0.5, 1.1):
        belief = update_belief(belief, mean, eta=5.0, window=2, variant="published_code")
    assert belief.ability == pytest.approx(0.8)
    rewards = np.array([[1.5, -0.3], [1.5, 0.5]])
    advantages = compute_advantages("group_norm", rewards)
    up, down = 1.5 * np.exp(0.2), 1.5 * np.exp(-0.2)
    phi_PG = published_weights(advantages, rewards.mean(axis=1), belief, scale=1.5)
    np.testing.assert_allclose(phi_PG, [[up, down], [down, up]])


@pytest.mark.parametrize("variant", ["adaptive", "hard", "constant", "published_code"])
def test_a_belief_restored_from_json_continues_alike(variant: str) -> None:
    accuracies = np.random.default_rng(0).random(24)
    whole, halves = Belief(), Belief()
    for step, accuracy in enumerate(accuracies.tolist()):
        if step == 13:  # past the window: the history matters
            halves = Belief.restored(json.loads(json.dumps(asdict(halves))))
        whole = update_belief(whole, accuracy, eta=5.0, window=10, variant=variant)
        halves = update_belief(halves, accuracy, eta=5.0, window=10, variant=variant)
    assert halves == whole


@pytest.mark.parametrize(("eta", "ability"), [(5.0, 0.950), (1.0, 0.808)])
def test_how_soon_the_belief_follows_an_accuracy_that_climbs(eta: float, ability: float) -> None:
    # .2 at the start, .95 from step 20 on: after 60 steps eta 5 is there and eta 1 is not
    belief = Belief()
    for step in range(60):
        belief = update_belief(belief, min(0.95, 0.2 + 0.0375 * step), eta=eta, window=10)
    assert belief.ability == pytest.approx(ability, abs=5e-4)
