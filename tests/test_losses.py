"""The loss against its papers: hand-computed numbers and per-token loops written from the equations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.paper_sums import paper_sum
from vlm_rl.advantages import compute_advantages
from vlm_rl.algorithms import ALGORITHMS, resolve_algorithm
from vlm_rl.config import AlgorithmConfig
from vlm_rl.errors import UserError
from vlm_rl.losses import AGGREGATIONS, correction_weights, kept_tokens, kl_estimate, policy_loss, token_weights
from vlm_rl.types import LossInputs

L_MAX = 50


@st.composite
def batches(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Lengths [P, G] (a few zeros), advantages [P, G] (a few zeros), a seed."""
    num_prompts, num_responses = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    shape = (num_prompts, num_responses)
    cells = num_prompts * num_responses
    lengths = np.array(draw(st.lists(st.integers(0, 12), min_size=cells, max_size=cells))).reshape(shape)
    values = st.sampled_from([-1.5, -0.3, 0.0, 0.4, 2.0])
    advantages = np.array(draw(st.lists(values, min_size=cells, max_size=cells))).reshape(shape)
    return lengths, advantages, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("name", list(AGGREGATIONS))
@given(batch=batches())
def test_weights_equal_the_papers_sums(name: str, batch: tuple[np.ndarray, np.ndarray, int]) -> None:
    lengths, advantages, seed = batch
    if lengths.sum() == 0:
        assert not token_weights(name, lengths, advantages, max_tokens=L_MAX).any()
        return
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=int(lengths.sum())))
    stream = iter(values)
    terms = [[[next(stream) for _ in range(n)] for n in row] for row in lengths]
    weights = token_weights(name, lengths, advantages, max_tokens=L_MAX)
    per_token = np.repeat(weights.ravel(), lengths.ravel())
    weighted = float((torch.from_numpy(per_token) * values).sum())
    assert weighted == pytest.approx(
        float(paper_sum(name, terms, advantages, max_tokens=L_MAX)), rel=1e-12, abs=1e-14
    )
    assert not weights[lengths == 0].any()


def inputs(
    lengths: list[int],
    advantages: list[float],
    weights: np.ndarray,
    old: Tensor | None = None,
    beh: Tensor | None = None,
) -> LossInputs:
    return LossInputs(
        old_logp_K=old,
        sampler_logp_K=beh,
        response_K=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        lengths_n=torch.tensor(lengths),
        advantages_n=torch.tensor(advantages, dtype=torch.float64),
        weights_n=torch.from_numpy(weights.ravel()),
    )


def run(
    name: str,
    lengths: list[int],
    advantages: list[float],
    logp: Tensor,
    old: Tensor | None,
    *,
    weights: np.ndarray | None = None,
    **change,
) -> tuple[float, Tensor]:
    """Loss and gradient of one group under a named algorithm, float64."""
    algorithm = ALGORITHMS[name]
    if weights is None:
        weights = token_weights(
            change.pop("aggregation", algorithm.aggregation),
            np.array([lengths]),
            np.array([advantages]),
            max_tokens=L_MAX,
        )
    logp = logp.clone().requires_grad_()
    options = {
        "ratio": algorithm.ratio,
        "surrogate": algorithm.surrogate,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "cap": 2.0,
        **change,
    }
    loss, _ = policy_loss(logp, torch.zeros_like(logp), inputs(lengths, advantages, weights, old), **options)
    (gradient,) = torch.autograd.grad(loss, logp)
    return float(loss.detach()), gradient


