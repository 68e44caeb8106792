"""What replayed routing is worth: the gap between sampler and learner in bfloat16, with and without it.

    OMP_NUM_THREADS=2 python perf/routing.py

A random Qwen3 with experts answers prompts in the transformers engine, and the learner computes the same tokens in
packed rows: the two round differently. Random routers are closer to a tie than trained ones, so that more tokens
change their experts here than in a trained model.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from weighed_groups import WeighedGroup, pack

from vlm_rl.data.prompts import PromptBuilder, rope_positions
from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.transformers import TransformersSampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.types import Problem

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 64, "norm_topk_prob": True}


def build(folder: Path) -> Path:
    """Write the model with the toy's tokenizer, and return its folder."""
    tiny = build_tiny_model(folder / "tiny", seed=0, tokenizer_texts=SQUARES.tokenizer_texts())
    tokenizer = PromptBuilder(tiny, template=TEMPLATES["plain"]).tokenizer
    config = AutoConfig.for_model(
        "qwen3_moe",
        **SIZES,
        **EXPERTS,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "moe")
    tokenizer.save_pretrained(folder / "moe")
    return folder / "moe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder))
        for dtype in (torch.float32, torch.bfloat16):
            measure(model, dtype, options.prompts, options.tokens)


def measure(model: Path, dtype: torch.dtype, num_prompts: int, num_tokens: int) -> None:
    """Print the gap with and without replay, and the share of experts that was replaced."""
    builder = PromptBuilder(model, template=TEMPLATES["plain"])
    questions = [" ".join(SQUARES.tokenizer_texts()[n : n + 3])[:200] for n in range(num_prompts)]
    problems = [Problem(str(n), text.replace("<image>", ""), (), "4", "integer") for n, text in enumerate(questions)]
    prompts = [builder.build(problem) for problem in problems]
    sampler = TransformersSampler(
        model_path=str(model), builder=builder, max_model_len=1024, batch_size=64, dtype=dtype, returns_routing=True
    )
    rollouts = sampler.generate(prompts, SamplingParams(1.0, num_tokens, 4), seed=0, step=0)
    sampler.close()
    policy = Policy(load_model(model, dtype=dtype), banned_ids=builder.banned_ids, temperature=1.0)
    gaps: dict[str, list[np.ndarray]] = {"replayed": [], "routed by itself": []}
    replaced = routed = 0.0
    for prompt, group in zip(prompts, rollouts, strict=True):
        row = pack(
            [Chunk(0, tuple(range(len(group))))],
            [WeighedGroup(prompt, group, np.ones(len(group)), np.ones(len(group)))],
            lambda prompt: rope_positions(policy.model, prompt),
        )
        sampled_K = np.concatenate([rollout.logprobs for rollout in group])
        for name, seen in (("replayed", row), ("routed by itself", replace(row, experts_TLK=None))):
            logp_K, _ = policy(seen)
            gaps[name].append(np.abs(logp_K.detach().numpy() - sampled_K))
            sums = policy.routers.take()
            replaced += float(sums.get("router_replaced", 0.0))
            routed += float(sums["router_tokens"]) if name == "replayed" else 0.0
    name = str(dtype).removeprefix("torch.")
    print(f"{name}: {replaced / routed:.2%} of the sampler's experts replace the learner's own")
    for way, parts in gaps.items():
        gap_K = np.concatenate(parts)
        print(f"  {way:<17} gap of a token {gap_K.mean():.2e}, 99th percentile {np.quantile(gap_K, 0.99):.2e}")


if __name__ == "__main__":
    main()
