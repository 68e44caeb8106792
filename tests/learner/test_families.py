"""Every model type that the learner accepts gives the log-probs of the unmodified model; all others are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.families import build_family
from tests.helpers.family_rows import BANNED, TEMPERATURE, groups_of, packed_row, text_prompt, unmodified_logp
from tests.helpers.groups import WeighedGroup, load_reference, random_group
from tests.helpers.videos import LONG, SHORT, VIDEO_TYPES, video_problem
from vlm_rl.config import ModelConfig, ModelPart, RowFormat
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.vision.gemma3 import Gemma3
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import SUPPORTED, Family, check_architecture, check_parts, check_routing
from vlm_rl.learner.head import Head
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.self_check import SelfCheck
from vlm_rl.model_files.weights import is_used, used_parameters
from vlm_rl.templates import TEMPLATES

TOLERANCE = 3e-5  # of log-probs, and of a gradient's distance over its norm; up to 1.2e-5 on some processors
FamilyModel = Callable[[str], Path]  # the fixture family_model


def load_policy(folder: Path, rows: RowFormat = "auto") -> Policy:
    return Policy(
        load_model(folder, dtype=torch.float32, rows=rows), banned_ids=BANNED, temperature=TEMPERATURE, rows=rows
    )


def check_gradients(policy: Policy, reference: Any, *, only: ModelPart | None = None) -> None:
    """Compare the gradients of all parameters, or of those of one part."""
    parts = policy.family.parts if only is None else (only,)
    wanted, ours = (
        {name: p.grad for name, p in model.named_parameters() if policy.family.part_of(name) in parts}
        for model in (reference, policy.model)
    )
    assert wanted.keys() == ours.keys()
    unused = {name for name in ours if not is_used(policy.model.config, name)}
    assert {name for name, grad in wanted.items() if grad is None} == unused
    pairs = [(ours[name], grad) for name, grad in wanted.items() if name not in unused]
    square = sum(float((own - grad).double().square().sum()) for own, grad in pairs)
    norm = sum(float(grad.double().square().sum()) for _, grad in pairs) ** 0.5
    assert norm > 0 and square**0.5 < TOLERANCE * norm


def check_equal(policy: Policy, reference: Any, groups: Sequence[WeighedGroup]) -> None:
    """Compare log-probs and gradients of one row with those of the unmodified model."""
    logp_K, _ = policy(packed_row(policy, groups))
    expected_K = unmodified_logp(reference, groups)
    torch.testing.assert_close(logp_K, expected_K, atol=TOLERANCE, rtol=0)
    logp_K.sum().backward()
    expected_K.sum().backward()
    check_gradients(policy, reference)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_packed_rows_equal_the_unmodified_model(model_type: str, family_model: FamilyModel) -> None:
    """One row of several prompts: log-probs, and gradients of every weight."""
    folder = family_model(model_type)
    policy, reference = load_policy(folder), load_reference(folder)
    groups = groups_of(model_type, folder, policy.model.config.get_text_config().vocab_size)
    check_equal(policy, reference, groups)


def test_gemma_4_without_experts_equals_the_unmodified_model(tiny_model: Path, tmp_path: Path) -> None:
    """As 31B has none; to replay routing is refused there."""
    dense = {"enable_moe_block": False, "num_experts": None, "top_k_experts": None}
    folder = build_family("gemma4", tmp_path / "dense", tokenizer_of=tiny_model, **dense)
    policy, reference = load_policy(folder), load_reference(folder)
    config = policy.model.config
    check_equal(policy, reference, groups_of("gemma4", folder, config.get_text_config().vocab_size))
    with pytest.raises(UserError, match="a gemma4 model has no experts"):
        check_routing(config, replay=True)


@pytest.mark.parametrize("model_type", VIDEO_TYPES)
def test_videos_equal_the_unmodified_model(model_type: str, family_model: FamilyModel) -> None:
    """Beside images and text in one row; and with the features of a frozen tower."""
    folder = family_model(model_type)
    policy, reference = load_policy(folder), load_reference(folder)
    builder = PromptBuilder(folder, template=TEMPLATES["plain"])
    groups = groups_of(model_type, folder, size := policy.model.config.get_text_config().vocab_size)
    for problem in (video_problem(SHORT, [0, 0.25]), video_problem(SHORT, question="<image> then <video>")):
        groups.append(random_group(builder.build(problem), [6, 3], vocabulary=size, seed=9, banned=BANNED))
    row = packed_row(policy, groups)
    with torch.no_grad():
        features, (logp_K, _) = policy(row, only_features=True), policy(row)
        torch.testing.assert_close(policy(replace(row, vision={"image_features": features}))[0], logp_K)
    check_equal(policy, reference, groups)


def test_the_self_check_sees_images_read_causally(family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Gemma 3 the tokens of an image attend to each other; behind a window too, which these prompts exceed."""
    folder = family_model("gemma3")
    model = load_model(folder, dtype=torch.float32)
    prompts = [group.prompt for group in groups_of("gemma3", folder, model.config.get_text_config().vocab_size)]
    check = SelfCheck(model, prompts, banned_ids=BANNED, temperature=TEMPERATURE)
    policy = Policy(model, banned_ids=BANNED, temperature=TEMPERATURE)
    check.compare(policy, path=folder)
    monkeypatch.setattr(Gemma3, "row_masks", lambda *_, **__: None)
    with pytest.raises(UserError, match="log-probs differ"):
        check.compare(policy, path=folder)