TOKEN_CLIP: dict[str, Any] = {"ratio": "token", "surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "cap": 2.0}
LENGTHS, ADVANTAGES = [2, 3, 1, 4], [1.2, -0.4, 0.5, -1.3]
GENERATOR = torch.Generator().manual_seed(0)
LOGP = torch.randn(10, generator=GENERATOR, dtype=torch.float64) * 0.05 - 1
OLD = LOGP - torch.randn(10, generator=GENERATOR, dtype=torch.float64) * 1e-4
ENTROPY = torch.rand(10, generator=GENERATOR, dtype=torch.float64)


def per_response(values: Tensor) -> list[Tensor]:
    return list(values.split(LENGTHS))


def test_token_clip_by_hand() -> None:
    # One token each. w = 1.5, A = 1: clipped at 1.2, gradient 0. w = 1.5, A = -1: not clipped, grad = w.
    # w = .5, A = 1: min takes w A, grad = -w. w = .5, A = -1: clipped at .8, gradient 0.
    logp = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64).log()
    loss, gradient = run("grpo", [1] * 4, [1.0, -1.0, 1.0, -1.0], logp, torch.zeros(4, dtype=torch.float64))
    assert loss == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    torch.testing.assert_close(gradient * 4, torch.tensor([0.0, 1.5, -0.5, 0.0], dtype=torch.float64))


def test_clip_counts_by_hand() -> None:
    logp = torch.tensor([1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64).log()
    advantages = [1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0]  # clipped: two above, three below
    data = inputs([1] * 7, advantages, np.full(7, 0.25), torch.zeros(7, dtype=torch.float64))
    _, sums = policy_loss(logp, torch.zeros_like(logp), data, **TOKEN_CLIP)
    assert (int(sums["tokens"]), int(sums["clipped_low"]), int(sums["clipped_high"])) == (7, 3, 2)


def test_cispo_by_hand() -> None:
    # w = 2 is capped at 1.28 but keeps its gradient -1.28 A; w = .1 has no lower bound.
    logp = torch.tensor([2.0, 0.1], dtype=torch.float64).log()
    loss, gradient = run("cispo", [1, 1], [1.0, 1.0], logp, torch.zeros(2, dtype=torch.float64))
    assert loss == pytest.approx(-(1.28 * np.log(2) + 0.1 * np.log(0.1)) / 2)
    torch.testing.assert_close(gradient, torch.tensor([-0.64, -0.05], dtype=torch.float64))


def test_sapo_by_hand() -> None:
    # w = 1: l = -A (4 / t) / 2. w = 2, A = 1: -4 sigmoid(1) = -2.924234, gradient -4 * 2 * sigmoid(1) sigmoid(-1).
    logp = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64).log()
    loss, gradient = run("sapo", [1] * 3, [1.0, -1.0, 1.0], logp, torch.zeros(3, dtype=torch.float64))
    assert loss == pytest.approx((-2 + 2 / 1.05 - 2.924234) / 3, abs=1e-6)
    wanted = torch.tensor([-1.0, 1.0, -1.572896], dtype=torch.float64)
    torch.testing.assert_close(gradient * 3, wanted, atol=1e-5, rtol=0)


def test_the_dual_clip_by_hand() -> None:
    # A = -1: w = 5 is held at 3 and stops, w = 2 is not. A = 1: w = 5 is clipped at 1.2 as ever.
    logp = torch.tensor([5.0, 2.0, 5.0], dtype=torch.float64).log()
    old = torch.zeros(3, dtype=torch.float64)
    loss, gradient = run("grpo", [1] * 3, [-1.0, -1.0, 1.0], logp, old, clip_dual=3.0)
    assert loss == pytest.approx((3 + 2 - 1.2) / 3)
    torch.testing.assert_close(gradient * 3, torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))
    data = inputs([1] * 3, [-1.0, -1.0, 1.0], np.full(3, 1 / 3), old)
    _, sums = policy_loss(logp, torch.zeros_like(logp), data, **TOKEN_CLIP, clip_dual=3.0)
    assert int(sums["clipped_dual"]) == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"name": "cispo", "clip_dual": 3.0}, "surrogate is cispo"),
        ({"name": "dapo", "clip_dual": 1.28}, "above 1 . clip_high = 1.28"),
        ({"name": "gspo", "clip_dual": 1.0}, "above 1 . clip_high"),
    ],
)
def test_a_cap_that_a_rule_cannot_have_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        resolve_algorithm(AlgorithmConfig(**config))


def test_variance_weights_by_hand() -> None:
    # lengths 1, 4, 9 with a = 1/2: 1, 1/2, 1/3 over their sum 11/6, over L_max 50
    lengths = np.array([[1, 4, 9]])
    weights = token_weights("variance", lengths, np.ones((1, 3)), max_tokens=50, exponent=0.5)
    np.testing.assert_allclose(weights, np.array([[6, 3, 2]]) / 11 / 50, rtol=1e-12)


