"""Images in Gemma 4: in their shape, scaled to one budget of visual tokens, which attend to each other in windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlm_rl.data.vision.tiles import TiledVision
from vlm_rl.errors import UserError

_BUDGETS = (70, 140, 280, 560, 1120)  # visual tokens of an image that the processor knows


class Gemma4(TiledVision):
    """A vlm_rl.data.vision.family.VisionFamily.

    pixel_values are [images, patches, values of a patch], image_position_ids [images, patches, 2]: column and row, -1
    for what fills an image up to its budget.
    """

    first_layer = "patch_embedder"
    features_by_image = True

    def tile_side(self, processor: Any) -> int:
        own = processor.image_processor
        return own.patch_size * own.pooling_kernel_size

    def check_limits(self, processor: Any, *, min_pixels: int, max_pixels: int) -> None:
        side = self.tile_side(processor)
        if not min_pixels <= max_pixels or max_pixels < _BUDGETS[0] * side**2:
            raise UserError(
                f"min_pixels {min_pixels} and max_pixels {max_pixels}: this model reads an image as at least "
                f"{_BUDGETS[0]} tokens of {side} x {side} pixels, so max_pixels must be at least "
                f"{_BUDGETS[0] * side**2}, and at least min_pixels"
            )

    def limits(self, processor: Any, max_pixels: int) -> dict[str, Any]:
        most = min(processor.image_processor.max_soft_tokens, max_pixels // self.tile_side(processor) ** 2)
        return {"max_soft_tokens": max(budget for budget in _BUDGETS if budget <= most)}

    def of_image(self, encoded: Mapping[str, Any], processor: Any) -> dict[str, Tensor]:
        return {key: encoded[key] for key in ("pixel_values", "image_position_ids")}

    def token_types(self, config: Any, ids_T: Tensor) -> dict[str, Tensor]:
        return {"mm_token_type_ids": (ids_T == config.image_token_id).int()[None]}

    def row_masks(self, config: Any, embeds_NLH: Tensor, ids_NL: Tensor) -> dict[str, Any] | None:
        """Return the masks of transformers' layers, by their type: open among an image's tokens where a window is."""
        from transformers.models.gemma4.modeling_gemma4 import (
            create_masks_for_vision_model,
            get_block_sequence_ids_for_mask,
        )

        text = config.get_text_config()
        if text.use_bidirectional_attention != "vision":
            return None
        types_NL = torch.cat([self.token_types(config, ids_L)["mm_token_type_ids"] for ids_L in ids_NL])
        blocks_NL = get_block_sequence_ids_for_mask(types_NL, device=embeds_NLH.device)
        return create_masks_for_vision_model(text, embeds_NLH, None, None, None, blocks_NL)

    def unused_image(self, config: Any) -> dict[str, Tensor]:
        vision = config.vision_config
        side = vision.pooling_kernel_size
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
        pixels = torch.ones(1, side**2, 3 * vision.patch_size**2)
        return {"pixel_values": pixels, "image_position_ids": places[None]}

    def num_patches(self, vision: Any, max_pixels: int) -> int:
        return max_pixels // vision.patch_size**2
