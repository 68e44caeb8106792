"""What must hold of every mini-batch, whatever its lengths, groups and advantages. Float64 throughout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, note, settings
from hypothesis import strategies as st

from vlm_rl.advantages import compute_advantages
from vlm_rl.algorithms import ALGORITHMS
from vlm_rl.hadw import Belief, difficulty_weights
from vlm_rl.losses import AGGREGATIONS, divergence, kl_estimate, policy_loss, token_weights
from vlm_rl.types import LossInputs

L_MAX = 16
ADVANTAGE_VALUES = (-1.5, -0.3, 0.0, 0.4, 2.0)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A mini-batch: lengths and advantages [P, G], and log-probs [P][G][|y_i|]."""

    lengths: np.ndarray
    advantages: np.ndarray
    logp: list[list[np.ndarray]]
    old: list[list[np.ndarray]]


def make_batch(lengths: np.ndarray, advantages: np.ndarray, *, seed: int, spread: float = 0.3) -> TokenBatch:
    """Random log-probs; ``spread`` is the standard deviation of lp - lp_old, 0 for on-policy."""
    rng = np.random.default_rng(seed)
    logp = [[rng.normal(-1.5, 0.5, n) for n in row] for row in lengths]
    old = [[values - rng.normal(0, spread, len(values)) for values in row] for row in logp]
    return TokenBatch(lengths, advantages, logp, old)


@st.composite
def batches(
    draw: st.DrawFn, *, spread: float = 0.3, shortest: int = 0, groups: int = 3, values: tuple = ADVANTAGE_VALUES
) -> TokenBatch:
    shape = (draw(st.integers(1, groups)), draw(st.integers(1, 5)))
    cells = shape[0] * shape[1]
    lengths = draw(st.lists(st.integers(shortest, 9), min_size=cells, max_size=cells))
    advantages = draw(st.lists(st.sampled_from(values), min_size=cells, max_size=cells))
    seed = draw(st.integers(0, 2**31))
    return make_batch(np.array(lengths).reshape(shape), np.array(advantages).reshape(shape), seed=seed, spread=spread)


def factors(name: str, **change: Any) -> dict[str, Any]:
    row = ALGORITHMS[name]
    return {key: getattr(row, key) for key in ("ratio", "surrogate", "clip_low", "clip_high")} | {"cap": 2.0} | change


def weights_of(name: str, batch: TokenBatch, aggregation: str | None = None) -> np.ndarray:
    aggregation = aggregation or ALGORITHMS[name].aggregation
    return token_weights(aggregation, batch.lengths, batch.advantages, max_tokens=L_MAX)


def run(
    name: str, batch: TokenBatch, *, weights: np.ndarray | None = None, aggregation: str | None = None, **change: Any
) -> tuple[float, list[list[np.ndarray]]]:
    """The loss, and its gradient by every log-prob, laid out as the batch is."""
    weights = weights_of(name, batch, aggregation) if weights is None else weights
    flat = [values for row in batch.logp for values in row]
    logp = torch.from_numpy(np.concatenate(flat)).requires_grad_()
    loss, _ = policy_loss(logp, torch.zeros_like(logp), inputs(batch, weights), **factors(name, **change))
    (gradient,) = torch.autograd.grad(loss, logp)
    parts = iter(np.split(gradient.numpy(), np.cumsum(batch.lengths.ravel())[:-1]))
    return float(loss.detach()), [[next(parts) for _ in row] for row in batch.logp]


def inputs(batch: TokenBatch, weights: np.ndarray) -> LossInputs:
    lengths = torch.from_numpy(batch.lengths.ravel())
    return LossInputs(
        old_logp_K=torch.from_numpy(np.concatenate([values for row in batch.old for values in row])),
        sampler_logp_K=None,
        response_K=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        lengths_n=lengths,
        advantages_n=torch.from_numpy(batch.advantages.ravel()),
        weights_n=torch.from_numpy(weights.ravel()),
    )


