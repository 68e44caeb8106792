"""Groups with the prompts and weights that a run would give them, and their packed rows, for the other scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from floor import IMAGE_SHARE

from vlm_rl.learner.packing import Chunk, PackedRow, PositionFunction, pack_row
from vlm_rl.losses import token_weights
from vlm_rl.types import Group, Problem, Prompt, Rollout

PATCH = 28  # pixels of a visual token's side
ALPHABET = 256  # the single bytes are the first ids: no control token is among them
SHARPNESS = 4  # times the random weights: at their usual size all tokens are about equally likely


@dataclass(frozen=True)
class WeighedGroup:
    """A prompt's responses, with the advantage and the token weight of each."""

    prompt: Prompt
    rollouts: Sequence[Rollout]
    advantages_G: np.ndarray
    weights_G: np.ndarray


def pack(chunks: Sequence[Chunk], groups: Sequence[WeighedGroup], positions: PositionFunction) -> PackedRow:
    """Pack the chunks as the trainer does, without the log-probs of a sampler: there was none."""
    problem = Problem(id="", question="", images=(), answer="", answer_type="text")
    row = pack_row(
        chunks,
        groups=[Group(problem, tuple(group.rollouts), (), group.advantages_G) for group in groups],
        prompts={index: group.prompt for index, group in enumerate(groups)},
        weights_PG=np.stack([group.weights_G for group in groups]),
        positions=positions,
    )
    return replace(row, loss=replace(row.loss, sampler_logp_K=None))


def random_group(
    model_path: Path, *, prompt: int, lengths: Sequence[int], images: int, aggregation: str
) -> WeighedGroup:
    """Make a group of random tokens behind images of noise.

    Args:
        model_path: whose processor and tokenizer are used.
        prompt: tokens of the prompt, its images included.
        lengths: tokens of the responses, which come in a random order.
        images: how many of them the prompt has.
        aggregation: how an algorithm weighs the tokens.
    """
    from PIL import Image  # here, since gpu_learner.py needs neither
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model_path)
    names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    start, pad, end = processor.tokenizer.convert_tokens_to_ids(names)
    rng = np.random.default_rng(0)
    side = round((IMAGE_SHARE * prompt / images) ** 0.5)
    picture = [start, *[pad] * side**2, end]
    pixels = rng.integers(0, 256, (images, side * PATCH, side * PATCH, 3), dtype=np.uint8)
    vision = processor.image_processor(images=[Image.fromarray(image) for image in pixels], return_tensors="pt")
    text = rng.integers(ALPHABET, size=prompt - images * len(picture))
    ids = np.concatenate([picture * images, text]).astype(np.int32)
    rollouts = []
    for response, length in enumerate(rng.permutation(lengths)):
        tokens = rng.integers(ALPHABET, size=length).astype(np.int32)
        rollouts.append(Rollout("0", response, tokens, np.zeros(length, np.float32), "", "stop", 0))
    advantages = rng.normal(size=len(lengths))
    lengths_PG = np.array([[len(rollout.ids) for rollout in rollouts]])
    weights_PG = token_weights(aggregation, lengths_PG, advantages[None], max_tokens=max(lengths))
    return WeighedGroup(Prompt("0", "", "", ids, ids, (), dict(vision)), rollouts, advantages, weights_PG[0])


def sharpen(model: Any) -> None:
    """Make attention and predictions decided enough for a wrong position or mask to show."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= SHARPNESS
