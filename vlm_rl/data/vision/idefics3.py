"""Images in Idefics3, SmolVLM and SmolVLM2: cut into rows of tiles at a longest side, with a copy of the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from vlm_rl.data.vision.tiles import TiledVision


class Idefics3(TiledVision):
    """A vlm_rl.data.vision.family.VisionFamily; pixel_values are [tiles, 3, side, side]."""

    def tile_side(self, processor: Any) -> int:
        return processor.image_processor.max_image_size["longest_edge"]

    def limits(self, processor: Any, max_pixels: int) -> dict[str, Any]:
        side = self.tile_side(processor)
        longest = min(processor.image_processor.size["longest_edge"], math.isqrt(max_pixels) // side * side)
        return {"size": {"longest_edge": longest}}

    def vision_inputs(self, vision: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor[None] for key, tensor in vision.items()}  # of one sequence


class SmolVLM(Idefics3):
    """Idefics3, but its forward pass takes the features tile by tile."""

    def precomputed(self, features: Sequence[Tensor], config: Any, ids_T: Tensor) -> dict[str, Any]:
        tokens = (config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor) ** 2
        (features_FH,) = features
        tiles = features_FH.view(len(features_FH) // tokens, tokens, features_FH.shape[1])  # of text alone, none
        return {"image": SimpleNamespace(pooler_output=tiles)}
