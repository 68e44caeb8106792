"""Weights in FP8 as a rollout engine keeps them: which ones, and rounded how.

vLLM rounds them while it loads (its `fp8_per_channel`): each output row w of a matrix has the scale
s = max |w| / 448 in float32, and is stored as q = w / s in float8_e4m3fn. The same few operations here give the same
bits on every device, so that the learner can say what an engine must hold, and nothing is left to a tolerance. A row
knows nothing of the rows beside it: fused matrices, and ranks that divide them, have the scales of the whole.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from vlm_rl.config import RolloutConfig
from vlm_rl.errors import UserError
from vlm_rl.model_files.routers import num_experts

FP8 = torch.float8_e4m3fn
FP8_LAYERS = r"^(model\.)?((language_model|text_model)\.)?(model\.)?layers\.\d+\.(self_attn|mlp)\.\w+_proj$"
"""The layers that are rounded: projections of the language model's attention and MLPs, by the name that vLLM gives
them and by transformers'. Embeddings, output head, norms, vision tower and merger stay as they are."""

_LARGEST = torch.finfo(FP8).max
_SMALLEST_SCALE = 1 / (_LARGEST * 512)  # of a row of zeros
_CHUNK = 1 << 24  # elements rounded at a time: bounds each float32 temporary to 64 MB


def is_in_fp8(name: str) -> bool:
    """Tell whether an engine in FP8 rounds the learner's parameter of this name."""
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and re.match(FP8_LAYERS, layer) is not None


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return q [out, in] in FP8 and s [out, 1] in float32 of a matrix, whose dtype is the engine's."""
    # Divided by a tensor, as vLLM does: by a number torch would multiply with its reciprocal.
    largest = torch.tensor(_LARGEST, dtype=torch.float32, device=weight.device)
    scale = (weight.abs().amax(1, keepdim=True).float() / largest).clamp_min(_SMALLEST_SCALE)
    whole = torch.empty_like(weight, dtype=FP8)
    for rows in _row_chunks(weight):
        whole[rows] = (weight[rows] / scale[rows]).clamp(-_LARGEST, _LARGEST).to(FP8)
    return whole, scale


def values(whole: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return q s [out, in], what an engine multiplies with, rounded to `dtype`.

    Args:
        whole: q [out, in].
        scale: s [out, 1].
        dtype: in bfloat16 different q stay different, and so do scales of different maxima.
    """
    out = torch.empty_like(whole, dtype=dtype)
    for rows in _row_chunks(whole):
        out[rows] = (whole[rows].float() * scale[rows]).to(dtype)
    return out


def as_held(name: str, tensor: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the value that an FP8 engine multiplies with for a parameter of the learner, in the dtype given."""
    return values(*rounded(tensor.detach().to(dtype)), dtype=dtype) if is_in_fp8(name) else tensor


def _row_chunks(matrix: Tensor) -> list[slice]:
    step = max(1, _CHUNK // matrix.shape[1])
    return [slice(start, start + step) for start in range(0, matrix.shape[0], step)]


def check_fp8(model_config: Any, rollout: RolloutConfig, *, dtype: torch.dtype) -> None:
    """Raise UserError for a model that rollout.quantization cannot round.

    Args:
        model_config: its transformers configuration.
        rollout: of the run.
        dtype: of the model's weights.
    """
    if rollout.quantization is None:
        return
    if dtype != torch.bfloat16:
        raise UserError(
            f"rollout.quantization is {rollout.quantization}, and the model is in "
            f"{str(dtype).removeprefix('torch.')}, which vLLM does not round: set model.dtype=bfloat16"
        )
    if num_experts(model_config.get_text_config()):
        raise UserError(
            f"rollout.quantization is {rollout.quantization}, and {model_config.model_type} is a mixture of experts: "
            "they are most of its weights, and vLLM's kernels reorder them, so that no sync could be proved; leave "
            "it out"
        )
