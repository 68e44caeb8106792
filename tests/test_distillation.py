"""The teacher's scores in the loss: by hand, against sums in float64, and as the gradient of a divergence."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.paper_sums import paper_sum
from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import AlgorithmConfig, parse_config
from vlm_rl.errors import UserError
from vlm_rl.losses import AGGREGATIONS, SMALLEST_TAIL, policy_loss, token_weights, top_divergence
from vlm_rl.types import LossInputs

L_MAX = 50
OPTIONS: dict[str, Any] = {"surrogate": "clip", "clip_low": 0.2, "clip_high": 0.2, "cap": 2.0}


def random_log_probs(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(0, 2, shape)).log_softmax(-1)


def test_the_divergence_by_hand() -> None:
    # p = .5, .3 and .2 of the others; q = .25, .6 and .15.
    p, q = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.25, 0.6]])
    expected = 0.5 * math.log(2) + 0.3 * math.log(0.5) + 0.2 * math.log(0.2 / 0.15)
    assert float(top_divergence(p.log(), q.log())) == pytest.approx(expected, rel=1e-6)
    # A policy that leaves the teacher's ids is far from it, though p log(p / q) vanishes on them.
    assert float(top_divergence(p.log() - 20, q.log())) == pytest.approx(math.log(1 / 0.15), rel=1e-6)
    # An id that the policy bans is one that it leaves to the teacher, and its gradient is 0.
    banned = torch.tensor([[math.log(0.5), -math.inf]], requires_grad=True)
    found = top_divergence(banned, q.log())
    assert float(found.detach()) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.15), rel=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), banned)
    assert gradient.isfinite().all() and gradient[0, 1] == 0
    # The teacher is certain: what it leaves counts as SMALLEST_TAIL, and nothing is infinite.
    certain = top_divergence(torch.tensor([[0.9]]).log(), torch.zeros(1, 1))
    assert float(certain) == pytest.approx(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / SMALLEST_TAIL), rel=1e-4)


@given(seed=st.integers(0, 2**31), k=st.integers(1, 8))
def test_the_divergence_over_k_ids_is_between_0_and_that_over_all(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    logp_V, teacher_V = random_log_probs(rng, 8), random_log_probs(rng, 8)
    ids = teacher_V.topk(k).indices
    over_all = float((logp_V.exp() * (logp_V - teacher_V)).sum())
    found = float(top_divergence(logp_V[ids][None], teacher_V[ids][None]))
    assert -1e-12 <= found <= over_all + 1e-5
    assert k < 8 or found == pytest.approx(over_all, abs=1e-5)


def test_the_advantage_s_gradient_is_on_average_that_of_the_divergence() -> None:
    """Each of the 6 ids is a token that weighs its probability: the mean over samples, to the last digit."""
    rng = np.random.default_rng(0)
    logits_V, teacher_V = torch.from_numpy(rng.normal(0, 1, 6)).requires_grad_(), random_log_probs(rng, 6)
    logp_V = logits_V.log_softmax(-1)
    (wanted,) = torch.autograd.grad((logp_V.exp() * (logp_V - teacher_V)).sum(), logits_V, retain_graph=True)
    inputs = LossInputs(
        old_logp_K=None,
        sampler_logp_K=None,
        response_K=torch.arange(6),
        lengths_n=torch.ones(6, dtype=torch.long),
        advantages_n=torch.zeros(6),
        weights_n=logp_V.detach().exp(),
        mean_weight=1.0,
        teacher_logp_K=teacher_V,
    )
    loss, sums = policy_loss(logp_V, torch.zeros(6), inputs, ratio="token", distillation_coef=1.0, **OPTIONS)
    (found,) = torch.autograd.grad(loss, logits_V, retain_graph=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
    assert float(sums["teacher_kl"]) == pytest.approx(float((logp_V - teacher_V).sum().detach()))
    (found,) = torch.autograd.grad(top_divergence(logp_V[None], teacher_V[None]).sum(), logits_V)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", sorted({*AGGREGATIONS} - {"balanced"}))
@pytest.mark.parametrize("k", [0, 3])
@settings(max_examples=6)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 4), groups=st.integers(1, 3), rewards=st.booleans())
def test_the_loss_is_the_sum_over_responses_and_tokens(
    k: int, aggregation: str, ratio: str, seed: int, size: int, groups: int, rewards: bool
) -> None:
    """Value and gradient, in one piece and in two micro-batches, with rewards and without.

    With k = 0 a token has the advantage A_i + c (lp_teacher - lp_old). Otherwise the term is the mean over all tokens
    of the divergence over the teacher's ids.
    """
    rng, coef = np.random.default_rng(seed), 0.7
    lengths = rng.integers(1, 7, (groups, size))
    advantages = rng.choice([-1.5, -0.3, 0.0, 0.4, 2.0], lengths.shape) * rewards
    total, sizes = int(lengths.sum()), lengths.ravel().tolist()
    logp = torch.from_numpy(rng.normal(-1, 0.3, total)).requires_grad_()
    old = logp.detach() + torch.from_numpy(rng.normal(0, 0.1, total))
    teacher = old + torch.from_numpy(rng.normal(0, 1, total))
    top, teacher_top = random_log_probs(rng, total, 5)[:, :3].requires_grad_(), random_log_probs(rng, total, 5)[:, :3]

    terms: list[list[Tensor]] = []
    for i, (start, advantage) in enumerate(zip(accumulate([0, *sizes]), advantages.ravel(), strict=False)):
        tokens = slice(start, start + sizes[i])
        gap = logp[tokens] - old[tokens]
        if ratio == "sequence":  # its value, with a gradient for each token by itself
            gap = gap.mean().detach() + logp[tokens] - logp[tokens].detach()
        a = torch.full((sizes[i],), float(advantage), dtype=torch.float64)
        if not k:
            a = a + coef * (teacher[tokens] - old[tokens])
        terms.append(list(-(gap.exp() * a).minimum(gap.exp().clamp(0.8, 1.2) * a)))
    nested = [terms[p * size : (p + 1) * size] for p in range(groups)]
    wanted = paper_sum(aggregation, nested, advantages, max_tokens=L_MAX)
    if k:
        for p, q in zip(top.exp(), teacher_top.exp(), strict=True):
            rest, teacher_rest = 1 - p.sum(), 1 - q.sum()
            parts = [x * (x / y).log() for x, y in zip([*p, rest], [*q, teacher_rest], strict=True)]
            wanted = wanted + coef * sum(parts) / total
    leaves = [logp, top] if k else [logp]
    wanted_gradients = torch.autograd.grad(wanted, leaves, retain_graph=True)
    weights_PG = token_weights(aggregation, lengths, advantages, max_tokens=L_MAX)

    def loss_of(chosen: list[int]) -> Tensor:
        starts = [0, *accumulate(sizes)]
        tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
        counts = torch.tensor([sizes[i] for i in chosen])
        inputs = LossInputs(
            old_logp_K=old[tokens],
            sampler_logp_K=None,
            response_K=torch.repeat_interleave(torch.arange(len(chosen)), counts),
            lengths_n=counts,
            advantages_n=torch.from_numpy(advantages.ravel()[chosen]),
            weights_n=torch.from_numpy(weights_PG.ravel()[chosen]),
            mean_weight=1 / total,
            teacher_logp_K=teacher[tokens],
            teacher_top_Kk=teacher_top[tokens] if k else None,
        )
        of_ids = [top[tokens]] if k else []
        loss, sums = policy_loss(
            logp[tokens], torch.zeros(len(tokens)), inputs, *of_ids, ratio=ratio, distillation_coef=coef, **OPTIONS
        )
        if k:
            assert float(sums["teacher_mass"]) == pytest.approx(float(top[tokens].detach().exp().sum()))
        return loss

    every = list(range(lengths.size))
    cut = rng.integers(0, 2, lengths.size).astype(bool)
    for split in ([every], [[i for i in every if cut[i]], [i for i in every if not cut[i]]]):
        found = sum((loss_of(chosen) for chosen in split if chosen), torch.zeros(()))
        assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-9, abs=1e-12)
        for gradient, expected in zip(
            torch.autograd.grad(found, leaves, retain_graph=True), wanted_gradients, strict=True
        ):
            torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "ba", "distillation": {"teacher": "t"}}, "aggregation is balanced.*set top_k"),
        ({"name": "dapo", "distillation": {"teacher": "t", "rewards": False}}, "set dynamic_sampling=false"),
    ],
)
def test_rules_that_would_not_train_on_the_teacher_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_algorithm(AlgorithmConfig.model_validate(values))


@pytest.mark.parametrize(
    ("values", "model", "message"),
    [
        ({"top_k": 4}, {}, "top_k is 4, and there is no teacher"),
        ({"teacher": "t", "hint": "Look."}, {}, r"does not say where the answer goes: write \{answer\}"),
        ({"teacher": "t", "top_k": 4}, {"fused_head": True}, "one id a token"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(
    values: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    tree = {
        "out": "o",
        "model": {"path": "m", **model},
        "data": {"train": ["d"]},
        "algorithm": {"distillation": values},
    }
    with pytest.raises(UserError, match=message):
        parse_config(tree, where="test")


@pytest.mark.parametrize(("servers", "is_refused"), [([], False), (["http://127.0.0.1:8000"], True)])
def test_servers_do_not_score_over_kept_ids(servers: list[str], is_refused: bool) -> None:
    """A teacher in this process renormalises over what the sampler kept, as the policy does."""
    tree = {
        "out": "o",
        "model": {"path": "m"},
        "data": {"train": ["d"]},
        "algorithm": {"distillation": {"teacher": "t", "servers": servers}},
        "rollout": {"sampler": "transformers", "top_k": 5},
    }
    refused = "rollout.top_k is 5, and algorithm.distillation.servers are given, which score over all ids"
    with pytest.raises(UserError, match=refused) if is_refused else nullcontext():
        parse_config(tree, where="test")
