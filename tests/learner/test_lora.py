"""Adapters against the merged model: numbers, gradients, what is trained, and what a checkpoint of them holds."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.helpers.family_rows import BANNED, TEMPERATURE, WITH_EXPERTS, groups_of, packed_row, unmodified_logp
from tests.helpers.groups import (
    WeighedGroup,
    load_reference,
    make_prompt,
    noise_image,
    pack,
    padded_logps,
    random_group,
)
from tests.helpers.rotation import todays
from vlm_rl.config import LoraConfig, parse_config
from vlm_rl.data.prompts import rope_positions
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.learner.lora import (
    add_adapters,
    describe,
    num_adapter_parameters,
    save_adapters,
    target_layers,
    weight_sources,
    without_adapters,
)
from vlm_rl.learner.packing import Chunk, PackedRow
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.model_files.adapters import BASE_MODEL, BaseModel, load_merged, merge
from vlm_rl.model_files.model_folder import check_model_folder
from vlm_rl.model_files.weights import check_weights, sent_buffers, weights_sha256

LORA = LoraConfig(rank=4, alpha=6)
SCALING = 6.0 / 4
TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def with_adapters(
    model: Path, config: LoraConfig = LORA, *, dtype: torch.dtype = torch.float32, patched: bool = True
) -> Policy:
    """Return a policy whose adapters have moved away from zero."""
    policy = Policy(load_model(model, dtype=dtype), banned_ids=(), temperature=0.7, layer_patches=patched)
    policy.add_adapters(config, base=BaseModel(str(model), weights_sha256(model)), seed=5)
    move(policy)
    return policy


def move(policy: Policy) -> None:
    """Draw every B, which is zero at first."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def merged(policy: Policy) -> dict[str, Tensor]:
    return {name: source.weight().clone() for name, source in weight_sources(policy.model)}


@pytest.fixture(scope="module")
def groups(tiny_model: Path) -> list[WeighedGroup]:
    vocabulary = AutoConfig.from_pretrained(tiny_model).text_config.vocab_size
    prompts = [("How many?", [noise_image(84, 84, 1)], [7, 3]), ("How many, and why?", [], [4, 6])]
    return [
        random_group(make_prompt(tiny_model, text, images), lengths, vocabulary=vocabulary, seed=seed)
        for seed, (text, images, lengths) in enumerate(prompts)
    ]


def row_of(policy: Policy, groups: list[WeighedGroup]) -> PackedRow:
    chunks = [Chunk(g, tuple(range(len(group.rollouts)))) for g, group in enumerate(groups)]
    return pack(chunks, groups, lambda prompt: rope_positions(policy.model, prompt))


def adapted(policy: Policy) -> dict[str, Any]:
    return {name: layer for name, layer in policy.model.named_modules() if hasattr(layer, "lora_A")}


@pytest.mark.parametrize("patched", [True, False])
def test_log_probs_are_the_merged_models(patched: bool, tiny_model: Path, groups: list[WeighedGroup]) -> None:
    """Our own layers must not pass the adapters by: without them the log-probs would be those of the base model."""
    policy = with_adapters(tiny_model, patched=patched)
    assert bool(policy.replaced_layers) == patched
    reference: Any = load_reference(tiny_model)
    base = torch.cat([x for row in padded_logps(reference, groups, temperature=0.7) for x in row])
    reference.load_state_dict(merged(policy), strict=False)
    expected = torch.cat([x for row in padded_logps(reference, groups, temperature=0.7) for x in row])
    logp_K, _ = policy(row_of(policy, groups))
    torch.testing.assert_close(logp_K, expected, atol=1e-5, rtol=0)
    assert float((expected - base).detach().abs().max()) > 0.01


