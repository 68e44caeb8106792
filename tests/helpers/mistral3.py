"""The processor of Mistral 3, and what its tiny model needs: visual tokens of 28 pixels, in rows of any number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PixtralImageProcessor, PixtralProcessor

PATCH, MERGED, LONGEST = 14, 2, 308
MARKS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
# Of the layout of the published template.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{% for part in message.content %}"
    "{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}{% endfor %}[/INST]"
    "{% elif message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content[0].text }}[/SYSTEM_PROMPT]"
    "{% else %}{{ message.content[0].text + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def mistral3_processor(tokenizer_of: Path) -> Any:
    """Return the family's processor with the tokenizer of a tiny model, to which it adds its own tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS}, replace_extra_special_tokens=False)
    own = PixtralImageProcessor(size={"longest_edge": LONGEST}, patch_size=PATCH)
    return PixtralProcessor(
        own, tokenizer, patch_size=PATCH, spatial_merge_size=MERGED, chat_template=TEMPLATE, image_token="[IMG]"
    )


def mistral3_config(text: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the settings of a tiny model's configuration."""
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"image_size": LONGEST, "patch_size": PATCH, "initializer_range": 0.2}
    return {
        "text_config": {**text, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        "vision_config": {**tower, **sizes, "model_type": "pixtral"},
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
        "spatial_merge_size": MERGED,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def own_patches(encoded: Mapping[str, Any]) -> Tensor:
    """Return the patches [patches, 3, side, side] of what a processor returned, row by row, without its filling."""
    patches = []
    for image, (height, width) in zip(encoded["pixel_values"], encoded["image_sizes"], strict=True):
        corners = [(row, column) for row in range(0, height, PATCH) for column in range(0, width, PATCH)]
        patches += [image[:, row : row + PATCH, column : column + PATCH] for row, column in corners]
    return torch.stack(patches)
