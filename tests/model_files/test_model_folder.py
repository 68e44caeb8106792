"""Whole weights pass in every spelling that transformers reads; damaged ones are refused by file and tensor."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.model_files.model_folder import check_model_folder, open_tokenizer, weight_files
from vlm_rl.model_files.weights import check_weights, stored_tensors
from vlm_rl.templates import TEMPLATES

Tensors = dict[str, torch.Tensor]
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny Qwen2.5-VL, whose embeddings are tied."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[Tensors], object], file: str = "model.safetensors") -> None:
    """Change a file's tensors in place; the file's metadata stays as transformers wants it."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def untie(folder: Path) -> None:
    """Give the model an output head of its own."""
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"]):
        part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        check_model_folder(folder)
        check_weights(folder)
    assert str(raised.value).startswith("model.path")
    return str(raised.value)


# -- whole models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_text_model_passes(tmp_path: Path, tied: bool) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    check_weights(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    rewrite(tmp_path, lambda t: t.pop("model.norm.weight"))
    assert "model.safetensors: tensor 'model.norm.weight' is missing: get the model again" in refused(tmp_path)


def test_a_vision_model_passes_tied_and_untied_in_shards_and_under_newer_names(folder: Path) -> None:
    check_weights(folder)
    untie(folder)
    check_weights(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="500KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    check_weights(folder)
    shutil.rmtree(folder / "again", ignore_errors=True)
    newer = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "model.language_model.norm.weight" in newer  # the files say model.norm.weight
    for file in folder.glob("model*"):
        file.unlink()
    save_file(newer, folder / "model.safetensors", metadata={"format": "pt"})
    check_weights(folder)


def test_half_precision_passes(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({name: tensor.to(torch.bfloat16) for name, tensor in t.items()}))
    check_weights(folder)


# -- damaged ones --------------------------------------------------------------------------------------


def poison(tensors: Tensors, value: float) -> None:
    tensors[NORM][7] = value


DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(NORM), "input_layernorm.weight' is missing"),
    "two missing": (lambda t: [t.pop(name) for name in list(t)[1:3]], "is missing and 1 more"),
    "unexpected": (lambda t: t.update(extra=torch.ones(2)), "tensor 'extra' is not one of the model's"),
    "renamed": (lambda t: t.update(norm=t.pop(NORM)), "input_layernorm.weight' is missing and 1 more"),
    "shape": (lambda t: t.update({NORM: torch.ones(3)}), "has the shape [3], and the model needs [128]"),
    "NaN": (lambda t: poison(t, float("nan")), f"tensor '{NORM}' holds NaN or infinity"),
    "infinity": (lambda t: poison(t, -float("inf")), f"tensor '{NORM}' holds NaN or infinity"),
    "empty": (lambda t: t.clear(), "is missing and 68 more"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tensors_are_refused_by_file_and_name(folder: Path, name: str) -> None:
    change, message = DAMAGES[name]
    rewrite(folder, change)
    text = refused(folder)
    assert message in text and str(folder / "model.safetensors") in text


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_cut_files_are_refused_by_name(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert re.match(f"model.path: {file} is cut or damaged .*: get the model again", refused(folder))


# -- what is checked is what is loaded ---------------------------------------------------------------


def set_key(folder: Path, key: str, value: object, part: str | None = None) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config if part is None else config[part])[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def with_second_file(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")


def with_index(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def twice_in_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": {NORM: tensors[NORM]}}
    for name, held in shards.items():
        save_file(held, folder / name, metadata={"format": "pt"})
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    (folder / "base_model.json").write_text(json.dumps({"path": str(folder), "weights_sha256": ""}))


def pipe_among_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "tool.jinja")


LEADS_ELSEWHERE: dict[str, tuple[Callable[[Path], object], str]] = {
    "key": (lambda f: set_key(f, "transformers_weights", "other.safetensors"), "has transformers_weights"),
    "deep key": (
        lambda f: set_key(f, "transformers_weights", "other.safetensors", "text_config"),
        "has transformers_weights",
    ),
    "quantized": (
        lambda f: set_key(f, "quantization_config", {"load_in_4bit": True}),
        "has a quantization_config",
    ),
    "kernel": (lambda f: set_key(f, "_attn_implementation", "someone/kernel"), "run a kernel from a hub"),
    "inner kernel": (
        lambda f: set_key(f, "_attn_implementation_internal", {"text_config": "someone/kernel"}, "text_config"),
        "run a kernel from a hub",
    ),
    "version": (
        lambda f: set_key(f, "configuration_files", ["config.4.0.0.json"]),
        "has configuration_files",
    ),
    "tokenizer of a version": (
        lambda f: (f / "tokenizer_config.json").write_text('{"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}'),
        "has fast_tokenizer_files",
    ),
    "audio": (
        lambda f: (f / "processor_config.json").write_text('{"audio_tokenizer": {}}'),
        "has an audio_tokenizer",
    ),
    "backbone": (lambda f: set_key(f, "backbone", "somebody/model"), "has a backbone, which names a second model"),
    "speculators": (lambda f: set_key(f, "speculators_config", {"verifier": {}}), "has a speculators_config"),
    "compressed": (lambda f: set_key(f, "compression_config", {"bits": 4}), "has a compression_config"),
    "quantized beside": (lambda f: (f / "hf_quant_config.json").write_text("{}"), "has hf_quant_config.json"),
    "deep": (
        lambda f: (f / "generation_config.json").write_text('{"a": ' + "[" * 300 + "]" * 300 + "}"),
        "is nested more than 100 deep",
    ),
    "pipe among templates": (pipe_among_templates, "tool.jinja is no file"),
    "second file": (with_second_file, "holds other.safetensors beside model.safetensors"),
    "whole and index": (with_index, "loaders differ in which they read"),
    "twice": (twice_in_shards, "is in an earlier file as well"),
    "adapter": (with_adapter, "holds an adapter and whole weights"),
    "pipe": (lambda f: os.mkfifo(f / "notes.txt"), "notes.txt is no file"),
    "device": (lambda f: (f / "extra.json").symlink_to("/dev/zero"), "extra.json is no file"),
    "dead link": (lambda f: (f / "generation_config.json.old").symlink_to("nothing"), "is no file"),
}


@pytest.mark.parametrize("name", LEADS_ELSEWHERE)
def test_what_leads_a_loader_to_unchecked_weights_is_refused(folder: Path, name: str) -> None:
    change, message = LEADS_ELSEWHERE[name]
    change(folder)
    assert message in refused(folder)


def test_an_adapter_of_an_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copy(folder / "config.json", adapter)
    save_file({"a": torch.ones(1)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "base_model.json").write_text(json.dumps({"path": str(folder), "weights_sha256": ""}))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="which holds an adapter itself"):
        check_model_folder(adapter)


def test_leftovers_beside_an_index_are_read_by_no_loader(folder: Path) -> None:
    with_index(folder)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    check_model_folder(folder)
    assert [file.name for file in weight_files(folder)] == ["model-00001-of-00001.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stored_tensors_are_those_that_transformers_loads(folder: Path, dtype: torch.dtype) -> None:
    loaded = dict(AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).named_parameters())
    stored = dict(stored_tensors(folder, dtype=dtype))
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], loaded[name]) and stored[name].dtype == dtype for name in loaded)


