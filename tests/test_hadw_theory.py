"""The theory behind HA-DW against sums over every outcome, in float64, and the picture's simulator against it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from itertools import combinations, product
from math import comb
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from scipy.integrate import dblquad

from tests.helpers.example_run import build_run
from vlm_rl.advantages import ADVANTAGES, compute_advantages
from vlm_rl.hadw import Belief, difficulty_weights

SCRIPT = Path(__file__).resolve().parents[1] / "perf" / "hadw_theory.py"


def _load() -> ModuleType:
    """The script as a module: perf/ is not a package."""
    spec = spec_from_file_location("hadw_theory", SCRIPT)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


theory = _load()
PROBABILITIES = (0.01, 0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99)


def outcomes(p: float, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every reward vector of S, [2^G - 2, G], and its probability given S."""
    rewards = np.array(list(product((0.0, 1.0), repeat=size)))[1:-1]  # the first is all wrong, the last all right
    chance = np.prod(np.where(rewards == 1, p, 1 - p), axis=1)
    return rewards, chance / chance.sum()


@pytest.mark.parametrize("size", [2, 3, 4, 8, 11])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_closed_forms_equal_a_sum_over_all_outcomes(p: float, size: int) -> None:
    rewards, chance = outcomes(p, size)
    pass_rate = rewards.mean(axis=1)
    assert float(theory.mean_baseline(p, size)) == pytest.approx(float(chance @ pass_rate), rel=1e-12)
    # counts, not rates: k/G and p round differently where they are equal
    too_high = rewards.sum(axis=1) > size * p
    assert theory.probability_too_high(p, size) == pytest.approx(float(chance[too_high].sum()), rel=1e-12)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_closed_form_of_large_groups_equals_the_binomial_sum(p: float, size: int) -> None:
    mass = np.array([comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(1, size)])
    wanted = float(mass @ np.arange(1, size) / size / mass.sum())
    assert float(theory.mean_baseline(p, size)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("p", "baseline"),
    # G = 8, p = .1: .1 (1 - .1^7) / (1 - .9^8 - .1^8) = .09999999 / .56953278 = .175583
    [(0.01, 0.129441), (0.05, 0.148553), (0.1, 0.175583), (0.25, 0.277800), (0.5, 0.5), (0.9, 0.824417)],
)
def test_vectors_of_eight(p: float, baseline: float) -> None:
    assert float(theory.mean_baseline(p, 8)) == pytest.approx(baseline, abs=5e-7)


@given(st.floats(1e-3, 1 - 1e-3), st.integers(2, 32))
def test_right_and_wrong_are_symmetric(p: float, size: int) -> None:
    assert float(theory.mean_baseline(1 - p, size)) == pytest.approx(
        1 - float(theory.mean_baseline(p, size)), abs=1e-11
    )


@given(st.floats(1e-3, 1 - 1e-3), st.integers(2, 32))
def test_the_bias_has_the_sign_of_one_half_minus_p(p: float, size: int) -> None:
    # (p - p^G) / P(S) - p = p q (q^(G-1) - p^(G-1)) / P(S), q = 1 - p
    q = 1 - p
    wanted = p * q * (q ** (size - 1) - p ** (size - 1)) / (1 - q**size - p**size)
    baseline = float(theory.mean_baseline(p, size))
    assert baseline - p == pytest.approx(wanted, abs=1e-11)
    assert 1 / size - 1e-11 <= baseline <= 1 - 1 / size + 1e-11


def test_baseline_of_a_pair_is_a_half_whatever_p() -> None:
    # G = 2: S leaves one right and one wrong
    np.testing.assert_allclose(theory.mean_baseline(np.array(PROBABILITIES), 2), 0.5, rtol=1e-12)


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("size", [2, 5, 8])
def test_the_mean_advantage_is_zero_for_every_response(name: str, size: int) -> None:
    """E[A_i | S] = 0 by symmetry, whatever p: the bias is in the baseline and cannot be seen here."""
    for p in PROBABILITIES:
        rewards, chance = outcomes(p, size)
        np.testing.assert_allclose(chance @ compute_advantages(name, rewards), 0.0, atol=1e-13)


def test_the_bias_of_the_advantage_is_that_of_the_baseline() -> None:
    # (r_i - p) - (r_i - p_hat) averages to E[p_hat | S] - p, for each response i
    rewards, chance = outcomes(0.1, 8)
    estimate = chance @ compute_advantages("group_center", rewards)
    known = chance @ (rewards - 0.1)
    np.testing.assert_allclose(known - estimate, 0.175583 - 0.1, atol=5e-7)


@pytest.mark.parametrize("size", range(2, 33))
def test_the_papers_numbers_hold_up_to_eight_responses(size: int) -> None:
    hard, harder = theory.average_probability(size, 0.5), theory.average_probability(size, 0.25)
    assert (hard > 0.63) == (size <= 8)
    assert (harder > 0.78) == (size <= 8)


