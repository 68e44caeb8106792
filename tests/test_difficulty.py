"""HA-DW against the numbers that its definition gives by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vlm_rl.difficulty import Belief, difficulty_weights, update_belief

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


def test_the_first_step_has_no_prior() -> None:
    assert weights(0.125, 1.0, Belief()) == 1.0


def test_belief_is_a_running_mean_until_the_window_is_full() -> None:
    belief = Belief()
    for accuracy, mean in [(0.2, 0.2), (0.4, 0.3), (0.9, 0.5)]:
        belief = update_belief(belief, accuracy, eta=5.0, window=3)
        assert belief.ability == pytest.approx(mean)
    assert belief.history == pytest.approx((0.2, 0.3, 0.5))


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


def test_the_belief_follows_an_accuracy_that_jumps() -> None:
    # running mean for ten steps at .2, then the accuracy is .95: eta 5 must get there
    belief = Belief()
    for step in range(60):
        belief = update_belief(belief, min(0.95, 0.2 + 0.0375 * step), eta=5.0, window=10)
    assert belief.ability == pytest.approx(0.948, abs=2e-3)
