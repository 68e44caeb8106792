"""Replayed routing: the learner sends each token to the experts that the sampler sent it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.delta_rule import use_exact_rule
from tests.helpers.family_rows import (
    BANNED,
    CHOSEN,
    TEMPERATURE,
    WITH_EXPERTS,
    groups_of,
    packed_row,
    routed,
    unmodified_logp,
)
from tests.helpers.groups import WeighedGroup, load_reference
from tests.helpers.rotation import todays
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.model_files.routers import routers_of
from vlm_rl.model_files.weights import sent_tensors
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import check_loaded
from vlm_rl.samplers.fingerprint import FingerprintBuilder, check_fresh
from vlm_rl.samplers.transformers import TransformersSampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

FamilyModel = Callable[[str], Path]  # the fixture family_model
CAN_LEAVE_SCORES = ("glm4v_moe", "qwen3_moe", "qwen3_next")  # as they are; the other routers always bring them to 1


def load_policy(folder: Path) -> Policy:
    return Policy(load_model(folder, dtype=torch.float32), banned_ids=BANNED, temperature=TEMPERATURE)


def only_these(router: Any, _: Any, output: Sequence[Tensor], *, experts_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Route as if no other expert were there: all else gets nothing, before what is left is brought to 1."""
    first, scores, own_TK = output
    experts_TK = torch.cat([experts_TK, own_TK[len(experts_TK) :]])  # the last token is read by no one
    shares = {"Gemma4TextRouter": lambda p: p, "Glm4vMoeTextTopkRouter": torch.sigmoid}.get(
        type(router).__name__, partial(torch.softmax, dim=-1)
    )(first)
    others = torch.ones_like(shares, dtype=torch.bool).scatter(1, experts_TK, False)
    weights = shares.masked_fill(others, 0)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    scale = getattr(router, "per_expert_scale", 1.0) * getattr(router, "routed_scaling_factor", 1.0)
    return first, (weights * scale).gather(1, experts_TK).to(scores.dtype), experts_TK


def forced_logp(model: Any, group: WeighedGroup) -> Tensor:
    """Return the log-probs of the group's responses, each alone behind its prompt, with the group's routing."""
    parts = []
    for rollout in group.rollouts:
        experts = np.concatenate([group.rollouts[0].prompt_experts, rollout.experts]).astype(np.int64)
        hooks = [
            router.register_forward_hook(partial(only_these, experts_TK=torch.from_numpy(experts[:, layer])))
            for layer, router in routers_of(model).items()
        ]
        parts.append(unmodified_logp(model, [replace(group, rollouts=[rollout])]))
        parts[-1].sum().backward()
        for hook in hooks:
            hook.remove()
    return torch.cat(parts).detach()


@pytest.mark.parametrize(
    ("model_type", "normed"),
    [*((name, True) for name in WITH_EXPERTS), *((name, False) for name in CAN_LEAVE_SCORES)],
)
def test_replayed_experts_are_the_only_ones(
    model_type: str, normed: bool, family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, and gradients of every weight, of packed and of padded rows, against the unmodified model."""
    folder = family_model(model_type)
    policy, reference = load_policy(folder), load_reference(folder)
    if policy.convolution is not None:
        use_exact_rule(policy, monkeypatch)
    for model in (policy.model, reference):
        for router in routers_of(model).values():
            assert hasattr(router, "norm_topk_prob") == (model_type in CAN_LEAVE_SCORES)
            if model_type in CAN_LEAVE_SCORES:
                router.norm_topk_prob = normed
    config = policy.model.config.get_text_config()
    groups = [
        routed(group, config.num_hidden_layers, seed)
        for seed, group in enumerate(groups_of(model_type, folder, config.vocab_size))
    ]
    expected_K = torch.cat([forced_logp(reference, group) for group in groups])
    logp_K, _ = policy(packed_row(policy, groups))
    torch.testing.assert_close(logp_K, expected_K, atol=2e-5, rtol=0)
    logp_K.sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(policy.model.parameters(), reference.parameters(), strict=True)]
    off = sum(float((ours - theirs).square().sum()) for ours, theirs in pairs if theirs is not None) ** 0.5
    assert off < 1e-5 * sum(float(theirs.square().sum()) for _, theirs in pairs if theirs is not None) ** 0.5
    sums = policy.routers.take()
    assert 0 < sums["router_replaced"] / sums["router_tokens"] < 1
    own_K, _ = policy(replace(packed_row(policy, groups), experts_TLK=None))
    assert (own_K - expected_K).abs().max() > 1e-3, "the routing made no difference"


@pytest.mark.parametrize("model_type", todays(WITH_EXPERTS, days=2))
def test_the_samplers_own_routing_changes_nothing(model_type: str, family_model: FamilyModel) -> None:
    """In float32 both choose alike: no choice that the transformers engine returns replaces one of the learner's."""
    folder = family_model(model_type)
    policy = load_policy(folder)
    builder = PromptBuilder(folder, template=TEMPLATES["plain"])
    problems = [
        Problem(id=text, question=text, images=(), answer="4", answer_type="integer") for text in ("a b", "c")
    ]
    prompts = [builder.build(problem) for problem in problems]
    sampler = TransformersSampler(
        EngineSettings(
            model_path=str(folder),
            builder=builder,
            max_model_len=200,
            batch_size=3,  # a group in two parts, and prompts of two lengths side by side
            dtype=torch.float32,
            returns_routing=True,
        ),
    )
    sampled = sampler.generate(SampleRequest(prompts, SamplingParams(TEMPERATURE, 12, 4), seed=1, step=0))
    sampler.close()
    layers = policy.model.config.get_text_config().num_hidden_layers
    for prompt, rollouts in zip(prompts, sampled, strict=True):
        assert rollouts[0].prompt_experts is not None
        assert rollouts[0].prompt_experts.shape == (len(prompt.ids), layers, CHOSEN)
        for rollout in rollouts:
            assert rollout.experts is not None and rollout.experts.shape == (len(rollout.ids) - 1, layers, CHOSEN)
            assert (rollout.prompt_experts is None) == (rollout.index > 0)
    groups = [
        WeighedGroup(prompt, rollouts, np.ones(4), np.ones(4))
        for prompt, rollouts in zip(prompts, sampled, strict=True)
    ]
    row = packed_row(policy, groups)
    assert row.experts_TLK is not None
    replayed_K, _ = policy(row)
    sums = policy.routers.take()
    assert sums["router_replaced"] == 0 < sums["router_tokens"]
    torch.testing.assert_close(replayed_K, policy(replace(row, experts_TLK=None))[0], atol=1e-6, rtol=0)


def test_a_bias_that_stays_in_float32_is_proved_in_bfloat16(family_model: FamilyModel) -> None:
    """GLM-4.5V's routers choose by it; a learner's fingerprint rounds it with the weights."""
    folder = family_model("glm4v_moe")
    sampler = TransformersSampler(
        EngineSettings(
            model_path=str(folder),
            builder=PromptBuilder(folder, template=TEMPLATES["plain"]),
            max_model_len=200,
            batch_size=1,
            dtype=torch.bfloat16,
        ),
    )
    check_loaded(sampler, str(folder))
    model = load_model(folder, dtype=torch.bfloat16)
    sent = dict(sent_tensors(model))
    assert {str(tensor.dtype) for tensor in sent.values()} == {"torch.bfloat16", "torch.float32"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    builder = FingerprintBuilder(dtype=torch.bfloat16)
    sampler.load_weights(builder.watch(sent.items()), version=1)
    check_fresh(sampler, builder.result())
    sampler.close()
