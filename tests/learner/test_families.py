"""Every model type that the learner accepts gives the log-probs of the unmodified model; all others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.family_rows import BANNED, TEMPERATURE, groups_of, packed_row, text_prompt, unmodified_logp
from tests.helpers.groups import load_reference
from vlm_rl.config import ModelPart
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import SUPPORTED, check_architecture, check_parts
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.self_check import SelfCheck

TOLERANCE = 1e-5  # of log-probs, and of a gradient's distance over its norm
FamilyModel = Callable[[str], Path]  # the fixture family_model


def load_policy(folder: Path) -> Policy:
    return Policy(load_model(folder, dtype=torch.float32), banned_ids=BANNED, temperature=TEMPERATURE)


def check_gradients(policy: Policy, reference: Any, *, only: str = "") -> None:
    """Compare the gradients of the parameters whose name holds `only`."""
    wanted = {name: p.grad for name, p in reference.named_parameters() if only in name}
    ours = {name: p.grad for name, p in policy.model.named_parameters() if only in name}
    assert wanted.keys() == ours.keys()
    square = sum(float((ours[name] - grad).double().square().sum()) for name, grad in wanted.items())
    norm = sum(float(grad.double().square().sum()) for grad in wanted.values()) ** 0.5
    assert norm > 0 and square**0.5 < TOLERANCE * norm


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_packed_rows_equal_the_unmodified_model(model_type: str, family_model: FamilyModel) -> None:
    """One row of several prompts: log-probs, and gradients of every weight."""
    folder = family_model(model_type)
    policy, reference = load_policy(folder), load_reference(folder)
    groups = groups_of(model_type, folder, reference.config.get_text_config().vocab_size)
    logp_K, _ = policy(packed_row(policy, groups))
    expected_K = unmodified_logp(reference, groups)
    torch.testing.assert_close(logp_K, expected_K, atol=TOLERANCE, rtol=0)
    logp_K.sum().backward()
    expected_K.sum().backward()
    check_gradients(policy, reference)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_features_of_a_frozen_tower_give_the_same(model_type: str, family_model: FamilyModel) -> None:
    """For a row of images and for one of text alone, which has no features."""
    folder = family_model(model_type)
    policy, reference = load_policy(folder), load_reference(folder)
    policy.freeze(["tower", "merger"])
    groups = groups_of(model_type, folder, reference.config.get_text_config().vocab_size)
    expected_K = unmodified_logp(reference, groups)
    ours = []
    for part in (groups[:1], groups[1:]):
        row = packed_row(policy, part)
        with torch.no_grad():
            features = policy(row, only_features=True)
        assert len(features) == int((row.ids_T == policy.model.config.image_token_id).sum())
        ours.append(policy(replace(row, vision={"image_features": features}))[0])
    torch.testing.assert_close(torch.cat(ours), expected_K, atol=TOLERANCE, rtol=0)
    torch.cat(ours).sum().backward()
    expected_K.sum().backward()
    check_gradients(policy, reference, only="language_model")


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl"])
def test_a_text_row_reaches_every_weight(model_type: str, family_model: FamilyModel) -> None:
    """ZeRO's collectives would wait forever for one that it does not reach; none of the tower's may move."""
    policy = load_policy(family_model(model_type))
    groups = groups_of(model_type, family_model(model_type), policy.model.config.get_text_config().vocab_size)
    policy(packed_row(policy, groups[:1]))[0].sum().backward()
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None, name
        assert ".visual." not in name or not parameter.grad.any(), name


@pytest.mark.filterwarnings("error:None of the inputs have requires_grad")
@pytest.mark.parametrize("freeze", [["tower"], ["language_model"]])
def test_checkpointing_changes_no_gradient_where_parts_are_frozen(
    freeze: list[ModelPart], family_model: FamilyModel
) -> None:
    folder, gradients = family_model("qwen3_vl"), []
    for checkpointing in (False, True):
        policy = load_policy(folder)
        policy.freeze(freeze)
        if checkpointing:
            policy.enable_checkpointing()
        groups = groups_of("qwen3_vl", folder, policy.model.config.get_text_config().vocab_size)
        for part in (groups[:1], groups[1:]):  # text alone, too
            policy(packed_row(policy, part))[0].sum().backward()
        gradients.append({name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None})
        assert gradients[-1].keys() == {name for name, p in policy.model.named_parameters() if p.requires_grad}
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


# -- mixtures of experts -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_routers_do_is_added_up_once(checkpointing: bool, family_model: FamilyModel) -> None:
    """The sums are those of the router's own logits, for every token of the row and every layer."""
    policy = load_policy(family_model("qwen3_moe"))
    if checkpointing:
        policy.enable_checkpointing()
    row = packed_row(policy, groups_of("qwen3_moe", Path(), policy.model.config.vocab_size))
    with torch.no_grad():  # old log-probs do not count
        output = policy.model.model(
            row.ids_T[None], position_ids=row.positions_3T[0][None], layout=row.layout, output_router_logits=True
        )
    assert policy.routers.take() == {}
    policy(row)[0].sum().backward()
    sums = policy.routers.take()
    probabilities = torch.stack(output.router_logits).softmax(-1)  # [layers, T, E]
    load = torch.stack([p.topk(2).indices.flatten().bincount(minlength=4) for p in probabilities]).double()
    num_tokens = len(row.ids_T)
    assert sums["router_tokens"] == 3 * num_tokens
    entropy = float(torch.special.entr(probabilities).sum())
    assert float(sums["router_entropy"]) == pytest.approx(entropy, rel=1e-5)
    even = num_tokens * 2 / 4  # two of four experts for every token
    assert float(sums["router_max_load"]) == pytest.approx(float(load.amax(1).sum()) / even * num_tokens, rel=1e-5)


