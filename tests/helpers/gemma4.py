"""The processor of Gemma 4, with visual tokens of 12 pixels, and what its tiny model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
)

PATCH, POOLED, BUDGET = 4, 3, 70
NAMED = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
TURN, END = "<|turn>", "<turn|>"
# Of the layout of the published template.
TEMPLATE = (
    "{% for message in messages %}<|turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}{{ '\n' }}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "<turn|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)


def gemma4_processor(tokenizer_of: Path) -> Any:
    """Return the family's processor with the tokenizer of a tiny model, to which it adds its own tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    marks = [*NAMED.values(), "<|video|>", TURN, END]
    tokenizer.add_special_tokens({"additional_special_tokens": marks}, replace_extra_special_tokens=False)
    tokenizer._set_model_specific_special_tokens(NAMED)
    sizes: dict[str, Any] = {"patch_size": PATCH, "pooling_kernel_size": POOLED, "max_soft_tokens": BUDGET}
    return Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(**sizes),
        tokenizer,
        Gemma4VideoProcessor(**sizes),
        chat_template=TEMPLATE,
        image_seq_length=BUDGET,
    )


def gemma4_config(text: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the settings of a tiny model's configuration."""
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in NAMED.items()}
    end = tokenizer.convert_tokens_to_ids(END)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes: dict[str, Any] = {"patch_size": PATCH, "pooling_kernel_size": POOLED, "position_embedding_size": 256}
    return {
        "text_config": {**text, "model_type": "gemma4_text", "eos_token_id": [text["eos_token_id"], end]},
        "vision_config": {**tower, **sizes, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2},
        "audio_config": None,
        **ids,
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video|>"),
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