@pytest.mark.parametrize(("size", "hard", "harder"), [(8, 0.64095, 0.78113), (9, 0.61682, 0.73829)])
def test_average_probabilities_around_eight(size: int, hard: float, harder: float) -> None:
    assert theory.average_probability(size, 0.5) == pytest.approx(hard, abs=5e-6)
    assert theory.average_probability(size, 0.25) == pytest.approx(harder, abs=5e-6)


@pytest.mark.parametrize(
    ("size", "below", "paper"),
    # tables 4, 5 and 6 of the paper
    [
        (6, 0.25, 0.827762),
        (6, 0.5, 0.689722),
        (4, 0.5, 0.776966),
        (2, 1, 0.5),
        (5, 2 / 5, 0.780787),
        (6, 2 / 6, 0.781154),
    ],
)
def test_average_probabilities_are_those_of_the_papers_tables(size: int, below: float, paper: float) -> None:
    assert theory.average_probability(size, below) == pytest.approx(paper, abs=5e-6)


@pytest.mark.parametrize("size", range(2, 33))
def test_corollary_2_holds_from_five_responses_on(size: int) -> None:
    assert (theory.average_probability(size, 2 / size) > 0.78) == (size >= 5)


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize(("p", "belief"), [(0.05, 0.5), (0.3, 0.5), (0.3, 0.2), (0.8, 0.6)])
def test_the_scales_that_help_are_those_of_the_weights_that_training_applies(
    p: float, belief: float, reward: float
) -> None:
    """Theorem 3 by a sum over all groups of five: at the ends the weighted advantage is as far off as the plain."""
    rewards, chance = outcomes(p, 5)
    advantages = compute_advantages("group_center", rewards)
    weights = difficulty_weights(advantages, rewards.mean(axis=1), Belief(ability=belief), scale=1.0)
    rows, of_reward = np.arange(len(rewards)), (rewards == reward).argmax(axis=1)
    plain = float(chance @ advantages[rows, of_reward])
    weighted = float(chance @ (weights * advantages)[rows, of_reward])
    wanted = reward - p
    low, high = theory.helpful_scales(p, reward, 5, belief)
    for scale in (low, high):
        assert abs(scale * weighted - wanted) == pytest.approx(abs(plain - wanted), abs=1e-12)
    middle = (low + high) / 2
    assert abs(middle * weighted - wanted) < abs(plain - wanted) < abs((high + 0.01) * weighted - wanted)


def test_two_uniform_rewards_by_hand() -> None:
    """They differ by more than sigma with probability (1 - sigma)^2, and by symmetry their mean stays 1/2."""
    baseline, chance = theory.mean_baseline_of(stats.uniform(), 2, 0.3)
    assert chance == pytest.approx(0.49, abs=1e-12)
    assert baseline == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize(("alpha", "beta"), [(2, 1), (2, 5)])
def test_two_rewards_of_a_beta_distribution_by_a_double_integral(alpha: float, beta: float) -> None:
    rewards, sigma = stats.beta(alpha, beta), 0.2

    def over_pairs(value: Callable[[float, float], float]) -> float:
        def integrand(y: float, x: float) -> float:
            return value(x, y) * rewards.pdf(x) * rewards.pdf(y)

        return 2 * dblquad(integrand, 0, 1 - sigma, lambda x: x + sigma, 1)[0]  # the pairs with y above x

    chance = over_pairs(lambda x, y: 1.0)
    baseline, found = theory.mean_baseline_of(rewards, 2, sigma)
    assert found == pytest.approx(chance, abs=1e-8)
    assert baseline == pytest.approx(over_pairs(lambda x, y: (x + y) / 2) / chance, abs=1e-8)


@pytest.mark.parametrize("size", [4, 8])
def test_bounded_rewards_stay_within_five_standard_errors_and_are_mirrored(size: int) -> None:
    rewards = theory.truncated_normal(0.05)
    drawn = rewards.rvs((100_000, size), random_state=np.random.default_rng(5))
    means = drawn.mean(axis=1)[np.ptp(drawn, axis=1) > theory.SPREAD]
    baseline, chance = theory.mean_baseline_of(rewards, size, theory.SPREAD)
    assert abs(means.mean() - baseline) < 5 * means.std() / len(means) ** 0.5
    assert abs(len(means) / 100_000 - chance) < 5 * (chance * (1 - chance) / 100_000) ** 0.5
    mirrored, _ = theory.mean_baseline_of(theory.truncated_normal(0.95), size, theory.SPREAD)
    assert mirrored == pytest.approx(1 - baseline, abs=1e-10)


def test_average_probability_by_hand_and_by_a_plain_sum() -> None:
    # G = 3: P = 1 below 1/3, and 3 p^2 q / (3 p^2 q + 3 p q^2) = p above. Over (0, 1/2):
    # 2 [1/3 + (1/4 - 1/9) / 2] = 29/36; over (0, 1/4) it is 1.
    assert theory.average_probability(3, 0.5) == pytest.approx(29 / 36, rel=1e-12)
    assert theory.average_probability(3, 0.25) == pytest.approx(1, rel=1e-12)
    # the midpoint rule on 4,000 intervals, whose error is at most one interval's width for each of the 3 jumps
    points = (np.arange(4000) + 0.5) / 8000
    plain = np.mean([theory.probability_too_high(float(p), 8) for p in points])
    assert theory.average_probability(8, 0.5) == pytest.approx(plain, abs=3 / 4000)


