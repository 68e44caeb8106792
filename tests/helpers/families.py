"""Tiny random models of every supported type, each a folder with the tokenizer and processor of its family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.conversion_mapping import get_model_conversion_mapping

from tests.helpers.gemma3 import gemma3_config, gemma3_processor
from tests.helpers.gemma4 import gemma4_config, gemma4_processor
from tests.helpers.glm_families import glm_config, glm_processor
from tests.helpers.pixtral_families import MERGED, pixtral_config, pixtral_processor
from tests.helpers.tiled_families import tiled_config, tiled_processor
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.model_files.checkpoint_layout import use_published_layout
from vlm_rl.model_files.weights import stored_buffers

VISION_FAMILIES = [name for name, family in SUPPORTED.items() if family.tower]
GLM_FAMILIES = [name for name in VISION_FAMILIES if name.startswith("glm")]
PIXTRAL_FAMILIES = [*MERGED]
TILED_FAMILIES = ["idefics3", "internvl", "llava_onevision", "smolvlm"]

# A head is 32 wide, the smallest width that vLLM's CPU attention takes; Qwen3's are wider than hidden size / heads.
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.125,  # 1 over the root of the width
}
WIDE_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# The CPU kernel pads 48 to 64; and 2 * 48 is not the hidden size, so that a shape tells its layout.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
# Whose keys' heads vLLM's kernels want 16 wide at least.
LINEAR = {
    "num_hidden_layers": 4,  # of which the last attends in full
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Of which the first layer has none. Their weights are scaled, and a bias counts in choosing them.
GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": False,  # as published: vLLM reads it
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 48}
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
OF_TYPE: dict[str, dict[str, Any]] = {
    "gemma2": {
        **WIDE_HEADS,
        **WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,  # vLLM knows no other
    },
    "gemma3": {**WIDE_HEADS, **WINDOW},
    "gemma3_text": {**WIDE_HEADS, **WINDOW},
    "gemma4": {
        **WIDE_HEADS,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "use_bidirectional_attention": "vision",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
        **GEMMA_EXPERTS,
    },
    "glm4v_moe": {**WIDE_HEADS, **GLM_EXPERTS},
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "llava": {"sliding_window": None, "head_dim": 32},
    "mistral": {"sliding_window": None, "head_dim": 32},
    # vLLM takes this epsilon for the projector's norm, whatever the configuration says.
    "mistral3": {"sliding_window": None, "head_dim": 32, "rms_norm_eps": 1e-5},
    "qwen3": WIDE_HEADS,
    "qwen3_5": {**WIDE_HEADS, **LINEAR},
    "qwen3_5_moe": {**WIDE_HEADS, **LINEAR, **EXPERTS, **SHARED_EXPERT},
    "qwen3_moe": {**WIDE_HEADS, **EXPERTS},
    "qwen3_next": {**WIDE_HEADS, **LINEAR, **EXPERTS, **SHARED_EXPERT},
    "qwen3_vl": WIDE_HEADS,
    "qwen3_vl_moe": {**WIDE_HEADS, **EXPERTS},
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
DEEPSTACK = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,  # a square of 4 x 4, which every image stretches
    "deepstack_visual_indexes": [0, 1],
}
PLAIN_TOWER = {key: value for key, value in DEEPSTACK.items() if key != "deepstack_visual_indexes"}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "num_heads": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "fullatt_block_indexes": [1],
    },
    "qwen3_5": PLAIN_TOWER,
    "qwen3_5_moe": PLAIN_TOWER,
    "qwen3_vl": DEEPSTACK,
    "qwen3_vl_moe": DEEPSTACK,
}


def build_family(model_type: str, folder: Path, *, tokenizer_of: Path, **changes: Any) -> Path:
    """Write a tiny random model of a type, with the tokenizer of another tiny model, and return its folder."""
    processor = _processor(model_type, tokenizer_of) if model_type in VISION_FAMILIES else None
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of) if processor is None else processor.tokenizer
    text = {
        **TEXT,
        **OF_TYPE.get(model_type, {}),
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }
    if processor is not None:
        config = _vision_config(model_type, text, AutoConfig.from_pretrained(tokenizer_of), tokenizer)
        processor.save_pretrained(folder)
        auto: Any = AutoModelForImageTextToText
    else:
        config = AutoConfig.for_model(model_type, **text)
        tokenizer.save_pretrained(folder)
        auto = AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
        if model_type == "gemma3":  # which begins at 0: images would change nothing
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
        for _, constant in stored_buffers(model):  # which begin at 0 or 1: a lost one would change nothing
            constant.uniform_(0.5, 1.5)
        if model_type == "gemma4":  # which begin at 1
            for name, parameter in model.named_parameters():
                if ".router." in name and "scale" in name:
                    torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if model_type in (
            "gemma3",
            "llava_onevision",
        ):  # the tower's weights are in vision_model., as in published checkpoints
            model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    use_published_layout(model)
    model.save_pretrained(folder)
    return folder


def _vision_config(model_type: str, text: dict[str, Any], known: Any, tokenizer: Any) -> Any:
    if model_type == "gemma3":
        return AutoConfig.for_model(model_type, **gemma3_config(text, tokenizer))
    if model_type == "gemma4":
        return AutoConfig.for_model(model_type, **gemma4_config(text, tokenizer))
    if model_type in PIXTRAL_FAMILIES:
        return AutoConfig.for_model(model_type, **pixtral_config(model_type, text, tokenizer))
    if model_type in GLM_FAMILIES:
        return AutoConfig.for_model(model_type, **glm_config(model_type, text, tokenizer))
    if model_type in TILED_FAMILIES:
        return AutoConfig.for_model(model_type, **tiled_config(model_type, text, tokenizer))
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    turned = model_type.startswith("qwen3_5")  # a quarter of a head's 32 channels is, by half as many angles
    rope: dict[str, Any] = {**ROPE, "mrope_section": [2, 1, 1] if turned else [4, 6, 6]}
    if model_type.startswith("qwen3"):
        rope["mrope_interleaved"] = True
    width = {"hidden_size" if model_type == "qwen2_vl" else "out_hidden_size": text["hidden_size"]}
    return AutoConfig.for_model(
        model_type,
        text_config={**text, "rope_parameters": rope, "model_type": f"{model_type}_text"},
        vision_config={**VISION[model_type], **width, "initializer_range": 0.2},
        tie_word_embeddings=text["tie_word_embeddings"],
        **{name: getattr(known, name) for name in ids},
    )


def _processor(model_type: str, tokenizer_of: Path) -> Any:
    if model_type == "gemma3":
        return gemma3_processor(tokenizer_of)
    if model_type == "gemma4":
        return gemma4_processor(tokenizer_of)
    if model_type in PIXTRAL_FAMILIES:
        return pixtral_processor(model_type, tokenizer_of)
    if model_type in GLM_FAMILIES:
        return glm_processor(model_type, tokenizer_of)
    if model_type in TILED_FAMILIES:
        return tiled_processor(model_type, tokenizer_of)
    known = AutoProcessor.from_pretrained(tokenizer_of)
    if model_type == "qwen2_5_vl":
        return known
    parts = {"tokenizer": known.tokenizer, "chat_template": known.chat_template}
    if model_type == "qwen2_vl":
        return Qwen2VLProcessor(image_processor=known.image_processor, video_processor=known.video_processor, **parts)
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}  # the published processor's
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        video_processor=Qwen3VLVideoProcessor(),
        **parts,
    )
