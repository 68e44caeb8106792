"""Tiny random models of types that are not supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
    },
}
VISION_MODELS: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": {"model_type": "clip_vision_model", **TOWER, "image_size": 28, "patch_size": 14},
        "text_config": {"model_type": "llama", **TEXT},
    },
}


def save_odd(folder: Path, model_type: str, tiny_model: Path) -> Path:
    """Write a tiny random model of a type, with the tiny model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(folder)
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    if model_type in VISION_MODELS:
        settings = VISION_MODELS[model_type]
        text = {**settings["text_config"], "vocab_size": len(tokenizer)}
        name = "image_token_index" if model_type == "llava" else "image_token_id"
        config = AutoConfig.for_model(model_type, **{**settings, "text_config": text, name: image})
        auto: Any = AutoModelForImageTextToText
    else:
        end = {"bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
        config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **TEXT_MODELS[model_type], **end)
        auto = AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto.from_config(config).save_pretrained(folder)
    return folder
