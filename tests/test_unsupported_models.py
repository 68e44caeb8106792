"""A model that is not supported gives one message in every command, never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from tests.helpers.images import noise_png
from tests.helpers.prepared_sets import write_problems
from vlm_rl import cli
from vlm_rl.config import TrainConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.learner.sft import warm_start
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

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
    "internvl": {
        "vision_config": {**TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
        "text_config": {"model_type": "qwen2", **TEXT},
    },
    "smolvlm": {
        "vision_config": {**TOWER, "image_size": 28, "patch_size": 14},
        "text_config": {"model_type": "llama", **TEXT},
        "pad_token_id": 0,
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


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return a prepared set of text, and one with images under True."""
    folder = tmp_path_factory.mktemp("sets")
    plain = [Problem(f"p{n}", f"What is {n} + 1?", (), str(n + 1), "integer") for n in range(4)]
    pictures = [Problem(f"p{n}", "<image>How many?", (noise_png(84, 84, n),), "1", "integer") for n in range(4)]
    return {
        False: write_problems(plain, folder / "text", {}),
        True: write_problems(pictures, folder / "images", {}),
    }


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail as a user's mistake, and return its message."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert cli.main([str(argument) for argument in arguments]) == 2
        (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vlm-rl: ")]
        return message

    return run


@pytest.mark.parametrize("model_type", [*TEXT_MODELS, *VISION_MODELS])
def test_an_unsupported_model_gives_one_message(
    model_type: str, tiny_model: Path, sets: dict[bool, Path], tmp_path: Path, refusal: Callable[..., str]
) -> None:
    model = save_odd(tmp_path / "model", model_type, tiny_model)
    data = sets[model_type in VISION_MODELS]
    config = tmp_path / "config.yaml"
    config.write_text(
        f"out: {tmp_path / 'run'}\nmodel: {{path: {model}}}\n"
        f"data: {{train: [{data}], max_prompt_tokens: 256, template: plain}}\n"
        "rollout: {prompts_per_step: 2, responses_per_prompt: 2, max_tokens: 8}\nreward: {overlong_buffer: 4}\n"
        "train: {steps: 1, mini_batch_prompts: 2, micro_batch_tokens: 512}\n"
    )
    asked = f"type '{model_type}'"
    for engine in ("transformers", "vllm"):
        assert asked in refusal("train", config, f"rollout.sampler={engine}")
    dry_run = refusal("train", config, "--dry-run")
    assert asked in dry_run or model_type == "mamba2"  # whose infinite limit of the time step only its file can hold
    if model_type != "gpt2":  # which the samplers can run
        command = ("eval", "--model", model, "--data", data, "--out", tmp_path / "eval", "--template", "plain")
        for engine in ("transformers", "vllm"):
            assert asked in refusal(*command, "--sampler", engine)
    with pytest.raises(UserError, match=asked):
        builder = PromptBuilder(model, template=TEMPLATES["plain"])
        warm_start([], tmp_path / "sft", model_path=model, builder=builder, config=TrainConfig(), batch_size=1)
    assert not (tmp_path / "run").exists() and not (tmp_path / "eval").exists() and not (tmp_path / "sft").exists()