def test_gradients_are_those_of_the_merged_weights(tiny_model: Path, groups: list[WeighedGroup]) -> None:
    """With W = W0 + s B A: dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T, in float64."""
    config = LoraConfig(rank=4, alpha=6, targets=["language_model", "tower", "merger"])
    policy = with_adapters(tiny_model, config, dtype=torch.float64)
    # patched: transformers' own norms compute in float32
    plain = Policy(load_model(tiny_model, dtype=torch.float64), banned_ids=(), temperature=0.7, layer_patches=True)
    plain.model.load_state_dict(merged(policy), strict=False)
    row = row_of(policy, groups)
    row.vision["pixel_values"] = row.vision["pixel_values"].double()
    direction_TH = torch.randn(len(row.ids_T), 128, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    hidden = [each.hidden_states(row) for each in (policy, plain)]
    torch.testing.assert_close(*hidden, rtol=1e-10, atol=1e-10)
    for each in hidden:
        (each * direction_TH).sum().backward()
    full = {name: parameter.grad for name, parameter in plain.model.named_parameters()}
    layers = adapted(policy)
    assert len(layers) == 3 * 7 + 2 * 5 + 2  # text layers, blocks of the tower, the merger
    for name, layer in layers.items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        gradient = full[f"{name}.weight"]
        torch.testing.assert_close(a.grad, SCALING * b.T @ gradient, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(b.grad, SCALING * gradient @ a.T, rtol=1e-9, atol=1e-9)
        assert a.grad.abs().max() > 1e-6


@pytest.mark.parametrize("targets", [["language_model"], ["tower", "q_proj"]])
def test_checkpointing_gives_the_same_gradients(
    targets: list[str], tiny_model: Path, groups: list[WeighedGroup]
) -> None:
    """The inputs of the first layers are frozen, and still every adapter gets its gradient, and nothing else one."""
    gradients = []
    for checkpointing in (False, True):
        policy = with_adapters(tiny_model, LoraConfig(rank=4, targets=targets))
        if checkpointing:
            policy.enable_checkpointing()
        logp_K, entropy_K = policy(row_of(policy, groups))
        (logp_K.sum() + 0.1 * entropy_K.sum()).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
        assert gradients[-1].keys() == {name for name, p in policy.named_parameters() if p.requires_grad}
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)
    assert all(gradient.any() for gradient in gradients[0].values())


@pytest.mark.parametrize(("model_type", "part"), [("qwen3_next", "language_model"), ("glm4v_moe", "tower")])
def test_adapters_on_experts_are_refused(model_type: str, part: str, family_model: Callable[[str], Path]) -> None:
    """PEFT takes the shared expert's layers of these types, and those of the tower, for those of all experts."""
    model = load_model(family_model(model_type), dtype=torch.float32)
    with pytest.raises(UserError, match="name layers outside of its MLPs"):
        add_adapters(model, LoraConfig(targets=[part]), seed=5)


@pytest.mark.parametrize("model_type", todays(SUPPORTED, days=2))
def test_every_family_trains_adapters(model_type: str, family_model: Callable[[str], Path], tmp_path: Path) -> None:
    """On every part: the log-probs of the merged, unmodified model, a gradient for every adapter, and a folder that
    merges to these weights."""
    folder = family_model(model_type)
    policy = Policy(load_model(folder, dtype=torch.float32), banned_ids=BANNED, temperature=TEMPERATURE)
    meets_experts = model_type in ("glm4v_moe", "qwen3_next")  # whose layers elsewhere PEFT takes for them
    targets = ["q_proj", "v_proj"] if meets_experts else list(SUPPORTED[model_type].parts)
    if model_type == "gemma3":
        targets.remove("merger")  # a matrix that is no linear layer
    config = LoraConfig(rank=4, alpha=6, targets=targets)
    policy.add_adapters(config, base=BaseModel(str(folder), ""), seed=5)
    move(policy)
    reference: Any = load_reference(folder)
    reference.load_state_dict(merged(policy), strict=False)
    groups = groups_of(model_type, folder, reference.config.get_text_config().vocab_size)
    logp_K, _ = policy(packed_row(policy, groups))
    # Log-probs near -11: in float32 ours and the unmodified model's are each 6e-6 from float64. Float32 rounds the
    # state of linear attention by 7e-5 in the unmodified model itself, and on some processors by more than 1e-4.
    tolerance = (
        3e-4
        if "linear_attention" in (getattr(reference.config.get_text_config(), "layer_types", None) or ())
        else 2e-5
    )
    torch.testing.assert_close(logp_K, unmodified_logp(reference, groups), atol=tolerance, rtol=0)
    logp_K.sum().backward()
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert {policy.family.part_of(name) for name in trained} >= {*policy.family.parts} & {*targets}
    assert all(".lora_" in name and p.grad is not None and p.grad.any() for name, p in trained.items())
    save_adapters(
        policy.model, {name: p.detach() for name, p in trained.items()}, tmp_path, BaseModel(str(folder), "")
    )
    whole, expected = load_merged(tmp_path), merged(policy)
    again = {**dict(whole.named_parameters()), **dict(sent_buffers(whole))}
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], weight) for name, weight in expected.items())
    experts = "; experts have none" if model_type in WITH_EXPERTS else ""
    assert re.fullmatch(rf"adapters: rank 4 on \d+ layers: [\w, ]+{experts}", describe(policy.model, config))


