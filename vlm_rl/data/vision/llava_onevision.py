"""Images in LLaVA-OneVision: padded to the best of given sizes, cut into tiles, with a copy of the whole in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlm_rl.data.vision.tiles import TiledVision


class LlavaOnevision(TiledVision):
    """A vlm_rl.data.vision.family.VisionFamily; pixel_values are [tiles, 3, side, side], image_sizes [images, 2].

    The features of the padding are left out, and a learned token ends each row. Several images of a prompt are cut
    like a single one, as vLLM does.
    """

    features_by_image = True

    def tile_side(self, processor: Any) -> int:
        return processor.image_processor.size["height"]

    def limits(self, processor: Any, max_pixels: int) -> dict[str, Any]:
        return {}  # the model reads the number of tiles off the image's size: `fit` bounds that

    def fit(self, image: Image.Image, *, processor: Any, min_pixels: int, max_pixels: int) -> Image.Image:
        """Return the image, scaled down where the size that it would be padded to has more than max_pixels."""
        sizes: list[tuple[int, int]] = [(size[0], size[1]) for size in processor.image_processor.image_grid_pinpoints]
        allowed = [size for size in sizes if size[0] * size[1] <= max_pixels]
        if _best_of(sizes, image) in allowed:
            return image
        height, width = _best_of(allowed, image)
        scale = min(height / image.height, width / image.width)
        smaller = (max(1, int(image.width * scale)), max(1, int(image.height * scale)))
        return image.resize(smaller, Image.Resampling.BICUBIC)

    def of_image(self, encoded: Mapping[str, Any], processor: Any) -> dict[str, Tensor]:
        return super().of_image(encoded, processor) | {"image_sizes": torch.as_tensor(encoded["image_sizes"])}

    def unused_image(self, config: Any) -> dict[str, Tensor]:
        side = config.vision_config.image_size
        height, width = min(config.image_grid_pinpoints, key=lambda size: size[0] * size[1])
        tiles = 1 + (height // side) * (width // side)
        return {"pixel_values": torch.ones(tiles, 3, side, side), "image_sizes": torch.tensor([[height, width]])}


def _best_of(sizes: Sequence[tuple[int, int]], image: Image.Image) -> tuple[int, int]:
    """Return the (height, width) that the processor and the model pad an image to."""
    from transformers.image_processing_utils import select_best_resolution

    return select_best_resolution((image.height, image.width), [*sizes])
