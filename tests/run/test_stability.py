"""How steady a run was: drops, wavering evaluations and spikes, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vlm_rl.run.stability import spikes_of, steadiness


def test_how_evaluations_moved_by_hand() -> None:
    """.2, .8, .6, .7: neighbours differ by .6, -.2, .1; (.36 + .04 + .01) / (2 x 3) = .0683."""
    moved = steadiness([0.2, 0.8, 0.6, 0.7])
    assert moved is not None and moved.drop == pytest.approx(0.1)
    assert moved.between_std == pytest.approx(math.sqrt(0.41 / 6))
    two = steadiness([0.2, 0.8])
    assert two is not None and two.drop == 0 and math.isnan(two.between_std) and steadiness([0.2]) is None


def test_a_trend_counts_little_and_noise_as_its_standard_deviation() -> None:
    rng = np.random.default_rng(0)
    noise, trend = rng.normal(0, 0.02, 400), np.linspace(0, 0.8, 400)
    for values in (0.1 + noise, 0.1 + noise + trend):
        moved = steadiness(values.tolist())
        assert moved is not None and moved.between_std == pytest.approx(noise.std(ddof=1), rel=0.1)


def test_spikes_by_hand() -> None:
    """Norms: above ten medians of those before, from the sixth finite one on. Losses: more than ten times the median
    distance from the median, from the 21st on: median 0, usual distance .1."""
    records = [{"step": k, "grad_norm": 2.0, "loss": (k % 5 - 2) / 10} for k in range(1, 26)]
    records[2]["grad_norm"] = 100.0  # there is nothing to compare it with
    records[9]["grad_norm"] = 20.0
    records[10]["grad_norm"] = 20.1
    records[11]["grad_norm"] = math.nan
    records[5]["loss"] = 9.0
    records[22]["loss"] = 0.99
    records[23]["loss"] = -1.01
    spikes = spikes_of(records)
    assert spikes.norm_steps == [11] and spikes.loss_steps == [24]
    assert spikes.metrics() == {
        "stability/norm_ratio": 1.0,
        "stability/norm_spikes": 1.0,
        "stability/loss_spikes": 1.0,
    }


def test_a_loss_that_is_zero_up_to_rounding_has_no_spikes() -> None:
    rng = np.random.default_rng(0)
    losses = [*(1e-9 * rng.normal(size=30)).tolist(), 5e-8]
    assert not spikes_of({"step": k, "loss": loss} for k, loss in enumerate(losses)).loss_steps
