"""What a family of vision-language models makes of images and videos: one file for each, behind one interface.

    family = vision_of(config)                                        # None where there is none
    inputs, expansions = family.encode(images, processor=processor, min_pixels=3136, max_pixels=1_003_520)

The prompt builder, the learner and the samplers know images and videos by this interface alone. Positions are not in
it: a model that numbers the tokens of images in its own way does so itself (vlm_rl.data.prompts.rope_positions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from PIL import Image
from torch import Tensor

from vlm_rl.data.vision.gemma3 import Gemma3
from vlm_rl.data.vision.gemma4 import Gemma4
from vlm_rl.data.vision.idefics3 import Idefics3, SmolVLM
from vlm_rl.data.vision.internvl import InternVL
from vlm_rl.data.vision.llava_onevision import LlavaOnevision
from vlm_rl.data.vision.pixtral import Pixtral
from vlm_rl.data.vision.qwen import GlmVL, QwenVL, video_metadata
from vlm_rl.data.vision.tower import TowerSize
from vlm_rl.model_files.model_folder import vision_family
from vlm_rl.types import Video

__all__ = ["BlindImage", "Pictures", "VisionFamily", "blinded", "join_vision", "video_metadata", "vision_of"]


class VisionFamily(Protocol):
    """How images enter the models of a family. `vision` stands for the model's own inputs, tensors by name."""

    has_mrope: bool  # whether a token's position is three numbers: time, height, width
    first_layer: str  # the module of the tower that embeds patches

    def takes_videos(self, config: Any) -> bool:
        """Tell whether a prompt may hold videos; their placeholder is then the configuration's video_token_id."""
        ...

    def placeholder_id(self, config: Any) -> int:
        """Return the token that stands for an image until it is expanded."""
        ...

    def joined(self, ids: Sequence[int], tokenizer: Any) -> list[int]:
        """Return the ids of a prompt as the tokenizer encodes its text whole, once placeholders are expanded."""
        ...

    def row_masks(self, config: Any, embeds_NLH: Tensor, ids_NL: Tensor) -> dict[str, Any] | None:
        """Return the attention masks of padded rows, None where attention is causal."""
        ...

    def patch_size(self, processor: Any) -> int | None:
        """Return the pixels of a patch's side where images lie on a grid of patches; None if any size will do."""
        ...

    def check_limits(self, processor: Any, *, min_pixels: int, max_pixels: int) -> None:
        """Raise UserError if images cannot be brought between these pixels."""
        ...

    def fit(self, image: Image.Image, *, processor: Any, min_pixels: int, max_pixels: int) -> Image.Image:
        """Return the image, or a frame of a video, as learner and sampler both get it.

        Args:
            image: as it is stored, in RGB.
            processor: of the model.
            min_pixels: data.min_pixels.
            max_pixels: data.max_pixels.
        """
        ...

    def encode(
        self, fitted: Sequence[Image.Image | Video], *, processor: Any, min_pixels: int, max_pixels: int
    ) -> tuple[dict[str, Tensor], list[list[int]]]:
        """Return `vision` of fitted images and videos, and the ids that each one's placeholder expands to.

        `join_vision` joins what several prompts have.

        Args:
            fitted: what `fit` returned, in the order of the prompt.
            processor: of the model.
            min_pixels: data.min_pixels, as `fit` got it.
            max_pixels: data.max_pixels, likewise.
        """
        ...

    def engine_options(self, processor: Any, *, min_pixels: int, max_pixels: int, max_videos: int) -> dict[str, Any]:
        """Return the options of vllm.LLM with which the engine encodes what is fitted as `encode` does.

        Args:
            processor: of the model.
            min_pixels: data.min_pixels, as `fit` got it.
            max_pixels: data.max_pixels, likewise.
            max_videos: the largest number of videos of a prompt.
        """
        ...

    def unused_image(self, config: Any) -> dict[str, Tensor]:
        """Return `vision` of the smallest image, which rows without images compute and use nowhere."""
        ...

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute the features of images by a transformers model's mergers, [visual tokens, H] each, deepstack last.

        Videos come after all images.
        """
        ...

    def precomputed(self, features: Sequence[Tensor], config: Any, ids_T: Tensor) -> dict[str, Any]:
        """Return the features of a row's images and videos as the forward pass takes them, in mm_encoder_outputs."""
        ...

    def vision_inputs(self, vision: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return their inputs of the unmodified model's forward pass, without positions."""
        ...

    def token_types(self, config: Any, ids_T: Tensor) -> dict[str, Tensor]:
        """Return the further inputs by which it numbers the positions itself."""
        ...

    def tower_size(self, config: Any, *, max_pixels: int) -> TowerSize:
        """Return the size of the vision tower."""
        ...


_FAMILIES: dict[str, VisionFamily] = {
    "gemma3": Gemma3(),
    "gemma4": Gemma4(),
    "glm": GlmVL(),
    "idefics3": Idefics3(),
    "internvl": InternVL(),
    "llava_onevision": LlavaOnevision(),
    "pixtral": Pixtral(),
    "qwen": QwenVL(),
    "smolvlm": SmolVLM(),
}


def join_vision(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return `vision` of several prompts, in their order; a prompt need not have every tensor."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: torch.cat([part[key] for part in parts if key in part]) for key in keys}


_MEAN_COLOUR = 0.01  # not 0: Idefics3 takes a tile of zeros for padding
_SQUARE = 28  # pixels of a side: two patches of most models
_PATCHES = 4  # of a visual token, where a row of pixels is a patch: they follow each other

BlindImage = Literal["blank", "noise", "masked"]
Pictures = Sequence[tuple[int, Mapping[str, int]]]


def blinded(vision: Mapping[str, Tensor], kind: BlindImage = "blank", pictures: Pictures = ()) -> dict[str, Tensor]:
    """Return `vision` of images of the same sizes that do not show what was there, or only half of it.

    blank: all in the processor's mean colour. noise: normal noise in the processor's scale. masked: squares of one
    visual token or 28 pixels each take the mean colour with probability 1/2. Noise and masks depend only on the seeds
    and on places in a prompt's images, not on what else a row holds.

    Args:
        vision: of a row.
        kind: what takes the images' place.
        pictures: of each prompt or observation, in the order of `vision`, a seed and how many entries each tensor has
            of it. Without them, what there is counts as one with seed 0.
    """
    return {
        key: _blinded(tensor, kind, [(seed, sizes.get(key, 0)) for seed, sizes in pictures] or [(0, len(tensor))])
        if key.startswith("pixel_values")
        else tensor
        for key, tensor in vision.items()
    }


def _blinded(pixels: Tensor, kind: BlindImage, parts: Sequence[tuple[int, int]]) -> Tensor:
    if kind == "blank":
        return torch.full_like(pixels, _MEAN_COLOUR)
    filled = []
    for (seed, _), part in zip(parts, pixels.split([size for _, size in parts]), strict=True):
        generator = torch.Generator().manual_seed(seed)
        if kind == "noise":
            filled.append(torch.randn(part.shape, generator=generator).to(part))
            continue
        if part.ndim == 2:  # [patches, values]
            tokens = torch.rand(-(-len(part) // _PATCHES), 1, generator=generator) < 0.5
            is_hidden = tokens.repeat_interleave(_PATCHES, 0)[: len(part)]
        else:  # [images or tiles, 3, height, width]
            height, width = part.shape[-2:]
            grid = torch.rand(len(part), 1, -(-height // _SQUARE), -(-width // _SQUARE), generator=generator) < 0.5
            is_hidden = grid.repeat_interleave(_SQUARE, 2).repeat_interleave(_SQUARE, 3)[..., :height, :width]
        filled.append(part.masked_fill(is_hidden.to(part.device), _MEAN_COLOUR))
    return torch.cat(filled)


def vision_of(config: Any) -> VisionFamily | None:
    """Return the family of a transformers configuration; None for a text model, and for one that is not known."""
    name = vision_family(config)
    return None if name is None else _FAMILIES[name]