@pytest.mark.parametrize(("p", "size"), [(0.05, 4), (0.1, 8), (0.3, 8), (0.5, 16), (0.9, 8)])
def test_simulation_stays_within_five_standard_errors(p: float, size: int) -> None:
    """The exact standard deviation comes from the enumeration; five errors are a chance of 6e-7."""
    simulated = theory.simulate(p, size, groups=20_000, seed=3)
    mass = np.array([comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(1, size)])
    rates, chance = np.arange(1, size) / size, mass / mass.sum()
    exact = float(chance @ rates)
    spread = float(chance @ (rates - exact) ** 2) ** 0.5
    assert abs(simulated.mean - exact) < 5 * spread / simulated.groups**0.5
    assert abs(simulated.groups - 20_000 * mass.sum()) < 5 * (20_000 * mass.sum() * (1 - mass.sum())) ** 0.5 + 1
    assert simulated.error == pytest.approx(spread / simulated.groups**0.5, rel=0.1)
    # and it would not pass with p itself in place of the baseline, but at p = 1/2
    assert p == 0.5 or abs(simulated.mean - p) > 5 * spread / simulated.groups**0.5


@given(st.integers(2, 4), st.data())
def test_the_baselines_of_stored_responses_are_sums_over_their_groups(size: int, data: st.DataObject) -> None:
    stored = data.draw(st.integers(2 * size, 9))
    right = data.draw(st.integers(1, stored - 1))
    rewards = [1] * right + [0] * (stored - right)
    rates = [sum(group) / size for group in combinations(rewards, size) if 0 < sum(group) < size]
    found = theory.baselines(right, stored, size)
    assert found.groups == pytest.approx(np.mean(rates))
    assert found.too_high == pytest.approx(np.mean([rate > right / stored for rate in rates]))


def test_groups_with_one_right_response_are_counted_one_by_one() -> None:
    """Figure 6: of the groups of 3 with one right response, those of problems with fewer than 3 of 9 right."""
    rights = [0, 1, 2, 3, 7, 9]
    of_low, of_any = 0, 0
    for right in rights:
        groups = combinations([1] * right + [0] * (9 - right), 3)
        count = sum(sum(group) == 1 for group in groups)
        of_any += count
        of_low += count * (right < 3)
    assert 0 < of_low < of_any
    assert theory.extreme_share(rights, 9, 3) == pytest.approx(of_low / of_any)
    assert math.isnan(theory.extreme_share([0, 9], 9, 3))


def test_many_stored_responses_are_as_good_as_the_probability() -> None:
    """Drawn without replacement from very many, a group is one of independent responses."""
    found = theory.baselines(3000, 10_000, 8)
    assert found.groups == pytest.approx(found.formula, rel=1e-3)
    assert found.too_high == pytest.approx(theory.probability_too_high(0.3, 8), rel=1e-3)


@pytest.mark.slow
def test_the_table_of_a_run(tmp_path: Path) -> None:
    """One problem with 1 right response of 4, one with all; groups of 2 in S have one right and one wrong each."""
    run = build_run(tmp_path / "run", steps=0, eval_steps=(), metrics=False)
    verdicts = {"hard": ["correct", "wrong", "wrong", "wrong"], "solved": ["correct"] * 4}
    rows = [
        {"problem_id": name, "sample_index": index, "verdict": verdict}
        for name, given in verdicts.items()
        for index, verdict in enumerate(given)
    ]
    (template,) = build_run(tmp_path / "rows", steps=1, eval_steps=(1,), num_problems=1).evals()[0].rows().to_pylist()
    run.write_eval("toy-test", 1, [template | row for row in rows], {})
    command = [sys.executable, str(SCRIPT), "--run", str(run.path)]
    done = subprocess.run([*command, "--size", "2"], capture_output=True, text=True, check=True)
    assert "| 0.25 to 0.5 | 1 | 0.250 | 0.500 | 0.500 | 1.000 |" in done.stdout
    assert "groups of 2 with one right, 100 % are of problems with fewer than 2 right of 4\n" in done.stdout
    assert "groups of 2 with one wrong, 0 % are of problems with fewer than 2 wrong of 4\n" in done.stdout
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "16 or more samples" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.slow
def test_the_script_prints_its_tables_and_writes_the_picture(tmp_path: Path) -> None:
    out = tmp_path / "bias.png"
    command = [sys.executable, str(SCRIPT), "--groups", "500", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert any(line.split() == ["8", "0.64095", "0.78113", "0.78113"] for line in lines)
    assert any(line.split() == ["9", "0.61682*", "0.73829*", "0.78114"] for line in lines)
    assert any(line.split()[:4] == ["0.30", "0.800", "to", "0.843"] and line.endswith("none ") for line in lines)
    with Image.open(out) as picture:
        assert picture.width > picture.height > 1500  # two by two panels, sharp enough for a page
