"""A tiny random Qwen2.5-VL: the real classes with 0.9 million parameters, and a tokenizer trained for it.

    build_tiny_model(Path("out/tiny"), seed=0, tokenizer_texts=texts)

AutoProcessor, AutoModelForImageTextToText and vLLM open the folder like the published model. It has the names of
Qwen's special tokens, its chat layout, its image processor and its generation_config, whose repetition penalty of
1.05 every sampler must switch off. The quickstart trains this model, and the tests use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_rl.errors import UserError
from vlm_rl.run.writing import writing
from vlm_rl.templates import ANSWER, CONTROL_TOKENS, END_ANSWER, END_THINK, THINK

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig

VISIBLE_TOKENS = (THINK, END_THINK, ANSWER, END_ANSWER, r"\boxed{")
"""Each is a single token but ordinary text: it stays in a decoded response."""

DEFAULT_TEXTS = (
    "You are a helpful assistant.",
    "system user assistant",
    "Look at the picture. Find the answer and put it in the box. How many are there? Which one is it?",
    "<think> first count, then check. one two three four five six seven eight nine ten. So the answer is 7. </think>",
)

# A word keeps its digits ("a1" is one piece), unlike in Qwen's own rule, which splits off every digit.
_WORDS = r" ?[\p{L}\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The layout of Qwen2.5-VL's template: a default system prompt unless the messages have one, images in place.
_CHAT_TEMPLATE = """\
{%- set pictures = namespace(n=0) -%}
{%- macro picture() -%}
{%- set pictures.n = pictures.n + 1 -%}
{%- if add_vision_id %}Picture {{ pictures.n }}: {% endif -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- endmacro -%}
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{{- picture() -}}
{%- elif part.type == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class TinySizes:
    """Sizes of the tiny model. A head is 32 wide, the smallest width that vLLM's CPU attention takes."""

    vocabulary: int = 512  # at most; fewer where the texts have fewer words
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 384
    context: int = 32_768  # longest sequence, in tokens
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 2
    vision_mlp: int = 128
    max_pixels: int = 1_003_520  # 1,280 visual tokens
    weight_std: float = (
        0.02  # standard deviation of every matrix; with 1 / sqrt(hidden) learning takes half the steps
    )


def build_tiny_model(
    out: Path, *, seed: int = 0, tokenizer_texts: Sequence[str] = (), visible: Sequence[str] = (), **sizes: Any
) -> Path:
    """Write the model folder and return it. Equal arguments give equal files.

    Args:
        out: the folder. Raises UserError if it exists and is not empty, and if it cannot be written.
        seed: of the random weights.
        tokenizer_texts: the texts that train the vocabulary. Any other text still encodes, as bytes.
        visible: further texts that are single tokens and ordinary text.
        sizes: overrides fields of TinySizes. Raises UserError for an unknown one.
    """
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    from vlm_rl.devices import tell_deepspeed_of_the_cpu

    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists and is not an empty folder; choose a different one or remove it")
    unknown = sorted(set(sizes) - {item.name for item in fields(TinySizes)})
    if unknown:
        raise UserError(f"the tiny model has no size {unknown[0]!r}; known: {[f.name for f in fields(TinySizes)]}")
    shape = TinySizes(**sizes)
    tokenizer = train_tokenizer(tokenizer_texts or DEFAULT_TEXTS, vocabulary=shape.vocabulary, visible=visible)
    config = _config(tokenizer, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1e-6,
        repetition_penalty=1.05,
    )
    disable_progress_bar()
    tell_deepspeed_of_the_cpu()  # saving imports it
    with writing(out):
        model.save_pretrained(out)
        save_processor(tokenizer, out, max_pixels=shape.max_pixels)
    return out


def train_tokenizer(texts: Sequence[str], *, vocabulary: int, visible: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocabulary` entries, control tokens and visible ones included."""
    added = (*VISIBLE_TOKENS, *visible)
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(CONTROL_TOKENS) - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    core.train_from_iterator([_without_added_tokens(text, added) for text in texts], trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in CONTROL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=131_072,
    )


def _without_added_tokens(text: str, visible: Sequence[str]) -> str:
    """Return the text as the merges see it: added tokens are cut out before words are split."""
    for token in (*CONTROL_TOKENS, *visible):
        text = text.replace(token, "\n")
    return text


def _config(tokenizer: PreTrainedTokenizerFast, shape: TinySizes) -> Qwen2_5_VLConfig:
    from transformers import Qwen2_5_VLConfig

    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in CONTROL_TOKENS}
    frequencies = shape.hidden // shape.heads // 2  # of a head, divided among time, height and width
    time = frequencies // 4
    height = (frequencies - time) // 2
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "initializer_range": shape.weight_std,
        "use_sliding_window": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "mrope_section": [time, height, frequencies - time - height],
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_mlp,
        "num_heads": shape.vision_heads,
        "out_hidden_size": shape.hidden,
        "initializer_range": shape.weight_std,
        "fullatt_block_indexes": [shape.vision_layers - 1],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )


def save_processor(tokenizer: PreTrainedTokenizerFast, out: Path, *, max_pixels: int) -> None:
    """Write a Qwen2.5-VL processor around the tokenizer, with the chat layout above."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    size = {"shortest_edge": 56 * 56, "longest_edge": max_pixels}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False),
        chat_template=_CHAT_TEMPLATE,
    )
    processor.save_pretrained(out)