def test_sequence_ratio_has_value_and_gradient_of_the_papers_form() -> None:
    def papers(logp: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for now, old, advantage in zip(per_response(logp), per_response(OLD), ADVANTAGES, strict=True):
            ratio = torch.exp((now - old).mean())
            total = total - torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
        return total / len(LENGTHS)

    logp = LOGP.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(papers(logp), logp)
    loss, gradient = run("gspo", LENGTHS, ADVANTAGES, LOGP, OLD)
    assert loss == pytest.approx(float(papers(LOGP)), rel=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)


def test_luspo_gradient_is_that_of_gspo_times_length() -> None:
    # algorithms.md: unclipped, grad = (1/N) sum_i s_i A_i sum_t grad lp_it, and GSPO's is that / |y_i|
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    _, luspo = run("luspo", LENGTHS, ADVANTAGES, LOGP, OLD, **wide)
    _, gspo = run("gspo", LENGTHS, ADVANTAGES, LOGP, OLD, **wide)
    for part, other, now, old, advantage in zip(
        per_response(luspo), per_response(gspo), per_response(LOGP), per_response(OLD), ADVANTAGES, strict=True
    ):
        ratio = float(torch.exp((now - old).mean()))
        torch.testing.assert_close(part, torch.full_like(part, -ratio * advantage / 4), rtol=1e-10, atol=0)
        torch.testing.assert_close(other, part / len(part), rtol=1e-10, atol=0)


def test_luspo_on_policy_is_the_token_mean_times_tokens_per_response() -> None:
    _, luspo = run("luspo", LENGTHS, ADVANTAGES, LOGP, LOGP)
    _, token = run("grpo", LENGTHS, ADVANTAGES, LOGP, LOGP, aggregation="token")
    torch.testing.assert_close(luspo, token * (10 / 4), rtol=1e-12, atol=0)


def test_a_clipped_sequence_has_no_gradient_on_any_token() -> None:
    old = LOGP.clone()
    old[:2] -= 0.01  # response 0, A > 0: ratio exp(.01), far above 1 + 4e-4
    old[2:5] += 0.01  # response 1, A < 0: ratio far below 1 - 3e-4
    _, gradient = run("gspo", LENGTHS, ADVANTAGES, LOGP, old)
    assert not gradient[:5].any()
    assert gradient[5:].all()


def coefficient_mass(name: str, positive: list[int], negative: list[int], ddof: int) -> tuple[float, float]:
    lengths = np.array([positive + negative])
    rewards = np.array([[1.0] * len(positive) + [0.0] * len(negative)])
    advantages = (rewards - rewards.mean()) / rewards.std(ddof=ddof)
    mass = token_weights(name, lengths, advantages, max_tokens=L_MAX) * lengths * advantages
    return float(mass[advantages > 0].sum()), float(mass[advantages < 0].sum())


@pytest.mark.parametrize(
    ("name", "ddof", "positive", "negative"),
    [
        # p = 3/8: sqrt(p (1 - p)) = .484123; for `token` positive / |negative| = 200 / 610 = .327869
        ("sequence", 0, 0.484123, -0.484123),
        ("balanced", 0, 0.484123, -0.484123),
        ("token", 0, 0.212218, -0.647266),
        ("group_token", 0, 0.212218, -0.647266),
        ("sequence", 1, 0.452855, -0.452855),
        ("balanced", 1, 0.452855, -0.452855),
        ("token", 1, 0.198512, -0.605460),
    ],
)
def test_coefficient_mass_vectors(name: str, ddof: int, positive: float, negative: float) -> None:
    coefficients = coefficient_mass(name, [100, 300, 200], [500, 700, 400, 650, 800], ddof)
    assert coefficients == pytest.approx((positive, negative), abs=2e-6)


def test_balanced_does_not_care_how_long_the_negatives_are() -> None:
    short = coefficient_mass("balanced", [10, 30], [20, 50], 1)
    assert coefficient_mass("balanced", [10, 30], [200, 500], 1) == pytest.approx(short)
    token = coefficient_mass("token", [10, 30], [20, 50], 1)
    assert coefficient_mass("token", [10, 30], [200, 500], 1) != pytest.approx(token)


def test_where_aggregations_agree() -> None:
    advantages = np.array([[1.0, 1.0, -1.0, -1.0]])

    def weights(name: str, lengths: list[int]) -> np.ndarray:
        return token_weights(name, np.array([lengths]), advantages, max_tokens=L_MAX)

    # lengths equal inside each sign subset: balanced == sequence
    np.testing.assert_allclose(weights("balanced", [3, 3, 9, 9]), weights("sequence", [3, 3, 9, 9]))
    # equal means of both subsets: balanced == token
    np.testing.assert_allclose(weights("balanced", [2, 4, 1, 5]), weights("token", [2, 4, 1, 5]))
    assert not np.allclose(weights("balanced", [2, 4, 1, 7]), weights("token", [2, 4, 1, 7]))


def test_a_token_mean_of_each_group_and_one_of_all() -> None:
    lengths, advantages = np.array([[1, 3], [6, 10]]), np.array([[1.0, -1.0], [1.0, -1.0]])
    of_groups = token_weights("group_token", lengths, advantages, max_tokens=L_MAX)
    np.testing.assert_allclose(of_groups, [[1 / 8, 1 / 8], [1 / 32, 1 / 32]])  # 2 groups of 4 and 16 tokens
    of_all = token_weights("token", lengths, advantages, max_tokens=L_MAX)
    np.testing.assert_allclose(of_all, np.full((2, 2), 1 / 20))
    # equal means of both signs in every group: balanced == group_token, though the groups' lengths differ
    even = np.array([[2, 2], [8, 8]])
    np.testing.assert_allclose(
        token_weights("balanced", even, advantages, max_tokens=L_MAX),
        token_weights("group_token", even, advantages, max_tokens=L_MAX),
    )


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_degenerate_groups_are_exactly_zero(name: str) -> None:
    advantages = compute_advantages(ALGORITHMS[name].advantage, np.full((1, 4), 1.35))[0].tolist()
    loss, gradient = run(name, LENGTHS, advantages, LOGP, OLD)
    assert loss == 0.0
    assert not gradient.any() and not torch.isnan(gradient).any()


@pytest.mark.parametrize("name", list(ALGORITHMS))
@settings(max_examples=20)
@given(order=st.permutations(range(4)))
def test_order_of_responses_does_not_matter(name: str, order: list[int]) -> None:
    def pick(values: Tensor) -> Tensor:
        parts = per_response(values)
        return torch.cat([parts[i] for i in order])

    loss, gradient = run(name, LENGTHS, ADVANTAGES, LOGP, OLD)
    shuffled = run(name, [LENGTHS[i] for i in order], [ADVANTAGES[i] for i in order], pick(LOGP), pick(OLD))
    assert shuffled[0] == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(shuffled[1], pick(gradient), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_split_into_micro_batches_adds_up(name: str) -> None:
    algorithm = ALGORITHMS[name]
    weights = token_weights(algorithm.aggregation, np.array([LENGTHS]), np.array([ADVANTAGES]), max_tokens=L_MAX)
    whole, gradient = run(name, LENGTHS, ADVANTAGES, LOGP, OLD)
    first = run(name, LENGTHS[:2], ADVANTAGES[:2], LOGP[:5], OLD[:5], weights=weights[:, :2])
    second = run(name, LENGTHS[2:], ADVANTAGES[2:], LOGP[5:], OLD[5:], weights=weights[:, 2:])
    assert first[0] + second[0] == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(torch.cat([first[1], second[1]]), gradient, rtol=1e-12, atol=0)


def test_correction_by_hand() -> None:
    # token: exp(gap) capped at 2; sequence: exp(mean gap of the response)
    old = torch.log(torch.tensor([1.5, 6.0, 0.5, 2.0], dtype=torch.float64))
    beh = torch.zeros(4, dtype=torch.float64)
    response, lengths = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])

    def weights(ratio: str) -> list[float]:
        return correction_weights(old, beh, response, lengths, ratio=ratio, cap=2.0).tolist()

    assert weights("token") == pytest.approx([1.5, 2.0, 0.5, 2.0])
    assert weights("sequence") == pytest.approx([2.0, 2.0, 1.0, 1.0])  # sqrt(9) capped; sqrt(1)


