"""Truncated sampling in training: the learner renormalises over the ids that the sampler kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.toy_runs import Toys
from vlm_rl.config import parse_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.learner.policy import over_kept
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.distribution import log_probs, process_logits
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.transformers import TransformersSampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import KeptIds, Problem


def test_ids_by_hand() -> None:
    kept = KeptIds.of([[5, 2], [7], [1, 3, 4]])
    assert kept.table(4).tolist() == [[5, 2, -1, -1], [7, -1, -1, -1], [1, 3, 4, -1]]


@given(seed=st.integers(0, 2**31), top_p=st.floats(0.05, 1), top_k=st.integers(1, 9))
def test_the_learner_s_distribution_is_the_sampler_s(seed: int, top_p: float, top_k: int) -> None:
    """Values, entropy and gradient are those of a softmax over the kept logits alone, in float64."""
    rng = np.random.default_rng(seed)
    logits_KV = torch.from_numpy(rng.normal(0, 2, (4, 11))).requires_grad_()
    scaled_KV = process_logits(
        logits_KV.detach(), banned=torch.tensor([3]), temperature=1.0, top_p=top_p, top_k=top_k
    )
    rows = [row.isfinite().nonzero()[:, 0].numpy() for row in scaled_KV]
    assert all(1 <= len(row) <= top_k for row in rows)
    kept_Kk = torch.from_numpy(KeptIds.of(rows).table(top_k))
    target_K = torch.tensor([rng.choice(row) for row in rows])

    wanted_KV = logits_KV.masked_fill(scaled_KV.isneginf(), -torch.inf).log_softmax(1)
    wanted_K = wanted_KV.gather(1, target_K[:, None])[:, 0]
    p_KV = wanted_KV.exp()
    wanted_entropy_K = -(p_KV * wanted_KV.masked_fill(p_KV == 0, 0.0)).sum(1)

    logp_KV = logits_KV.masked_fill(torch.arange(11) == 3, -torch.inf).log_softmax(1)
    found_K, entropy_K, mass_K = over_kept(
        logp_KV.gather(1, target_K[:, None])[:, 0], logp_KV.gather(1, kept_Kk.clamp(min=0)), kept_Kk
    )
    torch.testing.assert_close(found_K, wanted_K)
    torch.testing.assert_close(found_K.float(), log_probs(scaled_KV, target_K), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy_K, wanted_entropy_K)
    assert ((mass_K > 0) & (mass_K < 1 + 1e-9)).all()
    weights_K = torch.from_numpy(rng.normal(size=4))
    for found, wanted in ((found_K, wanted_K), (entropy_K, wanted_entropy_K)):
        gradients = [
            torch.autograd.grad((x * weights_K).sum(), logits_KV, retain_graph=True)[0] for x in (found, wanted)
        ]
        torch.testing.assert_close(*gradients)


def test_a_run_with_top_p_has_the_sampler_s_log_probs(toys: Toys) -> None:
    """The gap check holds with the kept ids, over both mini-batches; KL and entropy are over these too."""
    rollout = {"top_p": 0.7, "top_k": 12, "responses_per_prompt": 2}
    rule = {"kl_coef": 0.1, "entropy_coef": 0.01}
    run = toys.train_run("top-p", rollout=rollout, algorithm=rule, train={"steps": 1})
    (record,) = run.metrics()
    assert record["rollout/logprob_gap"] < 1e-5, "without what was kept it is about -log .7"
    assert 1 <= record["rollout/kept_ids"] <= 12
    assert 0.7 * 0.9 < record["rollout/kept_mass"] <= 1, "top-p counts within the 12 likeliest, which have nearly all"
    assert record["kl"] < 0.01 and 0 < record["grad_norm"] < math.inf
    assert record["entropy"] < math.log(12)


def test_an_evaluation_with_top_p_alone_keeps_no_ids(tiny_model: Path) -> None:
    """Nobody reads them, and no top_k bounds their memory: nearly the vocabulary, for each token."""
    builder = PromptBuilder(tiny_model, template=TEMPLATES["plain"])
    settings = EngineSettings(
        model_path=str(tiny_model),
        builder=builder,
        max_model_len=100,
        batch_size=2,
        dtype=torch.float32,
        returns_kept=True,
    )
    sampler = TransformersSampler(settings)
    prompt = builder.build(Problem("p", "How many?", (), "4", "integer"))
    for top_k in (0, 5):
        params = SamplingParams(temperature=1.0, max_tokens=3, responses=2, top_p=0.9, top_k=top_k)
        (rollouts,) = sampler.generate(SampleRequest([prompt], params, seed=0, step=0))
        assert [rollout.kept is None for rollout in rollouts] == [top_k == 0] * 2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"top_p": 0.7}}, "set top_k, for example to 64"),
        ({"rollout": {"top_k": 8, "sampler": "server", "servers": ["http://127.0.0.1:1"]}}, "tell what they kept"),
        ({"rollout": {"top_k": 8, "sampler": "transformers", "carry_over": 0.5}}, "leave one of them out"),
        (
            {"rollout": {"top_k": 8, "sampler": "transformers"}, "model": {"fused_head": True}},
            "model.fused_head is True",
        ),
    ],
)
def test_what_does_not_bring_the_kept_ids_is_refused(sections: dict[str, Any], message: str) -> None:
    tree = {"out": "o", "model": {"path": "m"}, "data": {"train": ["d"]}}
    with pytest.raises(UserError, match=message):
        parse_config(tree | {key: tree.get(key, {}) | value for key, value in sections.items()}, where="test")


def test_an_engine_on_several_ranks_may_bring_them() -> None:
    """Each rank's engine samples all tokens, and so has what was kept of each beside its log-prob."""
    tree: dict[str, Any] = {"out": "o", "model": {"path": "m"}, "data": {"train": ["d"]}}
    rollout = parse_config(tree | {"rollout": {"top_k": 8, "sampler": "vllm", "tensor_parallel": 2}}).rollout
    assert (rollout.top_k, rollout.tensor_parallel) == (8, 2)


@pytest.mark.slow
def test_vllm_on_a_cpu_is_refused_by_name(toys: Toys) -> None:
    pytest.importorskip("vllm")
    result = toys.runner("train", str(toys.config("top-p-vllm", rollout={"sampler": "vllm", "top_k": 8})))
    assert result.code == 2 and "second model runner, which CPUs do not have" in " ".join(result.output.split())
