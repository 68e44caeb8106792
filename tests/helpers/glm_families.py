"""The processors of GLM-4.xV, and what their tiny models need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
)

MARKS = [
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|begin_of_image|>",
    "<|image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|video|>",
    "<|end_of_video|>",
]
# Of the layout of the published templates: a turn ends where the next begins, and only users' messages have parts.
TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}{% if message.role == 'user' %}{{ '<|user|>\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif part.type == 'video' %}<|begin_of_video|><|video|><|end_of_video|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% else %}{{ '<|' + message.role + '|>\n' }}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
IDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "image_size": 56, "patch_size": 14}


def glm_processor(model_type: str, tokenizer_of: Path) -> Any:
    """Return the family's processor with the tokenizer of a tiny model, to which it adds its own tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS}, replace_extra_special_tokens=False)
    tokenizer.chat_template = TEMPLATE
    if model_type == "glm46v":
        return Glm46VProcessor(Glm46VImageProcessor(), tokenizer, Glm46VVideoProcessor(), chat_template=TEMPLATE)
    return Glm4vProcessor(Glm4vImageProcessor(), tokenizer, Glm4vVideoProcessor(), chat_template=TEMPLATE)


def glm_config(model_type: str, text: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the settings of a tiny model's configuration."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in IDS.items()}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
    return {
        "text_config": {
            **text,
            "model_type": "glm4v_moe_text" if model_type == "glm4v_moe" else "glm4v_text",
            "rope_parameters": rope,
            "attention_bias": True,  # as published: transformers' layers have one anyway, and vLLM reads this
            "eos_token_id": [text["eos_token_id"], tokenizer.convert_tokens_to_ids("<|user|>")],
        },
        "vision_config": {**TOWER, "out_hidden_size": text["hidden_size"], "initializer_range": 0.2},
        "tie_word_embeddings": text["tie_word_embeddings"],
        **ids,
    }
