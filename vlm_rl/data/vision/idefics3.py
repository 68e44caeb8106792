"""Images in Idefics3 and SmolVLM: scaled to a longest side and cut into rows of tiles, with a copy of the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
