"""Mixtures of experts on vLLM: the layout of published checkpoints, padded and packed experts, and their proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from vlm_rl.data.checkpoint_layout import as_published, use_published_layout
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.fingerprint import StaleWeightsError, check_fresh, fingerprint
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

# 48 wide experts, which the CPU kernel pads to 64, and 2 * 48 is not the hidden size: shapes tell layouts apart.
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TYPES = ("qwen3_moe", "qwen3_vl_moe")


def save_tiny(folder: Path, model_type: str, tiny_model: Path) -> torch.nn.Module:
    """Write a tiny random model of a type in its published layout, with the tiny model's tokenizer, and return it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = {**TEXT, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if model_type == "qwen3_moe":
        config, auto = AutoConfig.for_model(model_type, **text), AutoModelForCausalLM
        tokenizer.save_pretrained(folder)
    else:
        known, processor = AutoConfig.from_pretrained(tiny_model), AutoProcessor.from_pretrained(tiny_model)
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
        config = AutoConfig.for_model(
            model_type,
            text_config={**text, "rope_parameters": rope},
            vision_config=VISION,
            tie_word_embeddings=False,
            **{name: getattr(known, name) for name in names},
        )
        auto = AutoModelForImageTextToText
        size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
        Qwen3VLProcessor(
            image_processor=Qwen2VLImageProcessor(patch_size=16, size=size),
            video_processor=Qwen3VLVideoProcessor(),
            tokenizer=processor.tokenizer,
            chat_template=processor.chat_template,
        ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    use_published_layout(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_the_stream_is_what_the_published_checkpoint_holds(model_type: str, tiny_model: Path, tmp_path: Path) -> None:
    """Equal to the file, whose experts are per expert in Qwen3 and [E, H, 2I], [E, I, H] in Qwen3-VL."""
    model = save_tiny(tmp_path, model_type, tiny_model)
    streamed = dict(as_published(str(tmp_path))(model.named_parameters()))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as saved:
        assert streamed.keys() == set(saved.keys())
        for name, tensor in streamed.items():
            torch.testing.assert_close(tensor, saved.get_tensor(name), rtol=0, atol=0)
    shapes = {
        name.partition("experts.")[2]: list(t.shape) for name, t in streamed.items() if "layers.0.mlp.e" in name
    }
    if model_type == "qwen3_moe":
        assert shapes["3.up_proj.weight"] == [48, 64] and len(shapes) == 3 * 4
    else:
        assert shapes == {"gate_up_proj": [4, 64, 96], "down_proj": [4, 48, 64]}
    again = type(model).from_pretrained(tmp_path)
    assert fingerprint(again.named_parameters()) == fingerprint(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_synced_experts_are_multiplied_with_and_proven(model_type: str, tiny_model: Path, tmp_path: Path) -> None:
    """A reload alone leaves them unpacked (log-probs off by 7.8), or fails where they are padded."""
    pytest.importorskip("vllm")
    model = save_tiny(tmp_path, model_type, tiny_model)
    builder = PromptBuilder(tmp_path, template=TEMPLATES["plain"], min_pixels=4096, max_pixels=65_536)
    sampler = make_sampler(
        "vllm", model_path=str(tmp_path), builder=builder, max_model_len=512, batch_size=4, dtype=torch.float32
    )
    check_fresh(sampler, fingerprint(model.named_parameters()))
    problem = Problem(id="p", question="What is it?", images=(), answer="4", answer_type="integer")
    prompt = builder.build(problem)
    for version in (1, 2):
        for parameter in model.parameters():
            parameter.mul_(1.05)
        sampler.load_weights(model.named_parameters(), version=version)
        check_fresh(sampler, fingerprint(model.named_parameters()))
        params = SamplingParams(temperature=1.0, max_tokens=8, responses=2)
        for rollout in sampler.generate([prompt], params, seed=0, step=0)[0]:
            ids = torch.from_numpy(np.concatenate([prompt.ids, rollout.ids]).astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0, len(prompt.ids) - 1 : -1]
            logits[:, list(builder.banned_ids)] = -float("inf")
            expected = logits.log_softmax(1).numpy()[np.arange(len(rollout.ids)), rollout.ids]
            np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4, rtol=0)
    experts = next(p for name, p in model.named_parameters() if name.endswith("1.mlp.experts.gate_up_proj"))
    experts.copy_(experts[[1, 0, 2, 3]])  # the same numbers in each other's place
    with pytest.raises(StaleWeightsError, match="does not hold the learner's weights"):
        check_fresh(sampler, fingerprint(model.named_parameters()))
    sampler.close()
