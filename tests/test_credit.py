"""The credit of tokens: by hand, against loops in float64, and in the loss with every aggregation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.paper_sums import paper_sum
from vlm_rl.credit import CREDITS, dependence_metrics, top_visual_credit, visual_credit, visual_dependence
from vlm_rl.losses import AGGREGATIONS, policy_loss, token_weights
from vlm_rl.types import LossInputs

L_MAX = 50


@st.composite
def scores(draw: st.DrawFn) -> list[list[np.ndarray | None]]:
    """S_t of a few groups, some of them without images."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    num_groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return [
        [None if text else rng.exponential(size=rng.integers(1, 9)) for _ in range(size)]
        for text in draw(st.lists(st.booleans(), min_size=num_groups, max_size=num_groups))
    ]


def test_dependence_by_hand() -> None:
    # d = ln 1/2: 1/2 + ln 2 - 1 = .193147; d = 0: 0; d = 9: e^9 - 10, clipped to 10.
    found = visual_dependence(np.array([-1 - math.log(2), -2, 0]), np.array([-1.0, -2, -9]))
    np.testing.assert_allclose(found, [0.5 + math.log(2) - 1, 0, 10], rtol=1e-12)


def test_top_visual_by_hand() -> None:
    # Means 1, 2, 4: minmax 0, 1/3, 1 with the mean 4/9; b_max = .9 + .1 * 9 / 4 = 1.125. Of 5 tokens 2 are kept, of 1
    # token that one, of 3 tokens 2.
    group = [np.array([0.0, 3, 1, 1, 0]), np.array([2.0]), np.array([4.0, 4, 4])]
    first, second, third = top_visual_credit([group, [None, None, None]])[0]
    assert first is not None and second is not None and third is not None
    np.testing.assert_allclose(first, [0, 0.9, 0.9, 0, 0])
    np.testing.assert_allclose(second, [0.9 + 0.225 / 3])
    np.testing.assert_allclose(third, [1.125, 1.125, 0])
    assert top_visual_credit([[None, None]]) == [[None, None]]


def test_visual_by_hand() -> None:
    # log(1 + S) = 0, .2, 1: I is the same; I / .4 = 0, .5 and 1 + 2 = 3; times 3 / 3.5.
    (found,) = visual_credit([[np.expm1([0, 0.2, 1])]])[0]
    assert found is not None
    np.testing.assert_allclose(found, np.array([0, 0.5, 3]) * 3 / 3.5, rtol=1e-12)


@given(table=scores(), share=st.floats(0.05, 1), floor=st.floats(0, 1))
def test_top_visual_is_its_equation(table: list, share: float, floor: float) -> None:
    there = [s for group in table for s in group if s is not None]
    means = [sum(s) / len(s) for s in there]
    factors = [1.0] * len(there)
    if there and max(means) - min(means) > 1e-6:
        scaled = [(m - min(means)) / (max(means) - min(means)) for m in means]
        top = floor + (1 - floor) / (sum(scaled) / len(scaled))
        factors = [floor + (top - floor) * x for x in scaled]
        assert np.mean(factors) == pytest.approx(1)
    found = [c for group in top_visual_credit(table, share=share, floor=floor) for c in group if c is not None]
    for s, c, factor in zip(there, found, factors, strict=True):
        assert (c > 0).sum() == (math.ceil(share * len(s)) if factor else 0)
        assert set(np.round(c[c != 0], 9)) <= {round(factor, 9)}
        assert not factor or min(s[c > 0]) >= max(s[c == 0], default=-1)


@given(table=scores(), threshold=st.floats(0.05, 0.95))
def test_visual_is_its_equation(table: list, threshold: float) -> None:
    for row, found in zip(table, visual_credit(table, threshold=threshold), strict=True):
        for s, c in zip(row, found, strict=True):
            assert (s is None) == (c is None)
            if s is None or c is None:
                continue
            assert c.sum() == pytest.approx(len(s)) and (c >= 0).all()
            if len(s) > 1:
                assert list(np.argsort(c, kind="stable")) == list(np.argsort(s, kind="stable")), "it grows with S_t"


