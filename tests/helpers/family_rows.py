"""Groups of responses for a model of any supported type, packed by us and passed through the unmodified model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.families import VISION_FAMILIES
from tests.helpers.groups import WeighedGroup, make_prompt, noise_image, own_inputs, pack, random_group
from vlm_rl.data.prompts import rope_positions
from vlm_rl.learner.packing import Chunk, PackedRow
from vlm_rl.learner.policy import Policy
from vlm_rl.types import Prompt

BANNED, TEMPERATURE = [3], 0.7
WITH_EXPERTS = ("gemma4", "glm4v_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe")
EXPERTS, CHOSEN = 4, 2  # of the tiny models


def groups_of(model_type: str, folder: Path, vocabulary: int) -> list[WeighedGroup]:
    """Return two groups of text or, for a vision model, one of text, one with an image and one with two images."""
    if model_type in VISION_FAMILIES:
        images = [[], [noise_image(84, 112, 1)], [noise_image(200, 64, 2), noise_image(96, 96, 3)]]
        prompts = [make_prompt(folder, f"How many, {n}?", pictures) for n, pictures in enumerate(images)]
    else:
        prompts = [text_prompt(11, seed=0), text_prompt(17, seed=1)]
    return [
        random_group(prompt, [5, 9 - seed], vocabulary=vocabulary, seed=seed, banned=BANNED)
        for seed, prompt in enumerate(prompts)
    ]


def drawn_experts(tokens: int, layers: int, rng: np.random.Generator) -> np.ndarray:
    """Draw different experts for each token and layer, in no order."""
    return rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (tokens, layers, 1)), axis=2)[:, :, :CHOSEN]


def routed(group: WeighedGroup, layers: int, seed: int) -> WeighedGroup:
    """Return the group as a sampler gives it whose routers choose at random."""
    rng = np.random.default_rng(seed)
    prompt_experts = drawn_experts(len(group.prompt.ids), layers, rng)
    rollouts = [
        replace(
            rollout,
            experts=drawn_experts(len(rollout.ids) - 1, layers, rng),
            prompt_experts=prompt_experts if rollout.index == 0 else None,
        )
        for rollout in group.rollouts
    ]
    return replace(group, rollouts=rollouts)


def text_prompt(length: int, seed: int) -> Prompt:
    ids = np.random.default_rng(seed).integers(10, 90, length).astype(np.int32)
    return Prompt(f"p{seed}", text="", prefill="", ids=ids, sampler_ids=ids, images=(), vision={})


def packed_row(policy: Policy, groups: Sequence[WeighedGroup]) -> PackedRow:
    chunks = [Chunk(g, tuple(range(len(group.rollouts)))) for g, group in enumerate(groups)]
    return pack(chunks, groups, lambda prompt: rope_positions(policy.model, prompt))


def unmodified_logp(model: Any, groups: Sequence[WeighedGroup]) -> Tensor:
    """Return the log-probs [K] of all response tokens, each response alone behind its prompt."""
    sampled = [(group.prompt, rollout.ids) for group in groups for rollout in group.rollouts]
    return torch.cat([response_logp(model, *one, banned=BANNED, temperature=TEMPERATURE) for one in sampled])


def response_logp(
    model: Any, prompt: Prompt, ids: np.ndarray, *, banned: Sequence[int] = (), temperature: float = 1.0
) -> Tensor:
    """Return the log-probs of a response's tokens by an unmodified model, alone behind its prompt."""
    tokens = torch.from_numpy(np.concatenate([prompt.ids, ids]).astype(np.int64))
    extra = own_inputs(model, tokens[None], prompt.vision)
    logits = model(input_ids=tokens[None], **extra).logits[0, len(prompt.ids) - 1 : -1] / temperature
    logits[:, [*banned]] = float("-inf")
    return logits.log_softmax(-1).gather(1, tokens[len(prompt.ids) :, None])[:, 0]
