"""The processors of Mistral 3 and Pixtral, and what their tiny models need: rows of any number of visual tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PixtralImageProcessor, PixtralProcessor

PATCH, LONGEST = 14, 308
MERGED = {"llava": 1, "mistral3": 2}  # patches of a side of a visual token
MARKS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
USER = (
    "[INST]{% for part in message.content %}{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}[/INST]"
)
# Of the layout of the published templates. Pixtral has a system's words, which must be a string, in the last turn.
TEMPLATES = {
    "llava": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
        "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}{% if message.role == 'user' %}"
        + USER.replace("[INST]", "[INST]{% if loop.last and system is defined %}{{ system }}{% endif %}")
        + "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    ),
    "mistral3": (
        "{% for message in messages %}{% if message.role == 'user' %}"
        + USER
        + "{% elif message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content[0].text }}[/SYSTEM_PROMPT]"
        "{% else %}{{ message.content[0].text + '<|im_end|>' }}{% endif %}{% endfor %}"
    ),
}


def pixtral_processor(model_type: str, tokenizer_of: Path) -> Any:
    """Return the family's processor with the tokenizer of a tiny model, to which it adds its own tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS}, replace_extra_special_tokens=False)
    return PixtralProcessor(
        PixtralImageProcessor(size={"longest_edge": LONGEST}, patch_size=PATCH),
        tokenizer,
        patch_size=PATCH,
        spatial_merge_size=MERGED[model_type],
        chat_template=TEMPLATES[model_type],
        image_token="[IMG]",
    )


def pixtral_config(model_type: str, text: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the settings of a tiny model's configuration."""
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"image_size": LONGEST, "patch_size": PATCH, "initializer_range": 0.2}
    own: dict[str, Any] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}  # as published
    return {
        "text_config": {**text, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        "vision_config": {**tower, **sizes, "model_type": "pixtral"},
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
        "tie_word_embeddings": text["tie_word_embeddings"],
        **(own if model_type == "llava" else {"spatial_merge_size": MERGED[model_type]}),
    }


def own_patches(encoded: Mapping[str, Any]) -> Tensor:
    """Return the patches [patches, 3, side, side] of what a processor returned, row by row, without its filling."""
    patches = []
    for image, (height, width) in zip(encoded["pixel_values"], encoded["image_sizes"], strict=True):
        corners = [(row, column) for row in range(0, height, PATCH) for column in range(0, width, PATCH)]
        patches += [image[:, row : row + PATCH, column : column + PATCH] for row, column in corners]
    return torch.stack(patches)
