"""Text models that transformers knows need no code here: packed rows give the log-probs of the unmodified model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.helpers.groups import pack, random_group
from vlm_rl.data.prompts import rope_positions
from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.types import Prompt

FAMILIES = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
VOCABULARY, BANNED, TEMPERATURE = 97, [3], 0.7


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_the_unmodified_model(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family](
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = Policy(load_model(tmp_path, dtype=torch.float32), banned_ids=BANNED, temperature=TEMPERATURE)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    ids = np.arange(10, 21, dtype=np.int32)
    prompt = Prompt("p", text="", prefill="", ids=ids, sampler_ids=ids, images=(), vision={})
    group = random_group(prompt, [7, 3], vocabulary=VOCABULARY, seed=0, banned=BANNED)

    row = pack([Chunk(0, (0, 1))], [group], lambda prompt: rope_positions(policy.model, prompt))
    logp_K, _ = policy(row)
    expected_K = torch.cat([unpacked_logp(reference, ids, rollout.ids) for rollout in group.rollouts])
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
