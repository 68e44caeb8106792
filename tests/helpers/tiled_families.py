"""The processors of families that cut images into tiles, of 56 x 56 pixels here, and what their tiny models need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GotOcr2ImageProcessor,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

SIDE, PATCH = 56, 14
TOKENS = (SIDE // PATCH // 2) ** 2  # of a tile
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
MARKS = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *TILES]
PINPOINTS = [[SIDE * rows, SIDE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
# The published templates.
INTERNVL_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{'<|im_end|>\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
IDEFICS3_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# Of the layout of the published template: images before the text, wherever they are.
ONEVISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + ' ' }}"
    "{% for part in message.content if part.type == 'image' %}<image>{% endfor %}"
    "{% for part in message.content if part.type == 'text' %}{{ '\n' + part.text }}{% endfor %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiled_processor(model_type: str, tokenizer_of: Path) -> Any:
    """Return the family's processor with the tokenizer of a tiny model, to which it adds its own tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    normal: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if model_type == "idefics3":
        tokenizer.add_special_tokens({"additional_special_tokens": MARKS}, replace_extra_special_tokens=False)
        own = Idefics3ImageProcessor(max_image_size={"longest_edge": SIDE}, size={"longest_edge": 3 * SIDE}, **normal)
        return Idefics3Processor(own, tokenizer, image_seq_len=TOKENS, chat_template=IDEFICS3_TEMPLATE)
    if model_type == "smolvlm":
        tokenizer.add_special_tokens({"additional_special_tokens": MARKS}, replace_extra_special_tokens=False)
        own = SmolVLMImageProcessor(max_image_size={"longest_edge": SIDE}, size={"longest_edge": 3 * SIDE}, **normal)
        return SmolVLMProcessor(
            own, tokenizer, SmolVLMVideoProcessor(), image_seq_len=TOKENS, chat_template=IDEFICS3_TEMPLATE
        )
    if model_type == "llava_onevision":
        marks = ["<image>", "<video>"]
        tokenizer.add_special_tokens({"additional_special_tokens": marks}, replace_extra_special_tokens=False)
        size = {"height": SIDE, "width": SIDE}
        return LlavaOnevisionProcessor(
            LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=PINPOINTS, **normal),
            tokenizer,
            LlavaOnevisionVideoProcessor(size=size),
            num_image_tokens=(SIDE // PATCH) ** 2,
            vision_feature_select_strategy="full",
            chat_template=ONEVISION_TEMPLATE,
        )
    tokenizer.add_special_tokens({"additional_special_tokens": [*NAMED.values()]}, replace_extra_special_tokens=False)
    tokenizer._set_model_specific_special_tokens(NAMED)
    size = {"height": SIDE, "width": SIDE}
    return InternVLProcessor(
        GotOcr2ImageProcessor(size=size, max_patches=6, **normal),
        tokenizer,
        InternVLVideoProcessor(size=size),
        image_seq_length=TOKENS,
        chat_template=INTERNVL_TEMPLATE,
    )


def tiled_config(model_type: str, text: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the settings of a tiny model's configuration."""
    image = {"internvl": "<IMG_CONTEXT>"}.get(model_type, "<image>")
    sizes: dict[str, Any] = {"image_size": SIDE, "patch_size": PATCH}
    if model_type == "internvl":
        sizes = {key: [value, value] for key, value in sizes.items()}
    kind = {"idefics3": "llama", "smolvlm": "llama"}.get(model_type, "qwen2")
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    own: dict[str, Any] = {}
    if model_type == "llava_onevision":
        sizes |= {"model_type": "siglip_vision_model", "vision_use_head": False}
        own = {"image_grid_pinpoints": PINPOINTS, "video_token_id": tokenizer.convert_tokens_to_ids("<video>")}
    return {
        **own,
        "text_config": {**text, "model_type": kind, "architectures": [names[kind]]},
        "vision_config": {**TOWER, **sizes, "initializer_range": 0.2},
        "image_token_id": tokenizer.convert_tokens_to_ids(image),
        "pad_token_id": text["pad_token_id"],
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def own_tiles(encoded: Mapping[str, Any]) -> Tensor:
    """Return the tiles [tiles, 3, side, side] of what a processor returned, without those that fill images up."""
    pixels = encoded["pixel_values"]
    if "image_sizes" not in encoded:
        return pixels.flatten(0, -4)  # Idefics3's are of one sequence
    counts = [image_size_to_num_patches(size.tolist(), PINPOINTS, SIDE) for size in encoded["image_sizes"]]
    return torch.cat([tiles[:count] for tiles, count in zip(pixels, counts, strict=True)])
