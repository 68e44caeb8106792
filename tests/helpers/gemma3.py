"""The processor of Gemma 3, with images of 56 x 56 pixels, and what its tiny model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, Gemma3ImageProcessor, Gemma3Processor

SIDE, PATCH, TOKENS = 56, 14, 4  # 4 x 4 patches, pooled to 2 x 2 tokens
NAMED = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
TURN, END = "<start_of_turn>", "<end_of_turn>"
# The layout of the published template: the system's text begins the user's turn.
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content[0].text + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}{{ '\n' }}"
    "{% if loop.first %}{{ first }}{% endif %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "<end_of_turn>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def gemma3_processor(tokenizer_of: Path) -> Any:
    """Return the family's processor with the tokenizer of a tiny model, to which it adds its own tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    marks = [*NAMED.values(), TURN, END]
    tokenizer.add_special_tokens({"additional_special_tokens": marks}, replace_extra_special_tokens=False)
    tokenizer.add_tokens(["\n" * count for count in (2, 3, 4)])  # single tokens, as in Gemma's vocabulary
    tokenizer._set_model_specific_special_tokens(NAMED)
    own = Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    return Gemma3Processor(own, tokenizer, image_seq_length=TOKENS, chat_template=TEMPLATE)


def gemma3_config(text: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the settings of a tiny model's configuration."""
    boi, eoi, image = (tokenizer.convert_tokens_to_ids(token) for token in NAMED.values())
    tower = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"image_size": SIDE, "patch_size": PATCH, "vision_use_head": False}
    end = tokenizer.convert_tokens_to_ids(END)
    return {
        "text_config": {**text, "model_type": "gemma3_text", "eos_token_id": [text["eos_token_id"], end]},
        "vision_config": {**tower, **sizes, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": TOKENS,
        "boi_token_index": boi,
        "eoi_token_index": eoi,
        "image_token_index": image,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