def test_the_correction_scales_terms_and_carries_no_gradient() -> None:
    logp = LOGP.clone().requires_grad_()
    weights = np.full(4, 0.1)
    data = inputs(LENGTHS, ADVANTAGES, weights, OLD, OLD - 0.25)
    loss, sums = policy_loss(logp, ENTROPY, data, **TOKEN_CLIP)
    plain, _ = policy_loss(logp, ENTROPY, inputs(LENGTHS, ADVANTAGES, weights, OLD), **TOKEN_CLIP)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()) * np.exp(0.25), rel=1e-12)
    assert float(sums["gap"]) == pytest.approx(10 * 0.25)
    (a,) = torch.autograd.grad(loss, logp)
    (b,) = torch.autograd.grad(plain, logp)
    torch.testing.assert_close(a, b * float(np.exp(0.25)), rtol=1e-10, atol=0)


def test_rejection_by_hand() -> None:
    # ratios of two responses: 2, 4 (product 8, geometric mean 2.83) and .5, 1 (product .5, geometric mean .71)
    old = torch.log(torch.tensor([2.0, 4.0, 0.5, 1.0], dtype=torch.float64))
    beh, response, lengths = torch.zeros(4, dtype=torch.float64), torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2])

    def kept(level: str, low: float = 0.0) -> list[bool]:
        return kept_tokens(old, beh, response, lengths, level=level, bounds=(low, 3.0)).tolist()

    assert kept("token") == [True, False, True, True]
    assert kept("sequence") == [False, False, True, True]
    assert kept("geometric") == [True, True, True, True]
    assert kept("token", 0.6) == [True, False, False, True]
    assert kept("sequence", 0.6) == [False, False, False, False]
    assert kept("geometric", 0.8) == [True, True, False, False]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_what_is_rejected_has_no_gradient_and_the_rest_keeps_its_own(level: str) -> None:
    """Denominators stay, so the loss of a split adds up; KL counts all tokens."""
    logp = LOGP.clone().requires_grad_()
    sampler = OLD - torch.linspace(-0.6, 0.9, 10, dtype=torch.float64)
    weights = np.full(4, 0.1)
    data = replace(
        inputs(LENGTHS, ADVANTAGES, weights, OLD, sampler),
        reference_logp_K=LOGP + 0.1,
        mean_weight=0.1,
    )
    options = {**TOKEN_CLIP, "kl_coef": 0.3}
    loss, sums = policy_loss(logp, ENTROPY, data, **options, rejection=level, rejection_bounds=(0.7, 1.5))
    plain, _ = policy_loss(logp, ENTROPY, data, **options)
    only_kl = policy_loss(logp, ENTROPY, replace(data, weights_n=data.weights_n * 0), **options)[0]
    kept = []
    for gap in per_response(OLD - sampler):
        ratio = {"token": gap.exp(), "sequence": gap.sum().exp(), "geometric": gap.mean().exp()}[level]
        kept.append(((ratio >= 0.7) & (ratio <= 1.5)).expand(len(gap)))
    kept_K = torch.cat(kept)
    assert 0 < kept_K.sum() < 10 and int(sums["rejected"]) == 10 - int(kept_K.sum())
    own, of_all, of_kl = (torch.autograd.grad(value, logp)[0] for value in (loss, plain, only_kl))
    torch.testing.assert_close(own - of_kl, torch.where(kept_K, of_all - of_kl, 0.0), rtol=1e-10, atol=1e-15)