def rearranged(batch: TokenBatch, order: list[list[tuple[int, int]]]) -> TokenBatch:
    """The batch whose response (p, g) is the old one's order[p][g]."""

    def cells(values: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        return [[values[p][g] for p, g in row] for row in order]

    def grid(values: np.ndarray) -> np.ndarray:
        return np.array([[values[p, g] for p, g in row] for row in order])

    return TokenBatch(grid(batch.lengths), grid(batch.advantages), cells(batch.logp), cells(batch.old))


def repeated(batch: TokenBatch, times: int, *, only: np.ndarray | None = None) -> TokenBatch:
    """Every token term, or those of the responses chosen, ``times`` times over."""
    chosen = np.ones(batch.lengths.shape, dtype=bool) if only is None else only

    def cells(values: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
        return [[np.repeat(v, times if chosen[p, g] else 1) for g, v in enumerate(r)] for p, r in enumerate(values)]

    lengths = np.where(chosen, batch.lengths * times, batch.lengths)
    return TokenBatch(lengths, batch.advantages, cells(batch.logp), cells(batch.old))


def every_rule() -> Iterator[str]:
    """Yield the names of all rules, and let hypothesis say at which of them an example failed."""
    for name in ALGORITHMS:
        note(f"rule {name}")
        yield name


def close(computed: list[list[np.ndarray]], wanted: list[list[np.ndarray]]) -> None:
    for computed_row, wanted_row in zip(computed, wanted, strict=True):
        for a, b in zip(computed_row, wanted_row, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-14)


# --- order, split, padding, replication -------------------------------------------------------------


@settings(max_examples=30)
@given(batch=batches(), seed=st.integers(0, 2**31))
def test_neither_the_order_of_groups_nor_of_responses_matters(batch: TokenBatch, seed: int) -> None:
    rng, (groups, responses) = np.random.default_rng(seed), batch.lengths.shape
    order = [[(int(p), int(g)) for g in rng.permutation(responses)] for p in rng.permutation(groups)]
    for name in every_rule():
        loss, gradient = run(name, batch)
        computed_loss, computed = run(name, rearranged(batch, order))
        assert computed_loss == pytest.approx(loss, rel=1e-10, abs=1e-14)
        close(computed, [[gradient[p][g] for p, g in row] for row in order])


@settings(max_examples=30)
@given(batch=batches(), num_parts=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_any_split_of_the_responses_adds_up(batch: TokenBatch, num_parts: int, seed: int) -> None:
    """Micro-batches of any responses, also ones that tear a group apart: weights belong to the whole."""
    part = np.random.default_rng(seed).integers(0, num_parts, batch.lengths.shape)
    for name in every_rule():
        weights = weights_of(name, batch)
        loss, gradient = run(name, batch)
        total = 0.0
        for index in range(num_parts):
            chosen = [[(int(p), int(g)) for p, g in np.argwhere(part == index)]]
            if chosen[0]:
                own_weights = np.array([[weights[p, g] for p, g in chosen[0]]])
                own_loss, own = run(name, rearranged(batch, chosen), weights=own_weights)
                total += own_loss
                close(own, [[gradient[p][g] for p, g in chosen[0]]])
        assert total == pytest.approx(loss, rel=1e-10, abs=1e-14)


@settings(max_examples=30)
@given(batch=batches(), padding=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_padding_never_matters(batch: TokenBatch, padding: list[int], seed: int) -> None:
    """Responses of weight 0, as rows that only fill up a rank have, of any length and advantage."""
    rng, n = np.random.default_rng(seed), batch.lengths.size
    row = make_batch(np.array([padding]), rng.normal(size=(1, len(padding))), seed=seed)
    padded = TokenBatch(
        np.concatenate([batch.lengths.reshape(1, -1), row.lengths], axis=1),
        np.concatenate([batch.advantages.reshape(1, -1), row.advantages], axis=1),
        [[*(v for r in batch.logp for v in r), *row.logp[0]]],
        [[*(v for r in batch.old for v in r), *row.old[0]]],
    )
    for name in every_rule():
        loss, gradient = run(name, batch)
        weights = np.concatenate([weights_of(name, batch).reshape(1, -1), np.zeros_like(row.advantages)], axis=1)
        computed_loss, (computed,) = run(name, padded, weights=weights)
        assert computed_loss == pytest.approx(loss, rel=1e-10, abs=1e-14)
        close([computed[:n]], [[v for r in gradient for v in r]])
        assert not any(values.any() for values in computed[n:])


@settings(max_examples=30)
@given(batch=batches(), times=st.integers(2, 4))
def test_a_mini_batch_written_down_several_times_has_the_same_loss(batch: TokenBatch, times: int) -> None:
    """Every rule is a mean over groups or tokens, so the copies share the gradient."""
    groups, responses = batch.lengths.shape
    order = [[(p, g) for g in range(responses)] for _ in range(times) for p in range(groups)]
    for name in every_rule():
        loss, gradient = run(name, batch)
        computed_loss, computed = run(name, rearranged(batch, order))
        assert computed_loss == pytest.approx(loss, rel=1e-10, abs=1e-14)
        close(computed, [[values / times for values in row] for row in gradient * times])


@pytest.mark.parametrize(
    ("aggregation", "grows"),
    [
        ("sequence", False),
        ("token", False),
        ("group_token", False),
        ("balanced", False),
        ("length_weighted", True),
        ("constant", True),
        ("variance", True),
    ],
)
@settings(max_examples=30)
@given(batch=batches(), times=st.integers(2, 4))
def test_how_the_loss_scales_with_length(aggregation: str, grows: bool, batch: TokenBatch, times: int) -> None:
    # every response `times` as long: means do not notice, sums over 1/N and 1/(N L_max) grow by that factor
    loss, _ = run("grpo", batch, aggregation=aggregation)
    computed, _ = run("grpo", repeated(batch, times), aggregation=aggregation)
    assert computed == pytest.approx(loss * (times if grows else 1), rel=1e-10, abs=1e-13)


# --- facts 1 and 2: LUSPO ---------------------------------------------------------------------------


@settings(max_examples=60)
@given(batch=batches(spread=1e-4))
def test_luspo_unclipped_is_gspo_times_length(batch: TokenBatch) -> None:
    """grad = (1/N) sum_i s_i A_i sum_t grad lp_it (of the loss: its negative); GSPO's is that over |y_i|."""
    wide: dict[str, Any] = {"clip_low": 0.9, "clip_high": 9.0}
    _, luspo = run("luspo", batch, **wide)
    _, gspo = run("gspo", batch, **wide)
    for p, g in np.ndindex(batch.lengths.shape):
        length = batch.lengths[p, g]
        if length:
            ratio = np.exp(np.mean(batch.logp[p][g] - batch.old[p][g]))
            wanted = -ratio * batch.advantages[p, g] / batch.lengths.size
            np.testing.assert_allclose(luspo[p][g], np.full(length, wanted), rtol=1e-9, atol=1e-14)
            np.testing.assert_allclose(gspo[p][g], luspo[p][g] / length, rtol=1e-9, atol=1e-14)


@settings(max_examples=60)
@given(batch=batches(spread=0.0))
def test_luspo_on_policy_is_the_token_mean_times_the_mean_length(batch: TokenBatch) -> None:
    _, luspo = run("luspo", batch)
    _, token = run("luspo", batch, aggregation="token")
    _, of_tokens = run("grpo", batch, aggregation="token")
    factor = batch.lengths.sum() / batch.lengths.size
    close(luspo, [[values * factor for values in row] for row in token])
    close(luspo, [[values * factor for values in row] for row in of_tokens])


# --- fact 3: clipping -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gspo", "luspo"])
@settings(max_examples=60)
@given(batch=batches(spread=3e-3, shortest=1))
def test_a_clipped_sequence_has_no_gradient_on_any_token(name: str, batch: TokenBatch) -> None:
    row = ALGORITHMS[name]
    _, gradient = run(name, batch)
    for p, g in np.ndindex(batch.lengths.shape):
        ratio, advantage = np.exp(np.mean(batch.logp[p][g] - batch.old[p][g])), batch.advantages[p, g]
        is_clipped = (advantage > 0 and ratio > 1 + row.clip_high) or (advantage < 0 and ratio < 1 - row.clip_low)
        if is_clipped or advantage == 0:
            assert not gradient[p][g].any()
        else:
            assert gradient[p][g].all()


@pytest.mark.parametrize("name", ["grpo", "dapo", "ba"])
@settings(max_examples=60)
@given(batch=batches(shortest=1))
def test_token_clipping_stops_single_tokens(name: str, batch: TokenBatch) -> None:
    row = ALGORITHMS[name]
    _, gradient = run(name, batch)
    for p, g in np.ndindex(batch.lengths.shape):
        ratio, advantage = np.exp(batch.logp[p][g] - batch.old[p][g]), batch.advantages[p, g]
        is_clipped = ratio > 1 + row.clip_high if advantage > 0 else ratio < 1 - row.clip_low
        np.testing.assert_array_equal(gradient[p][g] == 0, is_clipped | (advantage == 0))


@settings(max_examples=60)
@given(batch=batches(shortest=1))
def test_cispo_stops_no_token_but_bounds_all(batch: TokenBatch) -> None:
    _, gradient = run("cispo", batch)
    weight = 1 / batch.lengths.sum()
    for p, g in np.ndindex(batch.lengths.shape):
        bounded = np.minimum(np.exp(batch.logp[p][g] - batch.old[p][g]), 1.28)
        np.testing.assert_allclose(gradient[p][g], -weight * batch.advantages[p, g] * bounded, rtol=1e-9)


@settings(max_examples=60)
@given(batch=batches(shortest=1, spread=0.3))
def test_sapo_fades_and_is_never_cut_off(batch: TokenBatch) -> None:
    """dl/dlp = -w A sech^2(t (w - 1) / 2): at most the unclipped gradient, and equal to it at w = 1."""
    _, gradient = run("sapo", batch)
    _, on_policy = run("sapo", replace(batch, old=batch.logp))
    weights = weights_of("sapo", batch)
    for p, g in np.ndindex(batch.lengths.shape):
        advantage = batch.advantages[p, g]
        t = 1.0 if advantage > 0 else 1.05
        ratio = np.exp(batch.logp[p][g] - batch.old[p][g])
        wanted = -weights[p, g] * advantage * ratio / np.cosh(t * (ratio - 1) / 2) ** 2
        np.testing.assert_allclose(gradient[p][g], wanted, rtol=1e-9, atol=1e-14)
        assert (gradient[p][g] != 0).all() == (advantage != 0)
        np.testing.assert_allclose(on_policy[p][g], -weights[p, g] * advantage, rtol=1e-9, atol=1e-14)


@settings(max_examples=60)
@given(batch=batches(shortest=1, spread=2.0), cap=st.floats(1.3, 4))
def test_the_dual_clip_bounds_terms_of_negative_advantages(batch: TokenBatch, cap: float) -> None:
    """l = -A min(w, cap), from below clipped at .8, where A < 0; nothing changes elsewhere."""
    loss, gradient = run("grpo", batch, clip_dual=cap)
    _, plain = run("grpo", batch)
    weights, total = weights_of("grpo", batch), 0.0
    for p, g in np.ndindex(batch.lengths.shape):
        advantage, ratio = batch.advantages[p, g], np.exp(batch.logp[p][g] - batch.old[p][g])
        bounds = (0.8, cap) if advantage < 0 else (0.0, 1.2)
        total -= weights[p, g] * advantage * np.clip(ratio, *bounds).sum()
        is_capped = (advantage < 0) & (ratio > cap)
        np.testing.assert_array_equal(gradient[p][g], np.where(is_capped, 0.0, plain[p][g]))
    assert loss == pytest.approx(total, rel=1e-10, abs=1e-13)


# --- facts 4, 5 and 6: what length does -------------------------------------------------------------


@st.composite
def binary_groups(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and rewards [1, G] of a group that is neither all right nor all wrong."""
    size = draw(st.integers(2, 9))
    correct = draw(st.integers(1, size - 1))
    lengths = np.array([draw(st.lists(st.integers(1, 900), min_size=size, max_size=size))])
    return lengths, np.array([[1.0] * correct + [0.0] * (size - correct)])


@pytest.mark.parametrize("ddof", [0, 1])
@given(group=binary_groups())
@example(group=(np.array([[100, 300, 200, 500, 700, 400, 650, 800]]), np.array([[1.0] * 3 + [0.0] * 5])))
def test_coefficient_mass_by_sign(group: tuple[np.ndarray, np.ndarray], ddof: int) -> None:
    """Positive mass k/G (1 - p) / (std + 1e-6) and minus that: sqrt(p (1 - p)) for ddof 0 without the 1e-6."""
    lengths, rewards = group
    advantages = compute_advantages("group_norm", rewards, ddof=ddof)
    p, size = rewards.mean(), rewards.size
    std = np.sqrt(p * (1 - p) * size / (size - ddof))

    def mass(name: str) -> tuple[float, float]:
        terms = token_weights(name, lengths, advantages, max_tokens=1000) * lengths * advantages
        return float(terms[advantages > 0].sum()), float(terms[advantages < 0].sum())

    for name in ("sequence", "balanced"):
        assert mass(name) == pytest.approx((p * (1 - p) / (std + 1e-6), -p * (1 - p) / (std + 1e-6)), rel=1e-9)
    for name in ("token", "length_weighted", "constant"):  # one weight for all tokens: length decides
        positive, negative = mass(name)
        assert positive / -negative == pytest.approx(lengths[rewards == 1].mean() / lengths[rewards == 0].mean())


@st.composite
def one_group(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and advantages [1, G] without zeros; lengths often equal inside a sign subset."""
    size = draw(st.integers(2, 6))
    signs = np.array(draw(st.lists(st.sampled_from([-1.0, 1.0]), min_size=size, max_size=size)))
    lengths = draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
    if draw(st.booleans()):
        pair = {-1.0: draw(st.integers(1, 4)), 1.0: draw(st.integers(1, 4))}
        lengths = [pair[sign] for sign in signs]
    return np.array([lengths]), np.array([signs]) * draw(st.sampled_from([0.3, 1.0, 2.5]))


@settings(max_examples=300)
@given(group=one_group())
@example(group=(np.array([[3, 3, 2, 2]]), np.array([[1.0, 1.0, -1.0, -1.0]])))
@example(group=(np.array([[2, 4, 1, 5]]), np.array([[1.0, 1.0, -1.0, -1.0]])))
@example(group=(np.array([[2, 2, 2, 2]]), np.array([[1.0, 1.0, -1.0, -1.0]])))
@example(group=(np.array([[2, 4, 3, 3]]), np.array([[1.0, 1.0, -1.0, -1.0]])))
def test_when_two_rules_are_the_same_rule(group: tuple[np.ndarray, np.ndarray]) -> None:
    lengths, advantages = group

    def equal(a: str, b: str) -> bool:
        first, second = (token_weights(name, lengths, advantages, max_tokens=L_MAX) for name in (a, b))
        return np.allclose(first, second, rtol=1e-9, atol=0)

    subsets = [lengths[advantages > 0], lengths[advantages < 0]]
    filled = [subset for subset in subsets if subset.size]
    assert equal("balanced", "sequence") == all(np.ptp(subset) == 0 for subset in filled)
    # means compared as fractions: sum/size == sum/size
    same_mean = len(filled) == 1 or filled[0].sum() * filled[1].size == filled[1].sum() * filled[0].size
    assert equal("balanced", "token") == same_mean
    assert equal("sequence", "token") == (np.ptp(lengths) == 0)
    assert equal("group_token", "token"), "of one group"


@settings(max_examples=60)
@given(batch=batches(shortest=1), exponent=st.floats(0, 1))
def test_one_exponent_spans_dr_grpo_to_grpo(batch: TokenBatch, exponent: float) -> None:
    """a = 0 is `constant`, a = 1 is `sequence` up to one factor, and between them weights fall as L^-a."""

    def weights(name: str, a: float = 0.75) -> np.ndarray:
        return token_weights(name, batch.lengths, batch.advantages, max_tokens=L_MAX, exponent=a)

    np.testing.assert_allclose(weights("variance", 0.0), weights("constant"), rtol=1e-12)
    factor = 1 / (L_MAX * np.mean(1 / batch.lengths))
    np.testing.assert_allclose(weights("variance", 1.0), weights("sequence") * factor, rtol=1e-12)
    between = weights("variance", exponent)
    shares = (batch.lengths / batch.lengths[0, 0]) ** -exponent
    np.testing.assert_allclose(between / between[0, 0], shares, rtol=1e-9)
    assert between.sum() == pytest.approx(1 / L_MAX)  # that of an unbiased mean of sum_t l_it / L_max


def test_across_groups_balanced_is_not_the_token_mean() -> None:
    # each group has equal lengths, 2 and 6: balanced weighs a token 1/(2 * 2 * 2) and 1/(2 * 2 * 6), token 1/16
    lengths, advantages = np.array([[2, 2], [6, 6]]), np.array([[1.0, -1.0], [1.0, -1.0]])
    balanced = token_weights("balanced", lengths, advantages, max_tokens=L_MAX)
    np.testing.assert_allclose(balanced, [[1 / 8, 1 / 8], [1 / 24, 1 / 24]], rtol=1e-12)
    token = token_weights("token", lengths, advantages, max_tokens=L_MAX)
    np.testing.assert_allclose(token, np.full((2, 2), 1 / 16), rtol=1e-12)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@settings(max_examples=60)
@given(batch=batches(shortest=1), times=st.integers(2, 5))
def test_balanced_is_blind_to_longer_terms_of_one_sign(sign: float, batch: TokenBatch, times: int) -> None:
    """All terms of one sign replicated: the same loss, and a gradient shared by the copies."""
    only = np.sign(batch.advantages) == sign
    loss, gradient = run("ba", batch)
    computed_loss, computed = run("ba", repeated(batch, times, only=only))
    assert computed_loss == pytest.approx(loss, rel=1e-10, abs=1e-14)
    shared = [
        [np.repeat(v, times) / times if only[p, g] else v for g, v in enumerate(row)]
        for p, row in enumerate(gradient)
    ]
    close(computed, shared)


@settings(max_examples=60)
@given(batch=batches(shortest=1, values=(-1.0, 1.0)), times=st.integers(2, 5))
def test_token_mean_is_not(batch: TokenBatch, times: int) -> None:
    # the positive part of the weights shrinks from T+/T to T+/(T+ + times T-)
    negative = batch.advantages < 0
    assume(negative.any() and not negative.all())
    longer = repeated(batch, times, only=negative)
    before, after = ((weights_of("dapo", b) * b.lengths)[~negative].sum() for b in (batch, longer))
    right, wrong = batch.lengths[~negative].sum(), batch.lengths[negative].sum()
    assert before == pytest.approx(right / (right + wrong))
    assert after == pytest.approx(right / (right + times * wrong))


# --- fact 7: nothing to learn from ------------------------------------------------------------------


@pytest.mark.parametrize("with_hadw", [False, True])
@settings(max_examples=25)
@given(batch=batches(), reward=st.floats(-2, 2))
def test_degenerate_groups_are_exactly_zero(with_hadw: bool, batch: TokenBatch, reward: float) -> None:
    """Equal rewards, whatever they are (all right, all wrong, all truncated): no loss, no gradient, no NaN."""
    rewards = np.full(batch.lengths.shape, reward)
    for name in every_rule():
        advantages = compute_advantages(ALGORITHMS[name].advantage, rewards)
        if with_hadw:
            advantages *= difficulty_weights(advantages, np.full(len(rewards), 0.5), Belief(ability=0.3), scale=1.3)
        loss, gradient = run(name, replace(batch, advantages=advantages))
        assert loss == 0.0
        assert all((values == 0).all() for row in gradient for values in row)


@settings(max_examples=25)
@given(size=st.integers(1, 4), seed=st.integers(0, 2**31), reward=st.floats(-2, 2))
def test_groups_of_one_are_degenerate(size: int, seed: int, reward: float) -> None:
    rng = np.random.default_rng(seed)
    rewards = reward + rng.normal(size=(size, 1))
    for name in every_rule():
        advantages = compute_advantages(ALGORITHMS[name].advantage, rewards)
        loss, gradient = run(name, make_batch(rng.integers(0, 9, (size, 1)), advantages, seed=seed))
        assert loss == 0.0
        assert all((values == 0).all() for row in gradient for values in row)


@settings(max_examples=25)
@given(batch=batches(groups=1, shortest=1), seed=st.integers(0, 2**31))
def test_a_degenerate_group_beside_another_counts_and_moves_nothing(batch: TokenBatch, seed: int) -> None:
    """It stays in P, N and the token count: the other group's gradient shrinks as those grow."""
    idle = make_batch(batch.lengths, np.zeros_like(batch.advantages), seed=seed)
    both = TokenBatch(
        np.concatenate([batch.lengths, idle.lengths]),
        np.concatenate([batch.advantages, idle.advantages]),
        batch.logp + idle.logp,
        batch.old + idle.old,
    )
    for name in every_rule():
        _, alone = run(name, batch)
        _, computed = run(name, both)
        close([computed[0]], [[values / 2 for values in alone[0]]])  # twice the groups, the responses and the tokens
        assert all((values == 0).all() for values in computed[1])


@settings(max_examples=25)
@given(batch=batches(groups=1, shortest=1))
def test_an_empty_response_counts_as_one_and_adds_nothing(batch: TokenBatch) -> None:
    """One response of no tokens and A = 0 appended: G and N grow by one, the tokens do not."""
    size = batch.lengths.size
    longer = TokenBatch(
        np.append(batch.lengths, [[0]], axis=1),
        np.append(batch.advantages, [[0.0]], axis=1),
        [[*batch.logp[0], np.zeros(0)]],
        [[*batch.old[0], np.zeros(0)]],
    )
    for name in every_rule():
        factor = 1.0 if ALGORITHMS[name].aggregation == "token" else size / (size + 1)
        loss, gradient = run(name, batch)
        computed_loss, computed = run(name, longer)
        assert computed_loss == pytest.approx(loss * factor, rel=1e-10, abs=1e-14)
        close([computed[0][:-1]], [[values * factor for values in gradient[0]]])


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
def test_a_mini_batch_of_no_tokens_is_zero(aggregation: str, shape: tuple[int, int]) -> None:
    """Also what overlong filtering leaves of a mini-batch whose responses were all cut."""
    lengths, advantages = np.zeros(shape, dtype=int), np.ones(shape)
    with np.errstate(all="raise"):
        assert not token_weights(aggregation, lengths, advantages, max_tokens=L_MAX).any()
    batch = make_batch(lengths, advantages, seed=0)
    for name in ALGORITHMS:
        loss, _ = run(name, batch, aggregation=aggregation)
        assert loss == 0.0


@given(batch=batches(shortest=1), seed=st.integers(0, 2**31))
def test_a_response_that_weighs_nothing_has_no_gradient(batch: TokenBatch, seed: int) -> None:
    """Overlong filtering hands a cut response over as one of length 0: its tokens are in the row, its weight is 0."""
    is_cut = np.random.default_rng(seed).random(batch.lengths.shape) < 0.5
    left = np.where(is_cut, 0, batch.lengths)
    for name, row in ALGORITHMS.items():
        weights = token_weights(row.aggregation, left, batch.advantages, max_tokens=L_MAX)
        _, gradient = run(name, batch, weights=weights)
        for p, g in np.argwhere(is_cut):
            assert not gradient[p][g].any()
        if row.aggregation in ("sequence", "length_weighted", "constant"):  # N counts them all the same
            np.testing.assert_array_equal(weights[~is_cut], weights_of(name, batch)[~is_cut])
        if row.aggregation == "token" and left.any():  # the tokens that are left share the whole weight
            assert (weights * left).sum() == pytest.approx(1)
        if row.aggregation == "balanced":  # and here those of the same sign in the group do
            for sign in (-1, 1):
                member = np.sign(batch.advantages) == sign
                share = (member.sum(axis=1) / batch.lengths.size) * (left * member).any(axis=1)
                np.testing.assert_allclose((weights * left * member).sum(axis=1), share, rtol=1e-9)


# --- KL ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=2, max_size=6))
def test_the_gradient_of_k3_is_that_of_the_divergence_turned_round(logits: list[tuple[float, float]]) -> None:
    """Averaged over the policy's own tokens, through lp alone: grad KL(reference || policy) = p - q by logit."""
    policy, reference = torch.tensor(logits, dtype=torch.float64).T
    policy = policy.clone().requires_grad_()
    logp, logq = policy.log_softmax(0), reference.log_softmax(0)
    (computed,) = torch.autograd.grad((logp.detach().exp() * kl_estimate(logp, logq)).sum(), policy)
    np.testing.assert_allclose(computed.numpy(), (logp.detach().exp() - logq.exp()).numpy(), atol=1e-12)


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=2, max_size=6))
def test_the_gradient_of_the_perception_term_is_the_divergence_s_own(logits: list[tuple[float, float]]) -> None:
    """Averaged over the policy's own tokens: value and gradient of KL(policy || blind) = sum p log(p / q)."""
    policy, blind = torch.tensor(logits, dtype=torch.float64).T
    policy = policy.clone().requires_grad_()
    logp, logq = policy.log_softmax(0), blind.log_softmax(0)
    estimate = (logp.detach().exp() * divergence(logp, logq)).sum()
    exact = (logp.exp() * (logp - logq)).sum()
    assert float(estimate.detach()) == pytest.approx(float(exact.detach()), abs=1e-12)
    (computed,) = torch.autograd.grad(estimate, policy, retain_graph=True)
    (wanted,) = torch.autograd.grad(exact, policy)
    np.testing.assert_allclose(computed.numpy(), wanted.numpy(), atol=1e-12)


@settings(max_examples=30)
@given(batch=batches(), seed=st.integers(0, 2**31))
def test_the_perception_term_is_a_token_mean_over_what_has_an_image(batch: TokenBatch, seed: int) -> None:
    """loss - gamma (1/T) sum over seeing tokens of k3; no gradient reaches tokens of prompts without an image."""
    rng = np.random.default_rng(seed)
    weights = weights_of("ba", batch)
    data = inputs(batch, weights)
    logp = torch.from_numpy(np.concatenate([v for row in batch.logp for v in row])).requires_grad_()
    total = max(len(logp), 1)
    blind = logp.detach() + torch.from_numpy(rng.normal(0, 0.4, len(logp)))
    sees = torch.from_numpy(rng.random(len(logp)) < 0.7)
    full = replace(data, blind_logp_K=torch.where(sees, blind, torch.nan), mean_weight=1 / total)
    zeros = torch.zeros_like(logp)
    base, _ = policy_loss(logp, zeros, data, **factors("ba"))
    loss, sums = policy_loss(logp, zeros, full, **factors("ba"), perception_coef=0.3)
    gap = (blind - logp.detach())[sees]
    k3 = float((gap.exp() - gap - 1).sum())
    assert float(loss.detach()) == pytest.approx(float(base.detach()) - 0.3 * k3 / total, rel=1e-10, abs=1e-13)
    assert float(sums["perception"]) == pytest.approx(k3) and int(sums["seeing_tokens"]) == int(sees.sum())
    if len(logp):
        (gradient,) = torch.autograd.grad(loss, logp)
        (alone,) = torch.autograd.grad(base, logp)
        wanted = torch.where(sees, 0.3 / total * (blind - logp.detach()), 0.0)
        torch.testing.assert_close(gradient - alone, wanted, rtol=1e-9, atol=1e-13)
