"""Images in Gemma 3: one square of fixed size and one number of visual tokens each, which attend to each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from vlm_rl.data.vision.tiles import TiledVision

_BREAK = "\u010a"  # a line break in the vocabulary of a byte-level tokenizer
_LONGEST = 31  # line breaks of one token


class Gemma3(TiledVision):
    """A vlm_rl.data.vision.family.VisionFamily; pixel_values are [images, 3, side, side].

    An image is a single tile, whatever its size. Pan and scan, which adds crops of it, is off, as in the processor.
    """

    def tile_side(self, processor: Any) -> int:
        return processor.image_processor.size["height"]

    def limits(self, processor: Any, max_pixels: int) -> dict[str, Any]:
        return {"do_pan_and_scan": False}

    def placeholder_id(self, config: Any) -> int:
        return config.boi_token_index

    def joined(self, ids: Sequence[int], tokenizer: Any) -> list[int]:
        """Return ids with each run of line breaks as the tokenizer encodes it whole; an image brings some with it."""
        names = [character * count for character in ("\n", _BREAK) for count in range(1, _LONGEST + 1)]
        breaks = {*tokenizer.convert_tokens_to_ids(names)} - {None, tokenizer.unk_token_id}
        joined: list[int] = []
        for is_break, run in groupby(ids, breaks.__contains__):
            run = list(run)
            text = tokenizer.decode(run) if is_break and len(run) > 1 else ""
            joined += tokenizer.encode(text, add_special_tokens=False) if text else run
        return joined

    def token_types(self, config: Any, ids_T: Tensor) -> dict[str, Tensor]:
        return {"token_type_ids": (ids_T == config.image_token_id).int()[None]}

    def row_masks(self, config: Any, embeds_NLH: Tensor, ids_NL: Tensor) -> dict[str, Any]:
        """Return the masks of transformers' layers, by their type: causal, but open among the tokens of an image."""
        from transformers.models.gemma3.modeling_gemma3 import (
            create_masks_for_vision_model,
            get_block_sequence_ids_for_mask,
        )

        types_NL = torch.cat([self.token_types(config, ids_L)["token_type_ids"] for ids_L in ids_NL])
        return create_masks_for_vision_model(
            config.get_text_config(),
            embeds_NLH,
            None,
            None,
            None,
            get_block_sequence_ids_for_mask(types_NL, device=embeds_NLH.device),
        )