def test_which_layers_get_an_adapter(tiny_model: Path) -> None:
    model: Any = load_model(tiny_model, dtype=torch.float32)
    everything = target_layers(model, ["language_model"])
    text = "model.language_model.layers"
    assert {name.rpartition(".")[2] for name in everything} == set(TEXT_LAYERS)
    assert all(name.startswith(f"{text}.") for name in everything) and len(everything) == 3 * 7
    # by name in the language model only: the tower has layers of the same names
    assert target_layers(model, ["gate_proj"]) == [f"{text}.{i}.mlp.gate_proj" for i in range(3)]
    assert target_layers(model, ["merger"]) == ["model.visual.merger.mlp.0", "model.visual.merger.mlp.2"]
    assert len(target_layers(model, ["tower", "q_proj"])) == 2 * 5 + 3
    hidden, mlp, kv = 128, 384, 64
    per_layer = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + mlp)
    assert num_adapter_parameters(model, LORA) == 3 * 4 * per_layer
    with pytest.raises(UserError, match=r"model\.lora\.targets: 'lm_head' names no linear layer .* q_proj"):
        target_layers(model, ["lm_head"])


def test_only_adapters_are_trained(tiny_model: Path) -> None:
    policy = with_adapters(tiny_model, dtype=torch.bfloat16)
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 3 * 7 and all(".lora_" in name for name in trained)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    assert policy.has_frozen_vision
    assert list(policy.state_dict()) == trained
    with_names = {name for name, _ in load_model(tiny_model, dtype=torch.bfloat16).named_parameters()}
    assert merged(policy).keys() == with_names


def test_without_adapters_it_is_the_base_model(tiny_model: Path, groups: list[WeighedGroup]) -> None:
    policy = with_adapters(tiny_model)
    base = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=(), temperature=0.7)
    row = row_of(policy, groups)
    trained = [parameter.requires_grad for parameter in policy.parameters()]
    with torch.no_grad():
        before = policy(row)[0]
        with without_adapters(policy.model):
            off = policy(row)[0]
        assert torch.equal(off, base(row)[0])
        assert not torch.equal(off, before)
        assert torch.equal(policy(row)[0], before)
    assert [parameter.requires_grad for parameter in policy.parameters()] == trained


def test_equal_seeds_give_equal_adapters_and_draw_nothing_else(tiny_model: Path) -> None:
    torch.manual_seed(9)
    first = with_adapters(tiny_model)
    torch.manual_seed(10)
    before = torch.random.get_rng_state()
    second = with_adapters(tiny_model)
    assert torch.equal(torch.random.get_rng_state(), before)
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((48, 32), (4, 32), (48, 4)))
    exact = weight.double() + SCALING * b.double() @ a.double()
    wrong = (merge(weight, a, b, SCALING).double() - exact).abs()
    half_step = exact.abs() * torch.finfo(dtype).eps / 2
    assert bool((wrong <= half_step + 1e-5).all() if dtype == torch.bfloat16 else (wrong < 1e-5).all())


# -- folders ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tiny model, which tests may change and change back."""
    return shutil.copytree(tiny_model, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def policy(base_model: Path) -> Policy:
    return with_adapters(base_model)


@pytest.fixture(scope="module")
def folder(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapter")
    assert policy.base is not None
    tensors = {name: p.detach().clone() for name, p in policy.model.named_parameters() if p.requires_grad}
    save_adapters(policy.model, tensors, out, policy.base)
    return out


def test_peft_opens_the_folder(policy: Policy, folder: Path, base_model: Path, groups: list[WeighedGroup]) -> None:
    from peft import PeftModel

    opened: Any = PeftModel.from_pretrained(load_reference(base_model), folder)
    assert not any(parameter.requires_grad for parameter in opened.parameters())
    theirs = padded_logps(opened.get_base_model(), groups, temperature=0.7)
    with torch.no_grad():
        logp_K, _ = policy(row_of(policy, groups))
    torch.testing.assert_close(logp_K, torch.cat([x for row in theirs for x in row]), atol=1e-5, rtol=0)


def test_a_folder_merges_to_the_learners_weights_bit_for_bit(policy: Policy, folder: Path) -> None:
    check_model_folder(folder)
    check_weights(folder)
    again = dict(load_merged(folder).named_parameters())
    expected = merged(policy)
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], weight) for name, weight in expected.items())