@pytest.mark.parametrize("model_type", ["gemma3", "idefics3", "internvl", "qwen2_5_vl", "qwen3_vl"])
def test_features_of_a_frozen_tower_give_the_same(model_type: str, family_model: FamilyModel) -> None:
    """For a row of images and for one of text alone, which has no features."""
    folder = family_model(model_type)
    policy, reference = load_policy(folder), load_reference(folder)
    policy.freeze(["tower", "merger"])
    groups = groups_of(model_type, folder, policy.model.config.get_text_config().vocab_size)
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


@pytest.mark.parametrize(
    "model_type",
    [
        "gemma3",
        "gemma4",
        "glm4v",
        "idefics3",
        "internvl",
        "llava",
        "llava_onevision",
        "mistral3",
        "qwen2_vl",
        "qwen3_vl",
        "smolvlm",
    ],
)
def test_a_text_row_reaches_every_weight(model_type: str, family_model: FamilyModel) -> None:
    """ZeRO's collectives would wait forever for one that it does not reach; none of the tower's may move."""
    policy = load_policy(family_model(model_type))
    groups = groups_of(model_type, family_model(model_type), policy.model.config.get_text_config().vocab_size)
    policy(packed_row(policy, groups[:1]))[0].sum().backward()
    for name, parameter in used_parameters(policy.model):
        assert parameter.grad is not None, name
        assert policy.family.part_of(name) == "language_model" or not parameter.grad.any(), name


@pytest.mark.filterwarnings("error:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", [{}, {"zero_stage": 3}, {"zero_stage": 3, "only_mlps": True}])
@pytest.mark.parametrize(
    ("model_type", "freeze"),
    [
        ("qwen3_vl", ["tower"]),
        ("qwen3_vl", ["language_model"]),
        ("idefics3", ["tower"]),
        ("internvl", ["merger"]),
        ("gemma3", ["tower"]),
        ("glm4v", ["merger"]),
        ("llava_onevision", ["merger"]),
    ],
)
def test_checkpointing_changes_no_gradient_where_parts_are_frozen(
    model_type: str, freeze: list[ModelPart], how: dict[str, Any], family_model: FamilyModel
) -> None:
    folder, gradients = family_model(model_type), []
    for checkpointing in (False, True):
        policy = load_policy(folder)
        policy.freeze(freeze)
        if checkpointing:
            policy.enable_checkpointing(**how)
        groups = groups_of(model_type, folder, policy.model.config.get_text_config().vocab_size)
        for part in (groups[:1], groups[1:]):  # text alone, too
            policy(packed_row(policy, part))[0].sum().backward()
        gradients.append({name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None})
        assert gradients[-1].keys() == {name for name, p in policy.model.named_parameters() if p.requires_grad}
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma2"])
def test_checkpointing_keeps_windows_and_padded_rows(model_type: str, family_model: FamilyModel) -> None:
    policy, reference = load_policy(family_model(model_type)), load_reference(family_model(model_type))
    policy.enable_checkpointing()
    check_equal(policy, reference, groups_of(model_type, Path(), policy.model.config.vocab_size))


