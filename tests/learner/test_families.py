"""Every model type that the learner accepts gives the log-probs of the unmodified model; all others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2VLConfig

from tests.helpers.groups import make_prompt, noise_image, pack, padded_logps, random_group
from vlm_rl.data.prompts import rope_positions
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import SUPPORTED, check_architecture
from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.self_check import SelfCheck
from vlm_rl.types import Prompt

VOCABULARY, BANNED, TEMPERATURE = 97, [3], 0.7
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
TEXT_TYPES = [name for name in SUPPORTED if not name.endswith("_vl")]
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def save_tiny(folder: Path, model_type: str, **changes: Any) -> Path:
    """Write a tiny random text model of a type."""
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def text_prompt(length: int, seed: int) -> Prompt:
    ids = np.random.default_rng(seed).integers(10, 90, length).astype(np.int32)
    return Prompt(f"p{seed}", text="", prefill="", ids=ids, sampler_ids=ids, images=(), vision={})


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_packed_rows_equal_the_unmodified_model(model_type: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, model_type)
    policy = Policy(load_model(tmp_path, dtype=torch.float32), banned_ids=BANNED, temperature=TEMPERATURE)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    prompt = text_prompt(11, seed=0)
    group = random_group(prompt, [7, 3], vocabulary=VOCABULARY, seed=0, banned=BANNED)

    row = pack([Chunk(0, (0, 1))], [group], lambda prompt: rope_positions(policy.model, prompt))
    logp_K, _ = policy(row)
    expected_K = torch.cat([unpacked_logp(reference, prompt.ids, rollout.ids) for rollout in group.rollouts])
    torch.testing.assert_close(logp_K, expected_K, atol=1e-5, rtol=0)
    logp_K.sum().backward()
    expected_K.sum().backward()
    gradients = dict(reference.named_parameters())
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, atol=1e-4, rtol=1e-4, msg=name)


def unpacked_logp(model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """Return the log-probs of one response's tokens, the response alone behind its prompt."""
    tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    logits[:, BANNED] = float("-inf")
    return logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]


def test_qwen2_vl_packs_as_the_unmodified_model(tiny_model: Path, tmp_path: Path) -> None:
    """Its processor is Qwen2.5-VL's; its vision tower is different."""
    known = AutoConfig.from_pretrained(tiny_model)
    config = Qwen2VLConfig(
        text_config=known.text_config.to_dict() | {"model_type": "qwen2_vl_text"},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": known.text_config.hidden_size, "num_heads": 2},
        image_token_id=known.image_token_id,
        video_token_id=known.video_token_id,
        vision_start_token_id=known.vision_start_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    banned = [known.image_token_id, known.video_token_id]
    policy = Policy(load_model(tmp_path, dtype=torch.float32), banned_ids=banned, temperature=1.0)
    reference = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="sdpa")
    groups = [
        random_group(
            make_prompt(tiny_model, "How many?", [noise_image(84, 112, seed)] if seed else []),
            [5, 9],
            vocabulary=known.text_config.vocab_size,
            seed=seed,
            banned=banned,
        )
        for seed in range(2)
    ]
    row = pack([Chunk(g, (0, 1)) for g in (0, 1)], groups, lambda prompt: rope_positions(policy.model, prompt))
    logp_K, _ = policy(row)
    expected_K = torch.cat([logp for group in padded_logps(reference, groups, banned=banned) for logp in group])
    torch.testing.assert_close(logp_K, expected_K, atol=1e-5, rtol=0)
    logp_K.sum().backward()
    expected_K.sum().backward()
    gradients = dict(reference.named_parameters())
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, atol=1e-4, rtol=1e-4, msg=name)


# -- what is refused -----------------------------------------------------------------------------------

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
