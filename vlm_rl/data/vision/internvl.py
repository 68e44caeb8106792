"""Images in InternVL: at most max_patches tiles in the grid nearest to the image's shape, and the whole image."""

from __future__ import annotations

from typing import Any

from vlm_rl.data.vision.tiles import TiledVision


class InternVL(TiledVision):
    """A vlm_rl.data.vision.family.VisionFamily; pixel_values are [tiles, 3, side, side]."""

    def tile_side(self, processor: Any) -> int:
        return processor.image_processor.size["height"]

    def limits(self, processor: Any, max_pixels: int) -> dict[str, Any]:
        most = max_pixels // self.tile_side(processor) ** 2
        return {"max_patches": min(processor.image_processor.max_patches, most)}