# -- mixtures of experts -------------------------------------------------------------------------------


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


# Were these computed in packed rows, the numbers would be wrong; the message names this.
WRONG_WHEN_PACKED = {
    "gemma2": "attn_logit_softcapping 2.0",
}


def self_check(
    folder: Path, *, dtype: torch.dtype = torch.float32, rows: RowFormat = "auto"
) -> tuple[SelfCheck, Policy]:
    """Return the self-check of a model, and its policy."""
    model = load_model(folder, dtype=dtype, rows=rows)
    prompts = [text_prompt(11, seed=0), text_prompt(17, seed=1)]
    check = SelfCheck(model, prompts, banned_ids=BANNED, temperature=TEMPERATURE)
    return check, Policy(model, banned_ids=BANNED, temperature=TEMPERATURE, rows=rows)


@pytest.mark.parametrize("model_type", WRONG_WHEN_PACKED)
def test_what_packed_rows_compute_wrongly_is_refused_twice(
    model_type: str, family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, and if it were not, by the numbers."""
    monkeypatch.setitem(SUPPORTED, model_type, Family())
    folder = family_model(model_type)
    with pytest.raises(UserError, match=f"{WRONG_WHEN_PACKED[model_type]}.*or set model.rows=padded"):
        check_architecture(AutoConfig.from_pretrained(folder), path=folder)
    check, policy = self_check(folder)
    with pytest.raises(UserError, match="log-probs differ from the unmodified model's by"):
        check.compare(policy, path=folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "qwen3", "qwen3_next"])
def test_what_is_right_passes_the_self_check(dtype: torch.dtype, model_type: str, family_model: FamilyModel) -> None:
    check, policy = self_check(family_model(model_type), dtype=dtype)
    check.compare(policy, path="")


def test_a_long_video_passes_the_self_check(family_model: FamilyModel) -> None:
    """Though transformers alone would give other positions to what follows it."""
    folder = family_model("qwen2_5_vl")
    model = load_model(folder, dtype=torch.float32)
    prompt = PromptBuilder(folder, template=TEMPLATES["plain"]).build(video_problem(LONG))
    check = SelfCheck(model, [prompt], banned_ids=BANNED, temperature=TEMPERATURE)
    check.compare(Policy(model, banned_ids=BANNED, temperature=TEMPERATURE), path="")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_sees_a_forgotten_window(dtype: torch.dtype, tmp_path: Path) -> None:
    check, policy = self_check(save_tiny(tmp_path, "mistral", **WINDOW), dtype=dtype)
    policy.window = None
    with pytest.raises(UserError, match="log-probs differ"):
        check.compare(policy, path=tmp_path)


def test_a_type_that_is_not_listed_trains_in_padded_rows(tmp_path: Path) -> None:
    """It is refused where nothing else is asked for, and the message names the way out."""
    config = AutoConfig.from_pretrained(save_tiny(tmp_path, "olmo2", eos_token_id=1))
    with pytest.raises(UserError, match=r"type 'olmo2'.*model\.rows=padded"):
        check_architecture(config, path=tmp_path)
    check_architecture(config, path=tmp_path, rows="padded")
    check, policy = self_check(tmp_path, rows="padded")
    check.compare(policy, path=tmp_path)


def test_a_language_model_of_an_unknown_type_is_refused_in_a_known_family() -> None:
    """InternVL3.5 comes with gpt-oss too, whose sinks a packed row would leave out without a word."""
    check_architecture(AutoConfig.for_model("internvl", text_config={"model_type": "qwen3"}), path="m")
    with pytest.raises(UserError, match="'internvl' whose language model is of type 'gpt_oss'"):
        check_architecture(AutoConfig.for_model("internvl", text_config={"model_type": "gpt_oss"}), path="m")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
    ],
)
@pytest.mark.parametrize("rows", ["auto", "padded"])
def test_what_no_row_computes_exactly_is_refused(changes: dict[str, Any], words: str, rows: RowFormat) -> None:
    with pytest.raises(UserError, match=f"{words}.*; use a model without it$"):
        check_architecture(AutoConfig.for_model("llama", **{**TINY, **changes}), path="m", rows=rows)


def test_a_head_with_a_bias_is_refused() -> None:
    with pytest.raises(UserError, match="without a bias"):
        Head(torch.nn.Linear(4, 8), banned_ids=(), temperature=1.0)


# -- windows and padded rows ---------------------------------------------------------------------------


# (model type, its configuration, model.rows). Prompts are 11 and 17 tokens, responses 5, 9 and 8.
ROWS: dict[str, tuple[str, dict[str, Any], RowFormat]] = {
    "a window in every layer": ("mistral", WINDOW, "auto"),
    "a window longer than a prompt": ("mistral", {"sliding_window": 14}, "auto"),
    "a window of one token": ("mistral", {"sliding_window": 1}, "auto"),
    "a window in some layers": ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, "auto"),
    "a window, padded": ("mistral", WINDOW, "padded"),
    "sinks": (
        "gpt_oss",
        {**WINDOW, "num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "padded",
    ),
    "a type that is not listed": ("olmo2", {"eos_token_id": 1}, "padded"),
}


@pytest.mark.parametrize("case", ROWS)
def test_windows_and_padded_rows_equal_the_unmodified_model(case: str, tmp_path: Path) -> None:
    model_type, changes, rows = ROWS[case]
    save_tiny(tmp_path, model_type, **changes)
    check_equal(load_policy(tmp_path, rows), load_reference(tmp_path), groups_of(model_type, tmp_path, VOCABULARY))


@pytest.mark.parametrize("model_type", ["internvl", "qwen2_5_vl", "qwen3_5", "qwen3_moe"])
def test_padded_rows_of_a_packed_family_equal_the_unmodified_model(
    model_type: str, family_model: FamilyModel
) -> None:
    """With positions of images in three dimensions, and with routers that count no token of the padding."""
    folder = family_model(model_type)
    policy, reference = load_policy(folder, "padded"), load_reference(folder)
    groups = groups_of(model_type, folder, policy.model.config.get_text_config().vocab_size)
    check_equal(policy, reference, groups)
    if sums := policy.routers.take():
        tokens = sum(len(group.prompt.ids) + length for group in groups for length in group.lengths)
        assert sums["router_tokens"] == 3 * tokens


@pytest.mark.parametrize(
    ("model_type", "settings", "lr_by_part", "words"),
    [
        ("qwen3_vl", {"freeze": ["merger", "tower", "language_model"]}, [], "freeze names tower, merger, language_"),
        ("qwen3", {"freeze": ["language_model"]}, [], "a qwen3 model has no other part"),
        ("qwen3", {}, ["merger"], "train.lr_by_part names merger, which a qwen3 model does not have"),
        ("qwen3_vl", {"freeze": ["tower"]}, ["tower"], "train.lr_by_part names tower, which model.freeze freezes"),
        ("qwen3_vl", {"lora": {}}, ["tower"], "names tower, which model.lora gives no adapter"),
        ("qwen3_vl", {"lora": {"targets": ["tower"]}}, ["language_model"], "names language_model, which model.lora"),
    ],
)
def test_parts_that_cannot_be_trained_so_are_refused(
    model_type: str, settings: Any, lr_by_part: Any, words: str
) -> None:
    config = AutoConfig.for_model(model_type)
    for fine in ({"freeze": ["tower", "merger"]}, {"lora": {}}, {"lora": {"targets": ["q_proj", "tower"]}}):
        check_parts(config, ModelConfig(path="m", **fine), lr_by_part=["language_model"])
    with pytest.raises(UserError, match=words):
        check_parts(config, ModelConfig(path="m", **settings), lr_by_part=lr_by_part)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_every_weight_belongs_to_a_part(model_type: str, family_model: FamilyModel) -> None:
    """A frozen part gets no gradient, and the tower keeps what maps its outputs to the language model apart."""
    policy = load_policy(family_model(model_type))
    parts = {name: policy.family.part_of(name) for name, _ in used_parameters(policy.model)}
    assert {*parts.values()} == {*policy.family.parts}
    for part in policy.family.parts:
        policy.freeze([part])
        frozen = {name for name, p in used_parameters(policy.model) if not p.requires_grad}
        assert frozen == {name for name, own in parts.items() if own == part}
        policy.requires_grad_(True)
    widths = {p.shape[0] for n, p in used_parameters(policy.model) if parts[n] == "merger" and p.ndim == 2}
    assert policy.vision is None or policy.model.config.get_text_config().hidden_size in widths