@pytest.mark.parametrize("name", list(CREDITS))
@given(value=st.floats(0, 10), size=st.integers(1, 9))
def test_tokens_that_are_alike_are_not_told_apart_by_size(name: str, value: float, size: int) -> None:
    (found,) = CREDITS[name]([[np.full(size, value)]])[0]
    assert found is not None
    assert set(found) <= {0.0, 1.0} and found[0] == 1


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("credit", list(CREDITS))
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 4), groups=st.integers(1, 3))
def test_the_loss_is_the_papers_sum_of_credited_terms(
    aggregation: str, credit: str, ratio: str, seed: int, size: int, groups: int
) -> None:
    """Value and gradient of the sum over responses and tokens, in one piece and in two micro-batches.

    |y| counts all tokens; BA's means are weighted by credit, so that each sign keeps the mass |S| / G. The sequence
    ratio is that of all tokens, and its gradient goes through the credited ones.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, (groups, size))
    advantages = rng.choice([-1.5, -0.3, 0.0, 0.4, 2.0], lengths.shape)
    table = [[rng.exponential(size=n) if rng.random() < 0.8 else None for n in row] for row in lengths]
    credits_PG = CREDITS[credit](table)
    flat = [np.ones(n) if c is None else c for c, n in zip(chain(*credits_PG), lengths.ravel(), strict=True)]
    logp = torch.from_numpy(rng.normal(-1, 0.3, lengths.sum())).requires_grad_()
    old = logp.detach() + torch.from_numpy(rng.normal(0, 0.1, lengths.sum()))

    parts = zip(logp.split(lengths.ravel().tolist()), old.split(lengths.ravel().tolist()), strict=True)
    terms, masses = [], []
    for (now, before), c, advantage in zip(parts, flat, advantages.ravel(), strict=True):
        gap = now - before
        if ratio == "sequence":  # its value, with a gradient for each token by itself
            gap = gap.mean().detach() + now - now.detach()
        weighed = -(gap.exp() * advantage).minimum(gap.exp().clamp(0.8, 1.2) * advantage)
        terms.append(list(torch.from_numpy(c) * weighed))
        masses.append(c.sum())
    nested = [terms[p * size : (p + 1) * size] for p in range(groups)]
    masses_PG = np.array(masses).reshape(lengths.shape)
    if aggregation == "balanced":
        wanted = sum(
            (
                ((advantages[p] == a) | (np.sign(advantages[p]) == np.sign(a))).sum()
                / (groups * size)
                * sum(nested[p][g])
                / masses_PG[p][np.sign(advantages[p]) == np.sign(a)].sum()
                for p in range(groups)
                for g, a in enumerate(advantages[p])
                if a
            ),
            torch.zeros((), dtype=torch.float64) + 0 * logp.sum(),
        )
        weights_PG = token_weights(aggregation, masses_PG, advantages, max_tokens=L_MAX)
        for p in range(groups):
            for sign in (-1, 1):
                member = np.sign(advantages[p]) == sign
                share = member.sum() / (groups * size)
                assert (weights_PG * masses_PG)[p][member].sum() == pytest.approx(share)
    else:
        wanted = paper_sum(aggregation, nested, advantages, max_tokens=L_MAX)
        weights_PG = token_weights(aggregation, lengths, advantages, max_tokens=L_MAX)
    (wanted_gradient,) = torch.autograd.grad(wanted, logp, retain_graph=True)

    def loss_of(chosen: list[int]) -> torch.Tensor:
        sizes = lengths.ravel()[chosen]
        tokens = np.concatenate(
            [np.arange(n) + lengths.ravel()[:i].sum() for i, n in zip(chosen, sizes, strict=True)]
        )
        inputs = LossInputs(
            old_logp_K=old[tokens],
            sampler_logp_K=None,
            response_K=torch.repeat_interleave(torch.arange(len(chosen)), torch.from_numpy(sizes)),
            lengths_n=torch.from_numpy(sizes),
            advantages_n=torch.from_numpy(advantages.ravel()[chosen]),
            weights_n=torch.from_numpy(weights_PG.ravel()[chosen]),
            credit_K=torch.from_numpy(np.concatenate([flat[i] for i in chosen])),
        )
        options = {"ratio": ratio, "surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "cap": 2.0}
        loss, _ = policy_loss(logp[tokens], torch.zeros(len(tokens)), inputs, **options)
        alone, _ = policy_loss(logp[tokens], torch.zeros(len(tokens)), replace(inputs, credit_K=None), **options)
        assert not (inputs.credit_K == 1).all() or torch.equal(loss, alone)
        return loss

    every = list(range(lengths.size))
    cut = rng.integers(0, 2, lengths.size).astype(bool)
    for split in ([every], [[i for i in every if cut[i]], [i for i in every if not cut[i]]]):
        total = sum(loss_of(chosen) for chosen in split if chosen)
        assert isinstance(total, torch.Tensor)
        assert float(total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-9, abs=1e-12)
        (gradient,) = torch.autograd.grad(total, logp, retain_graph=True)
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-8, atol=1e-12)


def test_metrics_by_hand() -> None:
    # 20 tokens with S = 1 in the first half and 3 in the second, right; 10 tokens of 5, wrong; one without an image.
    table = [[np.repeat([1.0, 3.0], 10), np.full(10, 5.0)], [None, None]]
    credit = top_visual_credit(table)
    found = dependence_metrics(table, credit, [[True, False], [True, False]])
    assert found["visual/dependence"] == pytest.approx(3)
    assert found["visual/dependence/correct"] == 2 and found["visual/dependence/wrong"] == 5
    assert found["visual/dependence/tenth_1"] == pytest.approx((2 * 1 + 5) / 3)
    assert found["visual/dependence/tenth_10"] == pytest.approx((2 * 3 + 5) / 3)
    assert found["visual/dependence/correct/tenth_10"] == 3 and found["visual/dependence/wrong/tenth_1"] == 5
    assert found["visual/credited"] == pytest.approx(12 / 30)
    assert math.isnan(dependence_metrics([[None]], [[None]], [[True]])["visual/dependence"])
