"""Groups of random responses on real prompts, their packed rows, and the reference they are compared with.

The reference knows nothing of packing: one padded row per response, its images repeated, through the
unmodified transformers model with its own positions and its own attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from tests.helpers.pixtral_families import own_patches
from tests.helpers.tiled_families import own_tiles
from vlm_rl.data.vision.pixtral import Pixtral
from vlm_rl.learner.packing import Chunk, PackedRow, PositionFunction, pack_row
from vlm_rl.types import Group, Problem, Prompt, Rollout

# What is around an image's placeholder in families that number positions by it.
BETWEEN = {
    "<|image_pad|>": "<|vision_start|><|image_pad|><|vision_end|>",
    "<|image|>": "<|begin_of_image|><|image|><|end_of_image|>",
}


@dataclass(frozen=True)
class WeighedGroup:
    """A prompt's responses with what a run would work out for them; any number of responses."""

    prompt: Prompt
    rollouts: Sequence[Rollout]
    advantages_G: np.ndarray
    weights_G: np.ndarray
    old_logps: Sequence[np.ndarray] | None = None  # per response [R]; None: those of the forward pass itself

    @property
    def lengths(self) -> list[int]:
        return [len(rollout.ids) for rollout in self.rollouts]


def pack(
    chunks: Sequence[Chunk],
    groups: Sequence[WeighedGroup],
    positions: PositionFunction,
    *,
    mean_weight: float = 0.0,
    with_sampler: bool = False,
) -> PackedRow:
    """Pack the chunks as the trainer does, then fill in old log-probs and leave out the sampler's random ones."""
    weights_PG = np.zeros((len(groups), max(len(group.rollouts) for group in groups)))
    for row, group in zip(weights_PG, groups, strict=True):
        row[: len(group.rollouts)] = group.weights_G
    problem = Problem(id="", question="", images=(), answer="", answer_type="text")
    row = pack_row(
        chunks,
        groups=[Group(problem, tuple(group.rollouts), (), group.advantages_G) for group in groups],
        prompts={index: group.prompt for index, group in enumerate(groups)},
        weights_PG=weights_PG,
        positions=positions,
        mean_weight=mean_weight,
    )
    old = [logps[i] for chunk in chunks if (logps := groups[chunk.group].old_logps) for i in chunk.responses]
    loss = row.loss if with_sampler else replace(row.loss, sampler_logp_K=None)
    if old:
        loss = replace(loss, old_logp_K=torch.from_numpy(np.concatenate(old).astype(np.float32)))
    return replace(row, loss=loss)


def bare_prompt(problem_id: str, *, epoch: int = 0) -> Prompt:
    """Return a prompt of one token."""
    ids = np.zeros(1, np.int32)
    return Prompt(problem_id, text="", prefill="", ids=ids, sampler_ids=ids, images=(), vision={}, epoch=epoch)


def noise_image(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_prompt(model: Path, text: str, images: Sequence[Image.Image] = ()) -> Prompt:
    """Make a prompt straight from the Hugging Face processor; one placeholder per image is put first.

    A text model has a tokenizer alone.
    """
    if not (model / "processor_config.json").exists():
        ids = np.array(_tokenizer(model)(text)["input_ids"], dtype=np.int32)
        return Prompt(text, text=text, prefill="", ids=ids, sampler_ids=ids, images=(), vision={})
    processor = _processor(model)
    image = str(BETWEEN.get(processor.image_token, processor.image_token))
    rendered = image * len(images) + text
    encoded = processor(text=[rendered], images=list(images) or None, return_tensors="pt")
    sampler_ids = processor.tokenizer(rendered)["input_ids"]
    gridded = {"image_grid_thw", "image_position_ids"}
    vision = {key: encoded[key] for key in ("pixel_values", "image_sizes", *gridded) if key in encoded}
    if vision and not vision.keys() & gridded:
        cut = own_patches if "[IMG]" in rendered else own_tiles
        vision["pixel_values"] = cut(encoded)
    return Prompt(
        problem_id=text,
        text=rendered,
        prefill="",
        ids=encoded["input_ids"][0].numpy().astype(np.int32),
        sampler_ids=np.array(sampler_ids, dtype=np.int32),
        images=tuple(images),
        vision=vision,
    )


def own_inputs(model: Any, ids_BT: Tensor, vision: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the unmodified model takes beside the ids of a prompt and its response."""
    if model.config.model_type in ("idefics3", "smolvlm"):
        return {key: tensor[None] for key, tensor in vision.items()}  # of one sequence
    if model.config.model_type in ("llava", "mistral3"):
        return Pixtral().vision_inputs(vision) if vision else {}  # compared in tests/data/test_vision.py
    if model.config.model_type == "gemma4":
        return {**vision, "mm_token_type_ids": (ids_BT == model.config.image_token_id).int()}
    if model.config.model_type == "gemma3":
        return {**vision, "token_type_ids": (ids_BT == model.config.image_token_id).int()}
    if not hasattr(model.base_model, "get_rope_index"):
        return dict(vision)
    model.model.rope_deltas = None  # state that an earlier call left on the model
    types_BT = (ids_BT == model.config.image_token_id).int() + 2 * (ids_BT == model.config.video_token_id).int()
    return {**vision, "mm_token_type_ids": types_BT}


@cache
def _processor(model: Path) -> Any:
    return AutoProcessor.from_pretrained(model)


@cache
def _tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def random_group(
    prompt: Prompt, lengths: Sequence[int], *, vocabulary: int, seed: int, banned: Sequence[int] = ()
) -> WeighedGroup:
    """Draw responses of random allowed tokens with random advantages and weights."""
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
    return WeighedGroup(
        prompt=prompt,
        rollouts=rollouts,
        advantages_G=rng.normal(size=len(lengths)),
        weights_G=rng.uniform(0.01, 0.1, len(lengths)),
    )


def load_reference(model: Path) -> torch.nn.Module:
    is_vision = (model / "processor_config.json").exists()
    auto = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
    config = (model / "config.json").read_text(encoding="utf-8")
    capped = "attn_logit_softcapping" in config or "gpt_oss" in config  # sdpa drops a cap without a word, and sinks
    return auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager" if capped else "sdpa")


def padded_logps(
    reference: torch.nn.Module,
    groups: Sequence[WeighedGroup],
    *,
    banned: Sequence[int] = (),
    temperature: float = 1.0,
) -> list[list[Tensor]]:
    """Log-probs of every response of every group, with gradient, one padded row per response."""
    return padded_scores(reference, groups, banned=banned, temperature=temperature)[0]


def padded_scores(
    reference: torch.nn.Module,
    groups: Sequence[WeighedGroup],
    *,
    banned: Sequence[int] = (),
    temperature: float = 1.0,
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
    vision = [prompt.vision for prompt, _ in rows if prompt.vision]
    extra = {key: torch.cat([v[key] for v in vision]) for key in vision[0]} if vision else {}
    extra = own_inputs(reference, input_ids, extra)
    logits = reference(input_ids=input_ids, attention_mask=attention, use_cache=False, **extra).logits
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


def _by_group(flat: Sequence[Tensor], groups: Sequence[WeighedGroup]) -> list[list[Tensor]]:
    values = iter(flat)
    return [[next(values) for _ in group.rollouts] for group in groups]
