"""Images in Mistral 3, with Pixtral's tower: any shape on a grid of patches, with a token at the end of each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlm_rl.data.images import check_pixel_range
from vlm_rl.data.vision.tiles import TiledVision
from vlm_rl.data.vision.tower import TowerSize


class Pixtral(TiledVision):
    """A vlm_rl.data.vision.family.VisionFamily.

    pixel_values are the patches of all images, row by row, [patches, 3, side, side]; image_sizes [images, 2] are in
    pixels. The model takes whole images, filled up to one size, which several prompts together could not be kept as.
    """

    first_layer = "patch_conv"
    features_by_image = True

    def tile_side(self, processor: Any) -> int:
        return processor.patch_size * processor.spatial_merge_size

    def check_limits(self, processor: Any, *, min_pixels: int, max_pixels: int) -> None:
        check_pixel_range(min_pixels, max_pixels, factor=self.tile_side(processor))

    def limits(self, processor: Any, max_pixels: int) -> dict[str, Any]:
        return {}

    def fit(self, image: Image.Image, *, processor: Any, min_pixels: int, max_pixels: int) -> Image.Image:
        """Return the image in whole visual tokens, at most as long as the side of a square of max_pixels.

        So the processor leaves it as it is.
        """
        side = self.tile_side(processor)
        longest = min(processor.image_processor.size["longest_edge"], math.isqrt(max_pixels)) // side * side
        scale = min(1.0, longest / max(image.size))
        width, height = (max(1, math.ceil(int(length * scale) / side)) * side for length in image.size)
        return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)

    def of_image(self, encoded: Mapping[str, Any], processor: Any) -> dict[str, Tensor]:
        side = processor.patch_size
        rows = (
            encoded["pixel_values"][0].unflatten(2, (-1, side)).unflatten(1, (-1, side))
        )  # [3, rows, p, columns, p]
        patches = rows.permute(1, 3, 0, 2, 4).flatten(0, 1)
        return {"pixel_values": patches, "image_sizes": torch.as_tensor(encoded["image_sizes"])}

    def vision_inputs(self, vision: Mapping[str, Tensor]) -> dict[str, Tensor]:
        patches, sizes = vision["pixel_values"], vision["image_sizes"]
        side = patches.shape[-1]
        grids = [(height // side, width // side) for height, width in sizes.tolist()]
        pixels = patches.new_zeros(
            len(grids), patches.shape[1], *(side * max(grid) for grid in zip(*grids, strict=True))
        )
        parts = patches.split([rows * columns for rows, columns in grids])
        for image, part, (rows, columns) in zip(pixels, parts, grids, strict=True):
            whole = part.unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
            image[:, : rows * side, : columns * side] = whole
        return {"pixel_values": pixels, "image_sizes": sizes}

    def unused_image(self, config: Any) -> dict[str, Tensor]:
        patch, merged = config.vision_config.patch_size, config.spatial_merge_size
        side = patch * merged
        return {"pixel_values": torch.ones(merged**2, 3, patch, patch), "image_sizes": torch.tensor([[side, side]])}

    def tower_size(self, config: Any, *, max_pixels: int) -> TowerSize:
        vision = config.vision_config
        return TowerSize(
            hidden=vision.hidden_size,
            mlp=vision.intermediate_size,
            heads=vision.num_attention_heads,
            layers=vision.num_hidden_layers,
            patches=max_pixels // vision.patch_size**2,
            patch_values=vision.num_channels * vision.patch_size**2,
        )
