"""Images in Pixtral and Mistral 3, on Pixtral's tower: any shape on a grid, with a token at the end of each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlm_rl.data.images import check_pixel_range
from vlm_rl.data.vision.tiles import TiledVision
from vlm_rl.errors import UserError


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
        side = self.tile_side(processor)
        check_pixel_range(min_pixels, max_pixels, factor=side)
        if max_pixels < (2 * side) ** 2:
            raise UserError(
                f"max_pixels {max_pixels}: this model reads images of at least two tokens of {side} x {side} pixels, "
                f"so max_pixels must be at least {(2 * side) ** 2}"
            )

    def limits(self, processor: Any, max_pixels: int) -> dict[str, Any]:
        return {}

    def fit(self, image: Image.Image, *, processor: Any, min_pixels: int, max_pixels: int) -> Image.Image:
        """Return the image in whole visual tokens, at most as long as the side of a square of max_pixels.

        So the processor leaves it as it is. Of a single token the model would make a vector, and fail: min_pixels
        are more.
        """
        side = self.tile_side(processor)
        longest = min(processor.image_processor.size["longest_edge"], math.isqrt(max_pixels)) // side * side
        enough = math.sqrt(min_pixels / (image.width * image.height))
        scale = min(max(1.0, enough), longest / max(image.size))
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
        if not vision:
            return {}
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
        patch, merged = config.vision_config.patch_size, getattr(config, "spatial_merge_size", 1)  # LLaVA merges none
        side = patch * merged
        pixels = torch.ones(2 * merged**2, 3, patch, patch)  # two tokens, see `fit`
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[side, 2 * side]])}

    def num_patches(self, vision: Any, max_pixels: int) -> int:
        return max_pixels // vision.patch_size**2