# -- damage ------------------------------------------------------------------------------------------


def test_a_file_under_another_name_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "holds weights.safetensors, which no loader reads without an index" in refused(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {NORM: "model-00001-of-00002.safetensors"}}, "model-00001-of-00002.safetensors is missing"),
        ({"weight_map": {NORM: 3}}, "points at 3"),
        ({"weight_map": []}, "has no weight_map"),
        ({}, "has no weight_map"),
    ],
)
def test_a_damaged_index_is_refused(folder: Path, index: object, message: str) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert message in refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 4},
        {"num_attention_heads": 0},
        {"num_attention_heads": "four"},
        {"vocab_size": -1},
        {"hidden_act": "no such"},
        {"layer_types": ["nonsense"] * 3},
        None,
    ],
    ids=str,
)
def test_a_configuration_of_another_model_is_refused(folder: Path, change: dict[str, object] | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] = None if change is None else {**config["text_config"], **change}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    size = config["text_config"]["vocab_size"]
    config["text_config"]["vocab_size"] = size - 1
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:-1].clone()}))
    check_weights(folder)
    with pytest.raises(UserError, match=f"ids up to {size - 1}, and the model's vocabulary has {size - 1} entries"):
        PromptBuilder(folder, template=TEMPLATES["think_answer"])