def test_kl_estimate_by_hand() -> None:
    # lp = ln .5, lp_ref = ln .25: k3 = .5 + ln 2 - 1 = .193147, and its gradient 1 - .5
    logp = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    value = kl_estimate(logp, torch.tensor([0.25], dtype=torch.float64).log())
    assert float(value.detach()) == pytest.approx(0.5 + np.log(2) - 1)
    (gradient,) = torch.autograd.grad(value, logp)
    assert float(gradient) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=2, max_size=6))
def test_kl_estimate_is_unbiased(weights: list[tuple[float, float]]) -> None:
    """Its mean over the policy's own tokens is sum p log(p / q), the divergence itself."""
    p, q = (column / column.sum() for column in torch.tensor(weights, dtype=torch.float64).T)
    estimate = kl_estimate(p.log(), q.log())
    assert (estimate >= -1e-15).all()
    assert float((p * estimate).sum()) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-12)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_kl_and_entropy_are_token_means_under_every_rule(name: str) -> None:
    """loss + .3 (1/10) sum k3 - .2 (1/10) sum H, also where a response has A = 0 or a longer one weighs more."""
    algorithm, advantages = ALGORITHMS[name], [1.2, 0.0, 0.5, -1.3]
    weights = token_weights(algorithm.aggregation, np.array([LENGTHS]), np.array([advantages]), max_tokens=L_MAX)
    factors = {key: getattr(algorithm, key) for key in ("ratio", "surrogate", "clip_low", "clip_high")}
    plain = inputs(LENGTHS, advantages, weights, OLD)
    reference = LOGP + 0.1
    full = replace(plain, reference_logp_K=reference, mean_weight=torch.tensor(1 / 10, dtype=torch.float64))
    logp, entropy = LOGP.clone().requires_grad_(), ENTROPY.clone().requires_grad_()
    base, _ = policy_loss(logp, entropy, plain, **factors, cap=2.0)
    loss, sums = policy_loss(logp, entropy, full, **factors, cap=2.0, kl_coef=0.3, entropy_coef=0.2)
    k3 = np.exp(0.1) - 0.1 - 1  # of every token
    expected = float(base.detach()) + 0.3 * k3 - 0.2 * float(ENTROPY.mean())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(sums["kl"]) == pytest.approx(10 * k3)
    assert float(sums["policy_loss"]) == pytest.approx(float(base.detach()))
    (by_logp, by_entropy) = torch.autograd.grad(loss, (logp, entropy))
    (alone,) = torch.autograd.grad(base, logp)
    torch.testing.assert_close(by_logp, alone + 0.3 / 10 * (1 - np.exp(0.1)), rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(by_entropy, torch.full_like(ENTROPY, -0.02))


def test_on_policy_log_probs_may_be_left_out() -> None:
    for name in ALGORITHMS:
        given_loss, given_gradient = run(name, LENGTHS, ADVANTAGES, LOGP, LOGP)
        own_loss, own_gradient = run(name, LENGTHS, ADVANTAGES, LOGP, None)
        assert own_loss == given_loss
        torch.testing.assert_close(own_gradient, given_gradient, rtol=0, atol=0)


PUBLISHED = {
    "grpo": ("group_norm", "token", "clip", 0.2, 0.2, "sequence"),
    "dr_grpo": ("group_center", "token", "clip", 0.2, 0.2, "constant"),
    "dapo": ("group_norm", "token", "clip", 0.2, 0.28, "token"),
    "gspo": ("group_norm", "sequence", "clip", 3e-4, 4e-4, "sequence"),
    "luspo": ("group_norm", "sequence", "clip", 2e-3, 2.5e-3, "length_weighted"),
    "ba": ("group_norm", "token", "clip", 0.2, 0.28, "balanced"),
    "rloo": ("leave_one_out", "token", "clip", 0.2, 0.2, "token"),
    "cispo": ("group_norm", "token", "cispo", 1.0, 0.28, "token"),
    "sapo": ("group_norm", "token", "sapo", 0.2, 0.2, "sequence"),
    "vl_norm": ("group_norm", "token", "clip", 0.2, 0.2, "variance"),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_row_is_as_published(name: str) -> None:
    """A row that is not listed here is one that a reader of CONTRIBUTING.md has added."""
    a = ALGORITHMS[name]
    assert (a.advantage, a.ratio, a.surrogate, a.clip_low, a.clip_high, a.aggregation) == PUBLISHED[name]
    assert a.dynamic_sampling == (name == "dapo")