def test_a_part_has_a_rank_of_its_own(tiny_model: Path, groups: list[WeighedGroup], tmp_path: Path) -> None:
    """As PEFT reads the folder, and as it merges; every part has the scaling alpha / rank."""
    from peft import PeftModel

    config = LoraConfig(
        rank=4, alpha=6, rank_by_part={"tower": 2, "merger": 7}, targets=["merger", "q_proj", "tower"]
    )
    policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=[], temperature=0.7)
    expected = num_adapter_parameters(policy.model, config)
    policy.add_adapters(config, base=BaseModel(str(tiny_model), weights_sha256(tiny_model)), seed=5)
    move(policy)
    trained = {name: p.detach() for name, p in policy.model.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == expected
    ranks = {(policy.family.part_of(name), len(p)) for name, p in trained.items() if ".lora_A." in name}
    assert ranks == {("tower", 2), ("merger", 7), ("language_model", 4)}
    assert describe(policy.model, config).startswith("adapters: rank 4 (merger 7, tower 2) on ")
    assert {source.scaling for _, source in weight_sources(policy.model)} == {0.0, 1.5}

    assert policy.base is not None
    save_adapters(policy.model, trained, tmp_path, policy.base)
    again, own = dict(load_merged(tmp_path).named_parameters()), merged(policy)
    assert again.keys() == own.keys() and all(torch.equal(again[name], weight) for name, weight in own.items())
    opened: Any = PeftModel.from_pretrained(load_reference(tiny_model), tmp_path)
    theirs = padded_logps(opened.get_base_model(), groups, temperature=0.7)
    with torch.no_grad():
        logp_K, _ = policy(row_of(policy, groups))
    torch.testing.assert_close(logp_K, torch.cat([x for row in theirs for x in row]), atol=1e-5, rtol=0)


def test_a_different_base_model_is_refused_by_name(folder: Path, base_model: Path, tiny_model: Path) -> None:
    weights = base_model / "model.safetensors"
    model = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    model.save_pretrained(base_model)
    try:
        with pytest.raises(UserError, match=rf"{folder} was trained on the weights \w{{12}} of {base_model}, and"):
            check_weights(folder)
    finally:
        shutil.copyfile(tiny_model / weights.name, weights)
    check_weights(folder)
    base_model.rename(base_model.with_name("away"))
    try:
        with pytest.raises(UserError, match=f"{folder} holds an adapter of the model in {base_model}, which is not"):
            check_model_folder(folder)
    finally:
        base_model.with_name("away").rename(base_model)


def test_an_adapter_that_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors = load_file(broken / "adapter_model.safetensors")
    name = next(name for name in tensors if "1.mlp.up_proj.lora_B" in name)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, broken / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"does not fit its base model .*layers\.1\.mlp\.up_proj"):
        load_merged(broken)
    (broken / BASE_MODEL).write_text("[]")
    with pytest.raises(UserError, match=f"{broken} holds an adapter without a readable base_model.json"):
        check_model_folder(broken)


# -- configuration ---------------------------------------------------------------------------------


def config_with(**model: Any) -> Any:
    return parse_config({"out": "x", "model": {"path": "m", **model}, "data": {"train": ["d"]}})


def test_what_a_configuration_may_say() -> None:
    assert config_with().model.lora is None
    assert config_with(lora={}).model.lora == LoraConfig(rank=16, alpha=32, targets=["language_model"])
    assert config_with(lora={"rank": 8, "alpha": 8}, freeze=["tower", "merger"]).model.lora.alpha == 8
    for lora, message in (
        ({"dropout": 0.05}, r"model\.lora: dropout is 0\.05, and the sampler has none"),
        ({"rank": 0}, r"model\.lora\.rank is 0"),
        ({"targets": []}, r"model\.lora\.targets is \[\]"),
        ({"rank_by_part": {"tower": 8}}, r"rank_by_part names tower, where targets gives no adapters"),
        ({"r": 8}, r"unknown key model\.lora\.r: "),
    ):
        with pytest.raises(UserError, match=message):
            config_with(lora=lora)
    for targets in (["tower"], ["merger", "tower"]):
        with pytest.raises(UserError, match=r"freeze names tower, and lora\.targets gives adapters there"):
            config_with(freeze=["tower"], lora={"targets": targets})
    with pytest.raises(UserError, match=r"freeze names language_model, and lora\.targets gives adapters there"):
        config_with(freeze=["language_model"], lora={"targets": ["q_proj"]})


def test_a_text_model_gets_adapters_too(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen2", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = with_adapters(tmp_path)
    assert len(adapted(policy)) == 2 * 7
    assert isinstance(policy.model.lm_head, nn.Linear)  # the output head is not a part of it
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
