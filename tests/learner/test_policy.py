"""Packed rows against padded one-response rows through the unmodified transformers model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.helpers.groups import (
    WeighedGroup,
    load_reference,
    make_prompt,
    noise_image,
    pack,
    padded_logps,
    random_group,
)
from vlm_rl.data.prompts import rope_positions
from vlm_rl.learner import head as head_module
from vlm_rl.learner import policy as policy_module
from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.row_plan import plan_rows

CASES = ["one_image", "several_images", "text_only", "length_one", "unequal_images", "unequal_prompts", "everything"]


def groups_of(case: str, model: Path, vocabulary: int, banned: list[int]) -> list[WeighedGroup]:
    square, wide, tall = noise_image(84, 84, 1), noise_image(196, 56, 2), noise_image(56, 140, 3)
    short, long = "How many?", "How many red squares are there, and why do you think so? Say it in words."
    prompts = {
        "one_image": [(short, [square], [7, 3, 12])],
        "several_images": [(long, [square, wide, tall], [9, 2])],
        "text_only": [(short, [], [5, 8, 1])],
        "length_one": [(short, [square], [1, 1])],
        "unequal_images": [(short, [square], [4, 6]), (short, [wide], [6, 2]), (short, [tall], [3])],
        "unequal_prompts": [(short, [square], [4, 6]), (long, [square], [8, 1])],
        "everything": [
            (short, [wide], [4, 9]),
            (long, [], [3, 1]),
            (short, [square, tall], [7]),
            (long, [wide], [5, 5]),
        ],
    }[case]
    return [
        random_group(make_prompt(model, text, images), lengths, vocabulary=vocabulary, seed=seed, banned=banned)
        for seed, (text, images, lengths) in enumerate(prompts)
    ]


def packed_logps(policy: Policy, groups: list[WeighedGroup], rows: list[list[Chunk]]) -> list[list[torch.Tensor]]:
    result = [[torch.empty(0)] * len(g.rollouts) for g in groups]
    for chunks in rows:
        row = pack(chunks, groups, lambda prompt: rope_positions(policy.model, prompt))
        logp_K, _ = policy(row)
        members = [(chunk.group, index) for chunk in chunks for index in chunk.responses]
        for (group, index), values in zip(members, logp_K.split(row.loss.lengths_n.tolist()), strict=True):
            result[group][index] = values
    return result


def one_row(groups: list[WeighedGroup]) -> list[list[Chunk]]:
    return [[Chunk(g, tuple(range(len(group.rollouts)))) for g, group in enumerate(groups)]]


@pytest.fixture(scope="module")
def banned(tiny_model: Path) -> list[int]:
    config = load_reference(tiny_model).config
    return [config.image_token_id, config.video_token_id]


@pytest.mark.parametrize("case", CASES)
def test_log_probs_and_gradients_equal_padded_rows(case: str, tiny_model: Path, banned: list[int]) -> None:
    reference = load_reference(tiny_model)
    policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=banned, temperature=0.7)
    groups = groups_of(case, tiny_model, reference.config.text_config.vocab_size, banned)

    expected = padded_logps(reference, groups, banned=banned, temperature=0.7)
    packed = packed_logps(policy, groups, one_row(groups))

    def loss(logps: list[list[torch.Tensor]]) -> torch.Tensor:
        weights = [g.weights_G * g.advantages_G for g in groups]
        return sum(
            (float(weights[g][i]) * value.sum() for g, row in enumerate(logps) for i, value in enumerate(row)),
            start=torch.zeros(()),
        )

    for ours, theirs in zip(packed, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    loss(expected).backward()
    loss(packed).backward()
    reference_grads = dict(reference.named_parameters())
    difference = norm = 0.0
    for name, parameter in policy.model.named_parameters():
        wanted = reference_grads[name].grad
        if wanted is None:  # the vision tower of a text-only batch
            assert parameter.grad is None or not parameter.grad.any()
            continue
        difference += float((parameter.grad - wanted).double().pow(2).sum())
        norm += float(wanted.double().pow(2).sum())
    assert norm > 0
    assert difference**0.5 < 1e-4 * norm**0.5


def test_splitting_a_group_over_rows_changes_nothing(tiny_model: Path, banned: list[int]) -> None:
    policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=banned, temperature=1.0)
    groups = groups_of("everything", tiny_model, policy.model.config.text_config.vocab_size, banned)
    rows = plan_rows([len(g.prompt.ids) for g in groups], [g.lengths for g in groups], budget=40)[0]
    assert len(rows) > len(groups)
    with torch.no_grad():
        whole = packed_logps(policy, groups, one_row(groups))
        split = packed_logps(policy, groups, rows)
    for a, b in zip(whole, split, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


def test_chunked_head_equals_the_whole_matrix(tiny_model: Path, banned: list[int], monkeypatch) -> None:
    policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=banned, temperature=0.7)
    vocabulary = policy.model.config.text_config.vocab_size
    groups = groups_of("one_image", tiny_model, vocabulary, banned)
    row = pack(one_row(groups)[0], groups, lambda prompt: rope_positions(policy.model, prompt))

    def run() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        policy.zero_grad()
        logp_K, entropy_K = policy(row)
        (logp_K.sum() + 0.3 * entropy_K.square().sum()).backward()
        return (
            logp_K.detach(),
            entropy_K.detach(),
            [p.grad.clone() for p in policy.parameters() if p.grad is not None],
        )

    whole = run()
    monkeypatch.setattr(head_module, "LOGIT_BYTES", 5 * 8 * vocabulary)  # 22 tokens in chunks of 5
    chunked = run()
    torch.testing.assert_close(chunked[0], whole[0])
    torch.testing.assert_close(chunked[1], whole[1])
    for a, b in zip(chunked[2], whole[2], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()  # single elements that nearly cancel differ by more


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_gradient_checkpointing_computes_every_layer_again(
    zero_stage: int, tiny_model: Path, banned: list[int]
) -> None:
    """transformers checkpoints in training mode only, and loads models in the other one."""
    calls = {}
    for checkpointing in (False, True):
        policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=banned, temperature=1.0)
        if checkpointing:
            policy.enable_checkpointing(zero_stage=zero_stage)
        layer = policy.model.model.language_model.layers[0]
        count = []
        layer.input_layernorm.register_forward_hook(lambda *_, count=count: count.append(1))
        groups = groups_of("one_image", tiny_model, policy.model.config.text_config.vocab_size, banned)
        packed_logps(policy, groups, one_row(groups))[0][0].sum().backward()
        calls[checkpointing] = len(count)
    assert calls == {False: 1, True: 2}


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("patched", [False, True])
def test_recomputing_the_mlps_alone_changes_no_gradient(
    zero_stage: int, patched: bool, tiny_model: Path, banned: list[int]
) -> None:
    """MLPs of text and tower run twice, all else once, and every gradient is the same bit for bit."""
    gradients, calls = {}, {}
    for only_mlps in (False, True):
        policy = Policy(
            load_model(tiny_model, dtype=torch.float32), banned_ids=banned, temperature=1.0, layer_patches=patched
        )
        if only_mlps:
            policy.enable_checkpointing(zero_stage=zero_stage, only_mlps=True)
        counts: Counter[str] = Counter()
        text, tower = policy.model.model.language_model.layers[0], policy.model.model.visual.blocks[0]
        for name, module in {
            "attention": text.self_attn.q_proj,
            "text": text.mlp.down_proj,
            "tower": tower.mlp.gate_proj,
        }.items():
            module.register_forward_pre_hook(lambda *_, name=name, counts=counts: counts.update([name]))
        groups = groups_of("one_image", tiny_model, policy.model.config.text_config.vocab_size, banned)
        packed_logps(policy, groups, one_row(groups))[0][0].sum().backward()
        calls[only_mlps] = dict(counts)
        gradients[only_mlps] = [p.grad for p in policy.parameters() if p.grad is not None]
    assert calls[False] == {"attention": 1, "text": 1, "tower": 1}
    # down_proj's own output is not needed again: the variant that is not reentrant stops in front of it.
    assert calls[True] == {"attention": 1, "text": 2, "tower": 2}
    assert all(map(torch.equal, gradients[True], gradients[False]))


def test_what_is_offloaded_are_the_layers_inputs_and_no_weights(
    tiny_model: Path, banned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Tensor] = []

    class Recorded(saved_tensors_hooks):
        """save_on_cpu, which can be asked what it took."""

        def __init__(self, *, pin_memory: bool) -> None:
            assert not pin_memory  # there is no GPU to copy to
            super().__init__(lambda tensor: moved.append(tensor) or tensor.cpu(), lambda tensor: tensor)

    monkeypatch.setattr(policy_module, "save_on_cpu", Recorded)
    gradients = {}
    for offload in (False, True):
        policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=banned, temperature=1.0)
        policy.enable_checkpointing(offload=offload)
        groups = groups_of("one_image", tiny_model, policy.model.config.text_config.vocab_size, banned)
        packed_logps(policy, groups, one_row(groups))[0][0].sum().backward()
        gradients[offload] = [p.grad for p in policy.parameters() if p.grad is not None]
        if not offload:
            assert not moved
    assert all(torch.equal(a, b) for a, b in zip(gradients[True], gradients[False], strict=True))
    text = policy.model.config.text_config
    num_tokens = len(groups[0].prompt.ids) + sum(groups[0].lengths)
    inputs = [tensor for tensor in moved if tensor.shape == (1, num_tokens, text.hidden_size)]
    assert len(inputs) >= text.num_hidden_layers
    of_layers = {p.data_ptr() for p in policy.model.model.language_model.layers.parameters()}
    assert not of_layers & {tensor.data_ptr() for tensor in moved}


def test_entropy_is_of_the_banned_and_tempered_distribution(tiny_model: Path, banned: list[int]) -> None:
    policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=banned, temperature=0.5)
    hidden_KH = torch.randn(6, policy.model.config.text_config.hidden_size)
    target_K = torch.tensor([0, 1, 2, 3, 4, 5])
    logp_K, entropy_K = policy.head(hidden_KH, target_K)
    logits = policy.model.lm_head(hidden_KH).double() / 0.5
    allowed = [i for i in range(logits.shape[1]) if i not in banned]
    p = torch.softmax(logits[:, allowed], dim=-1)  # the ban is the same as the ids not being there
    torch.testing.assert_close(entropy_K.double(), -(p * p.log()).sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(logp_K.double(), p[torch.arange(6), target_K].log(), atol=1e-5, rtol=0)


def test_gradients_of_log_probs_and_entropy(tiny_model: Path, banned: list[int]) -> None:
    """Against autograd through the plain formulas, in float64, each alone and both together."""
    policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=banned, temperature=0.5)
    hidden_KH = torch.randn(6, policy.model.config.text_config.hidden_size)
    target_K = torch.tensor([0, 1, 2, 3, 4, 5])
    allowed = [i for i in range(policy.head.weight.shape[0]) if i not in banned]
    for by_logp, by_entropy in ((1.0, 0.0), (0.0, 1.0), (0.7, -0.4)):
        ours = hidden_KH.clone().requires_grad_()
        policy.head.weight.grad = None
        logp_K, entropy_K = policy.head(ours, target_K)
        terms = [f * v.sin().sum() for f, v in ((by_logp, logp_K), (by_entropy, entropy_K)) if f]
        torch.stack(terms).sum().backward()
        theirs = hidden_KH.double().requires_grad_()
        weight = policy.head.weight.detach().double().requires_grad_()
        logp = torch.log_softmax((theirs @ weight.T / 0.5)[:, allowed], dim=-1)
        chosen = logp[torch.arange(6), [allowed.index(i) for i in target_K.tolist()]]
        entropy = -(logp.exp() * logp).sum(-1)
        (by_logp * chosen.sin().sum() + by_entropy * entropy.sin().sum()).backward()
        for ours_grad, theirs_grad in ((ours.grad, theirs.grad), (policy.head.weight.grad, weight.grad)):
            assert (ours_grad - theirs_grad).norm() <= 1e-5 * theirs_grad.norm()


def test_a_text_row_reaches_the_vision_tower_with_zero_gradient(tiny_model: Path, banned: list[int]) -> None:
    policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=banned, temperature=1.0)
    groups = groups_of("text_only", tiny_model, policy.model.config.text_config.vocab_size, banned)
    packed_logps(policy, groups, one_row(groups))[0][0].sum().backward()
    for name, parameter in policy.model.model.visual.named_parameters():
        assert parameter.grad is not None, f"{name} was not reached: ZeRO's collectives would wait forever"
        assert not parameter.grad.any()


def test_a_float32_model_computes_no_convolution_in_tf32(tiny_model: Path) -> None:
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    load_model(tiny_model, dtype=torch.bfloat16)
    assert torch.backends.cudnn.allow_tf32
    load_model(tiny_model, dtype=torch.float32)
    assert not torch.backends.cudnn.allow_tf32
