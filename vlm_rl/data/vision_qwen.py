"""Images in Qwen's vision-language models: of any size on a grid of patches, with one placeholder a merged token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlm_rl.data.images import check_pixel_range, fit_to_grid
from vlm_rl.data.vision_tower import TowerSize


class QwenVL:
    """A vlm_rl.data.vision.VisionFamily. We resize an image to the grid, and the processor leaves it alone."""

    has_mrope = True
    first_layer = "patch_embed"

    def patch_size(self, processor: Any) -> int | None:
        return processor.image_processor.patch_size

    def check_limits(self, processor: Any, *, min_pixels: int, max_pixels: int) -> None:
        check_pixel_range(min_pixels, max_pixels, factor=_factor(processor))

    def fit(self, image: Image.Image, *, processor: Any, min_pixels: int, max_pixels: int) -> Image.Image:
        return fit_to_grid(image, min_pixels=min_pixels, max_pixels=max_pixels, factor=_factor(processor))

    def encode(
        self, fitted: Sequence[Image.Image], *, processor: Any, min_pixels: int, max_pixels: int
    ) -> tuple[dict[str, Tensor], list[list[int]]]:
        from qwen_vl_utils import process_vision_info

        own = processor.image_processor
        content = [
            {"type": "image", "image": image, "resized_height": image.height, "resized_width": image.width}
            for image in fitted
        ]
        messages = [{"role": "user", "content": content}]
        images: Any = process_vision_info(messages, image_patch_size=own.patch_size)[0]
        assert [image.size for image in images] == [image.size for image in fitted]
        encoded = own(images=images, size=_size(min_pixels, max_pixels), return_tensors="pt")
        grid, side = encoded["image_grid_thw"], own.patch_size
        assert grid.tolist() == [[1, image.height // side, image.width // side] for image in fitted], grid
        counts = (grid.prod(1) // own.merge_size**2).tolist()
        vision = {"pixel_values": encoded["pixel_values"], "image_grid_thw": grid}
        return vision, [[processor.image_token_id] * count for count in counts]

    def engine_options(self, processor: Any, *, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        size = _size(min_pixels, max_pixels)
        return {"mm_processor_kwargs": {"size": size}, "limit_mm_per_prompt": {"video": 0}}

    def unused_image(self, config: Any) -> dict[str, Tensor]:
        vision = config.vision_config
        side = vision.spatial_merge_size
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.zeros(side**2, size), "image_grid_thw": torch.tensor([[1, side, side]])}

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> list[Tensor]:
        output = model.model.get_image_features(vision["pixel_values"], vision["image_grid_thw"])
        return [torch.cat(images) for images in (output.pooler_output, *getattr(output, "deepstack_features", []))]

    def precomputed(self, features: Sequence[Tensor]) -> Any:
        merged_FH, *deepstack = features
        return SimpleNamespace(pooler_output=[merged_FH], deepstack_features=[[level_FH] for level_FH in deepstack])

    def vision_inputs(self, vision: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(vision)

    def token_types(self, config: Any, ids_T: Tensor) -> dict[str, Tensor]:
        return {"mm_token_type_ids": (ids_T == config.image_token_id).int()[None]}

    def tower_size(self, config: Any, *, max_pixels: int) -> TowerSize:
        vision = config.vision_config
        is_qwen2_vl = vision.model_type.startswith("qwen2_vl")  # whose hidden_size is the language model's
        hidden = vision.embed_dim if is_qwen2_vl else vision.hidden_size
        mlp = int(hidden * vision.mlp_ratio) if is_qwen2_vl else vision.intermediate_size
        return TowerSize(hidden, mlp, vision.num_heads, vision.depth, max_pixels // vision.patch_size**2)


def _factor(processor: Any) -> int:
    """Return the pixels of a merged visual token's side."""
    return processor.image_processor.patch_size * processor.image_processor.merge_size


def _size(min_pixels: int, max_pixels: int) -> dict[str, int]:
    return {"shortest_edge": min_pixels, "longest_edge": max_pixels}