def test_a_dense_model_has_no_routers(family_model: FamilyModel) -> None:
    policy = load_policy(family_model("qwen3"))
    policy(packed_row(policy, groups_of("qwen3", Path(), policy.model.config.vocab_size)))
    assert policy.routers.take() == {}


# -- what is refused -----------------------------------------------------------------------------------

VOCABULARY = 97
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "sliding_window": None,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 8}


def save_tiny(folder: Path, model_type: str, **changes: Any) -> Path:
    """Write a tiny random text model of a type, without a tokenizer."""
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


# (model type, its configuration) -> what the message names. The learner's rows are wrong for all of them.
REFUSED = {
    "mistral": ("mistral", WINDOW, "sliding_window 8 below the 30 tokens"),
    "qwen2": ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window 8"),
    "gemma2": ("gemma2", WINDOW, "type 'gemma2'"),
    "gemma3": ("gemma3_text", WINDOW, "type 'gemma3_text'"),
    "qwen3_next": (
        "qwen3_next",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "type 'qwen3_next'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_packed_rows_compute_wrongly_is_refused_twice(case: str, tmp_path: Path) -> None:
    """By name, and if it were not, by the numbers."""
    model_type, changes, words = REFUSED[case]
    save_tiny(tmp_path, model_type, **changes)
    with pytest.raises(UserError, match=words):
        check_architecture(AutoConfig.from_pretrained(tmp_path), path=tmp_path, longest=30)
    model = load_model(tmp_path, dtype=torch.float32)
    prompts = [text_prompt(11, seed=0), text_prompt(17, seed=1)]
    check = SelfCheck(model, prompts, banned_ids=BANNED, temperature=TEMPERATURE)
    with pytest.raises(UserError, match="log-probs differ from the unmodified model's by"):
        check.compare(Policy(model, banned_ids=BANNED, temperature=TEMPERATURE), path=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_right_passes_the_self_check(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model(save_tiny(tmp_path, "qwen3"), dtype=dtype)
    prompts = [text_prompt(11, seed=0), text_prompt(17, seed=1)]
    check = SelfCheck(model, prompts, banned_ids=BANNED, temperature=TEMPERATURE)
    check.compare(Policy(model, banned_ids=BANNED, temperature=TEMPERATURE), path=tmp_path)


def test_bfloat16_does_not_hide_a_wrong_model(tmp_path: Path) -> None:
    model = load_model(save_tiny(tmp_path, "mistral", **WINDOW), dtype=torch.bfloat16)
    check = SelfCheck(model, [text_prompt(17, seed=1)], banned_ids=BANNED, temperature=TEMPERATURE)
    with pytest.raises(UserError, match="log-probs differ"):
        check.compare(Policy(model, banned_ids=BANNED, temperature=TEMPERATURE), path=tmp_path)


def test_a_window_that_no_row_fills_changes_nothing() -> None:
    config = AutoConfig.for_model("mistral", **{**TINY, "sliding_window": 30})
    check_architecture(config, path="m", longest=30)
    with pytest.raises(UserError, match="sliding_window 30 below the 31"):
        check_architecture(config, path="m", longest=31)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
    ],
)
def test_features_that_a_row_would_lose_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_architecture(AutoConfig.for_model("llama", **{**TINY, **changes}), path="m", longest=30)


@pytest.mark.parametrize(
    ("model_type", "freeze", "lr_by_part", "words"),
    [
        ("qwen3_vl", ["merger", "tower", "language_model"], {}, "model.freeze names tower, merger, language_model"),
        ("qwen3", ["language_model"], {}, "a qwen3 model has no other part"),
        ("qwen3", [], {"merger": 1e-6}, "train.lr_by_part names merger, which a qwen3 model does not have"),
        ("qwen3_vl", ["tower"], {"tower": 1e-6}, "train.lr_by_part names tower, which model.freeze freezes"),
    ],
)
def test_parts_that_cannot_be_trained_so_are_refused(
    model_type: str, freeze: Any, lr_by_part: Any, words: str
) -> None:
    check_parts(model_type, freeze=["tower", "merger"], lr_by_part=["language_model"])
    with pytest.raises(UserError, match=words):
        check_parts(model_type, freeze=freeze, lr_by_part=lr_by_part)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_every_weight_belongs_to_a_part(model_type: str, family_model: FamilyModel) -> None:
    """A frozen part gets no gradient, and the tower keeps what maps its outputs to the language model apart."""
    policy = load_policy(family_model(model_type))
    parts = {name: policy.family.part_of(name) for name, _ in policy.model.named_parameters()}
    assert {*parts.values()} == {*policy.family.parts}
    for part in policy.family.parts:
        policy.freeze([part])
        frozen = {name for name, p in policy.model.named_parameters() if not p.requires_grad}
        assert frozen == {name for name, own in parts.items() if own == part}
        policy.requires_grad_(True)
    widths = {p.shape[0] for n, p in policy.model.named_parameters() if parts[n] == "merger" and p.ndim == 2}
    assert not policy.is_vision or policy.model.config.get_text_config().hidden_size in widths
