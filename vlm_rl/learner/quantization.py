"""QLoRA (arXiv 2305.14314): the linear layers under the adapters in 4 bits, by bitsandbytes.

The only file that imports bitsandbytes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from vlm_rl.config import ModelConfig
from vlm_rl.devices import has_gpu
from vlm_rl.errors import UserError

BITS_PER_WEIGHT = 4 + 8 / 64 + 32 / (64 * 256)
"""NF4 with a scale of 8 bits for 64 weights, and one of 32 bits for 256 of these (the paper, section 3)."""


def check_quantization(config: ModelConfig) -> None:
    """Raise UserError if the configuration asks for 4 bits and this machine cannot train so."""
    if config.lora is None or not config.lora.load_in_4bit:
        return
    if not has_gpu():
        raise UserError(
            "model.lora.load_in_4bit is true, and there is no GPU here: 4-bit training is for GPUs; remove it, or "
            "see what the run needs with --dry-run"
        )
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "model.lora.load_in_4bit is true, and bitsandbytes is not installed: pip install bitsandbytes"
        )


def quantized_loading(whole: list[str], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that put linear layers in 4 bits: NF4, with double quantization.

    Args:
        whole: names of the linear layers that stay as they are.
        dtype: that products are computed in.
        device: where the model is loaded to.
    """
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=whole,
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def is_quantized(parameter: Tensor) -> bool:
    """Tell whether a weight is packed into 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def dequantized(parameter: Any) -> Tensor:
    """Return the matrix [out, in] that a weight in 4 bits stands for, in the dtype of its products."""
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    return dequantize_4bit(parameter.data, parameter.quant_state)
