"""Families that cut images into square tiles, each of the same number of visual tokens.

The model's own processor resizes an image, cuts it into tiles and adds a small copy of the whole. So images stay as
they are until then, and `max_pixels` bounds the pixels of an image's tiles, the small copy not counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlm_rl.data.vision.tower import TowerSize
from vlm_rl.errors import UserError
from vlm_rl.types import Video


class TiledVision(ABC):
    """What VisionFamily asks for, except how a processor is told the largest number of tiles."""

    has_mrope = False
    first_layer = "embeddings"
    features_by_image = False  # whether the model's forward pass takes the features of images as a list

    @abstractmethod
    def tile_side(self, processor: Any) -> int:
        """Return the pixels of a tile's side."""

    @abstractmethod
    def limits(self, processor: Any, max_pixels: int) -> dict[str, Any]:
        """Return the processor's options that bound the tiles of an image."""

    def takes_videos(self, config: Any) -> bool:
        return False

    def placeholder_id(self, config: Any) -> int:
        return config.image_token_id

    def joined(self, ids: Sequence[int], tokenizer: Any) -> list[int]:
        return list(ids)

    def row_masks(self, config: Any, embeds_NLH: Tensor, ids_NL: Tensor) -> dict[str, Any] | None:
        return None

    def patch_size(self, processor: Any) -> int | None:
        return None

    def check_limits(self, processor: Any, *, min_pixels: int, max_pixels: int) -> None:
        side = self.tile_side(processor)
        if not min_pixels <= max_pixels or max_pixels < side**2:
            raise UserError(
                f"min_pixels {min_pixels} and max_pixels {max_pixels}: this model reads images in tiles of {side} x "
                f"{side} pixels, so max_pixels must be at least {side**2}, and at least min_pixels"
            )

    def fit(self, image: Image.Image, *, processor: Any, min_pixels: int, max_pixels: int) -> Image.Image:
        return image

    def encode(
        self, fitted: Sequence[Image.Image | Video], *, processor: Any, min_pixels: int, max_pixels: int
    ) -> tuple[dict[str, Tensor], list[list[int]]]:
        limits = self.limits(processor, max_pixels)
        parts: list[dict[str, Tensor]] = []
        expansions: list[list[int]] = []
        for image in fitted:  # one by one, as vLLM does: a tile is then computed alike whatever is beside it
            text = [processor.image_token]
            encoded = processor(text=text, images=[image], add_special_tokens=False, return_tensors="pt", **limits)
            parts.append(self.of_image(encoded, processor))
            expansions.append(encoded["input_ids"][0].tolist())
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}, expansions

    def of_image(self, encoded: Mapping[str, Any], processor: Any) -> dict[str, Tensor]:
        """Return `vision` of one image from what the processor made of it."""
        return {"pixel_values": encoded["pixel_values"].flatten(0, -4)}

    def engine_options(self, processor: Any, *, min_pixels: int, max_pixels: int, max_videos: int) -> dict[str, Any]:
        return {"mm_processor_kwargs": self.limits(processor, max_pixels)}

    def unused_image(self, config: Any) -> dict[str, Tensor]:
        height, width = _pair(config.vision_config.image_size)
        return {"pixel_values": torch.ones(1, 3, height, width)}  # Idefics3 leaves out a tile of zeros

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> list[Tensor]:
        output = model.model.get_image_features(**self.vision_inputs(vision))
        return [torch.cat([*output.pooler_output])]

    def vision_inputs(self, vision: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(vision)

    def precomputed(self, features: Sequence[Tensor], config: Any, ids_T: Tensor) -> dict[str, Any]:
        return {"image": SimpleNamespace(pooler_output=[features[0]] if self.features_by_image else features[0])}

    def token_types(self, config: Any, ids_T: Tensor) -> dict[str, Tensor]:
        return {}

    def num_patches(self, vision: Any, max_pixels: int) -> int:
        """Return the patches of an image at its largest, by the configuration of the tower."""
        (height, width), (patch, _) = _pair(vision.image_size), _pair(vision.patch_size)
        tiles = max(1, max_pixels // (height * width)) + 1  # and the small copy of the whole image
        return tiles * (height // patch) * (width // patch)

    def tower_size(self, config: Any, *, max_pixels: int) -> TowerSize:
        vision = config.vision_config
        return TowerSize(
            hidden=vision.hidden_size,
            mlp=vision.intermediate_size,
            heads=vision.num_attention_heads,
            layers=vision.num_hidden_layers,
            patches=self.num_patches(vision, max_pixels),
            patch_values=3 * _pair(vision.patch_size)[0] ** 2,
        )


def _pair(size: Any) -> tuple[int, int]:
    """Return (height, width) of a size that a configuration gives as one number or as two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