REPLACES = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99}] * 6,
}


TABLE = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"ab\0" + b"x" * 100 + b"\0").decode()
REPEATED = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X"}}] * 8}
REPEATED |= {"special_tokens": {"X": {"id": "X", "ids": [1] * 9, "tokens": ["a"] * 9}}}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("normalizer", {"type": "Prepend", "prepend": "a" * 10**6}, "normalizer makes a text up to 1e[+]06 times"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": TABLE}, "up to 100 times"),
        (
            "pre_tokenizer",
            {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False}] * 4},
            "pre_tokenizer makes a text up to 256 times",
        ),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}] * 7}, "up to 128 times"),
        ("post_processor", REPEATED, "post_processor makes a text up to 72 times"),
        ("model", {"type": "WordPiece", "continuing_subword_prefix": "#" * 99}, "model makes a text up to 99 times"),
        ("normalizer", REPLACES, r"its normalizer makes a text up to 9\.41e\+11 times as long"),
        (
            "decoder",
            {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 64},
            "decoder makes a text up to 65",
        ),
        ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, ""),
        ("normalizer", [5], "cannot be opened"),
    ],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(folder: Path, part: str, value: object, message: str) -> None:
    tree = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tree, part: value}))
    if not message:
        check_model_folder(folder)
        return
    with pytest.raises(UserError, match=message):
        check_model_folder(folder)
        open_tokenizer(str(folder), is_vision=True)


@pytest.mark.parametrize("named", ["AutoTokenizer", "AutoModel"])
def test_a_processor_of_another_kind_is_refused(folder: Path, named: str) -> None:
    """transformers takes any class of its own by name; these have no tokenizer."""
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": named}))
    with pytest.raises(UserError, match="its tokenizer or processor cannot be opened"):
        open_tokenizer(str(folder), is_vision=True)


def test_parts_of_a_tokenizer_that_multiply_together_are_refused(folder: Path) -> None:
    """None does so by more than 64, and 16,000 characters would take 1.4 GB."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    normalizer = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 64}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [byte_level] * 3}
    tree = json.loads((folder / "tokenizer.json").read_text())
    for alone in ({"normalizer": normalizer, "pre_tokenizer": None}, {"pre_tokenizer": pre_tokenizer}):
        (folder / "tokenizer.json").write_text(json.dumps(tree | alone))
        check_model_folder(folder)
    together = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    (folder / "tokenizer.json").write_text(json.dumps(tree | together))
    with pytest.raises(UserError, match=r"pre_tokenizer, model together make a text up to 4\.1e\+03 times as long"):
        check_model_folder(folder)


def test_the_tokenizer_that_was_checked_is_opened_beside_one_of_mistrals(
    family_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers would take tekken.json for a model of this type, which nobody checked and vLLM is not given."""
    common = Path(pytest.importorskip("mistral_common").__file__).parent
    folder = Path(shutil.copytree(family_model("mistral"), tmp_path / "mistral"))
    _, expected = open_tokenizer(str(folder), is_vision=False)
    shutil.copy(common / "data" / "tekken_240911.json", folder / "tekken.json")
    _, tokenizer = open_tokenizer(str(folder), is_vision=False)
    assert tokenizer.get_vocab() == expected.get_vocab()
    assert tokenizer.chat_template == expected.chat_template
