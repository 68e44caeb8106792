"""Groups of random responses on real prompts, and the reference they are compared with.

The reference knows nothing of packing: one padded row per response, its images repeated, through
the unmodified transformers model with its own positions and its own attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_rl.learner.packing import TrainGroup
from vlm_rl.types import Prompt, Rollout


def noise_image(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_prompt(model: Path, text: str, images: Sequence[Image.Image] = ()) -> Prompt:
    """A prompt straight from the Hugging Face processor; one placeholder per image is put first."""
    processor = _processor(model)
    rendered = "<|vision_start|><|image_pad|><|vision_end|>" * len(images) + text
    encoded = processor(text=[rendered], images=list(images) or None, return_tensors="pt")
    sampler_ids = processor.tokenizer(rendered)["input_ids"]
    vision = {key: encoded[key] for key in ("pixel_values", "image_grid_thw") if key in encoded}
    return Prompt(
        problem_id=text,
        text=rendered,
        prefill="",
        ids=encoded["input_ids"][0].numpy().astype(np.int32),
        sampler_ids=np.array(sampler_ids, dtype=np.int32),
        images=tuple(images),
        vision=vision,
    )


@cache
def _processor(model: Path) -> Any:
    return AutoProcessor.from_pretrained(model)


def random_group(
    prompt: Prompt, lengths: Sequence[int], *, vocabulary: int, seed: int, banned: Sequence[int] = ()
) -> TrainGroup:
    """Responses of random allowed tokens with random advantages and weights."""
    rng = np.random.default_rng(seed)
    allowed = np.setdiff1d(np.arange(vocabulary), np.array(banned, dtype=int))
    rollouts = [
        Rollout(
            problem_id=prompt.problem_id,
            index=index,
            ids=rng.choice(allowed, size=length).astype(np.int32),
            logprobs=rng.normal(-2, 0.1, length).astype(np.float32),
            text="",
            stop_reason="stop",
            policy_version=0,
        )
        for index, length in enumerate(lengths)
    ]
    return TrainGroup(
        prompt=prompt,
        rollouts=rollouts,
        advantages_G=rng.normal(size=len(lengths)),
        weights_G=rng.uniform(0.01, 0.1, len(lengths)),
        use_correction=False,
    )


def load_reference(model: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")


def padded_logps(
    reference: torch.nn.Module, groups: Sequence[TrainGroup], *, banned: Sequence[int] = (), temperature: float = 1.0
) -> list[list[Tensor]]:
    """Log-probs of every response of every group, with gradient, one padded row per response."""
    return padded_scores(reference, groups, banned=banned, temperature=temperature)[0]


def padded_scores(
    reference: torch.nn.Module, groups: Sequence[TrainGroup], *, banned: Sequence[int] = (), temperature: float = 1.0
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Log-probs and entropies of the tokens of every response of every group."""
    rows = [(g.prompt, rollout.ids) for g in groups for rollout in g.rollouts]
    longest = max(len(p.ids) + len(ids) for p, ids in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    attention = torch.zeros_like(input_ids)
    for row, (prompt, ids) in enumerate(rows):
        tokens = torch.from_numpy(np.concatenate([prompt.ids, ids]).astype(np.int64))
        input_ids[row, : len(tokens)] = tokens
        attention[row, : len(tokens)] = 1
    is_image = (input_ids == reference.config.image_token_id) & attention.bool()
    vision = [prompt.vision for prompt, _ in rows if prompt.vision]
    extra = {key: torch.cat([v[key] for v in vision]) for key in vision[0]} if vision else {}
    reference.model.rope_deltas = None  # state that an earlier call left on the model
    logits = reference(
        input_ids=input_ids,
        attention_mask=attention,
        mm_token_type_ids=is_image.int(),
        use_cache=False,
        **extra,
    ).logits
    logits = logits / temperature
    logits[..., list(banned)] = float("-inf")
    logp = torch.log_softmax(logits, dim=-1)
    allowed = np.setdiff1d(np.arange(logp.shape[-1]), np.array(banned, dtype=int))
    logps, entropies = [], []
    for row, (prompt, ids) in enumerate(rows):
        first = len(prompt.ids) - 1  # the position that predicts the first response token
        own = logp[row, first : first + len(ids)]
        logps.append(own.gather(1, torch.from_numpy(ids.astype(np.int64))[:, None])[:, 0])
        entropies.append(-(own[:, allowed].exp() * own[:, allowed]).sum(-1))
    return _by_group(logps, groups), _by_group(entropies, groups)


def _by_group(flat: Sequence[Tensor], groups: Sequence[TrainGroup]) -> list[list[Tensor]]:
    values = iter(flat)
    return [[next(values) for _ in group.rollouts] for group in groups]
