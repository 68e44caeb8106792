"""What a family of vision-language models makes of images: one file for each family, behind one interface.

    family = vision_of(config)                                        # None where there is none
    inputs, expansions = family.encode(images, processor=processor, min_pixels=3136, max_pixels=1_003_520)

The prompt builder, the learner and the samplers know images by this interface alone. Positions are not in it: a
model that numbers the tokens of images in its own way does so itself (vlm_rl.data.prompts.rope_positions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from PIL import Image
from torch import Tensor

from vlm_rl.data.vision_idefics3 import Idefics3
from vlm_rl.data.vision_internvl import InternVL
from vlm_rl.data.vision_qwen import QwenVL
from vlm_rl.data.vision_tower import TowerSize


class VisionFamily(Protocol):
    """How images enter the models of a family. `vision` stands for the model's own inputs, tensors by name."""

    has_mrope: bool  # whether a token's position is three numbers: time, height, width
    first_layer: str  # the module of the tower that embeds patches

    def patch_size(self, processor: Any) -> int | None:
        """Return the pixels of a patch's side where images lie on a grid of patches; None where any size will do."""
        ...

    def check_limits(self, processor: Any, *, min_pixels: int, max_pixels: int) -> None:
        """Raise UserError where images cannot be brought between these pixels."""
        ...

    def fit(self, image: Image.Image, *, processor: Any, min_pixels: int, max_pixels: int) -> Image.Image:
        """Return the image as learner and sampler both get it."""
        ...

    def encode(
        self, fitted: Sequence[Image.Image], *, processor: Any, min_pixels: int, max_pixels: int
    ) -> tuple[dict[str, Tensor], list[list[int]]]:
        """Return `vision` of fitted images, and the ids that each image's placeholder expands to.

        Tensors of several prompts are joined along their first dimension.
        """
        ...

    def engine_options(self, processor: Any, *, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        """Return the options of vllm.LLM with which the engine encodes fitted images as `encode` does."""
        ...

    def unused_image(self, config: Any) -> dict[str, Tensor]:
        """Return `vision` of the smallest image, which rows without images compute and use nowhere."""
        ...

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> list[Tensor]:
        """Return what a transformers model's mergers make of images, [visual tokens, H] each, deepstack last."""
        ...

    def precomputed(self, features: Sequence[Tensor]) -> Any:
        """Return these features as the model's forward pass takes them, in mm_encoder_outputs."""
        ...

    def vision_inputs(self, vision: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the unmodified model's forward pass takes for images; positions are given beside them."""
        ...

    def token_types(self, config: Any, ids_T: Tensor) -> dict[str, Tensor]:
        """Return what it takes in order to number the positions itself."""
        ...

    def tower_size(self, config: Any, *, max_pixels: int) -> TowerSize:
        """Return the size of the vision tower."""
        ...


_QWEN_VL = QwenVL()
FAMILIES: dict[str, VisionFamily] = {"idefics3": Idefics3(), "internvl": InternVL()}


def vision_of(config: Any) -> VisionFamily | None:
    """Return the family of a transformers configuration; None for a text model, and for one that is not known."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    is_qwen = hasattr(config, "image_token_id") and hasattr(vision, "spatial_merge_size")
    return FAMILIES.get(config.model_type, _QWEN_VL if is_qwen else None)
