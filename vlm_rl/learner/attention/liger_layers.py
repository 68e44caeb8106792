"""RMSNorm, the SiLU-gated MLP and rotary positions of a transformers model by Liger's Triton kernels.

    pip install liger-kernel        # Apache-2.0 and BSD-2, github.com/linkedin/Liger-Kernel

Each kernel reads its inputs once and writes its outputs once, where transformers' own layers make a pass for every
operation. Rotary positions in three dimensions are covered: transformers resolves them into one cosine and sine for
each token before its layers rotate. Whether a kernel is right for a layer is found by what the layer computes, not by
its name: a norm that multiplies by 1 + w, or rounds elsewhere, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vlm_rl.errors import UserError
from vlm_rl.learner.attention.lean_layers import is_gated_mlp

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's kernels run on a CPU: how these are tested
_ROTATE = "apply_rotary_pos_emb"  # what the rotation is called in transformers' models
_SETTING = "model.layer_patches=liger"


def install(model: nn.Module, *, on_gpu: bool) -> list[str]:
    """Replace the layers in place. Returns the names of the kinds that the model has.

    Raises UserError if Liger is not installed, if there is no GPU, and for a layer of which no kernel of Liger
    computes what the layer computes.
    """
    ops = kernels()
    if not on_gpu and not IS_INTERPRETED:
        raise UserError(f"{_SETTING} needs a GPU, and there is none here; set it to auto")
    kinds: set[str] = set()
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            if not _is_plain_norm(kind):
                raise UserError(
                    f"{_SETTING}: {kind.__name__} of this model is not w * round(x / rms), and Liger's kernel would "
                    "compute another norm; set it to auto"
                )
            module.forward = partial(_norm, ops.LigerRMSNormFunction, module)
            kinds.add("RMSNorm")
        elif is_gated_mlp(module):
            module.forward = partial(_gated_mlp, ops.LigerSiLUMulFunction, module)
            kinds.add("SiLU-gated MLP")
        elif (rotate := kind.forward.__globals__.get(_ROTATE)) and _ROTATE in kind.forward.__code__.co_names:
            if not _is_plain_rotation(rotate):
                raise UserError(
                    f"{_SETTING}: {kind.__name__} of this model rotates other pairs than x[i] and x[i + d/2] of a "
                    "whole head, which Liger's kernel does; set it to auto"
                )
            module.forward = MethodType(_with_rotation(kind.forward, ops.LigerRopeFunction), module)
            kinds.add("rotary positions")
    return [f"{kind} (Liger)" for kind in sorted(kinds)]


def kernels() -> Any:
    """Return Liger's autograd functions. Raises UserError if it is not installed."""
    try:
        from liger_kernel import ops
    except ImportError as error:
        raise UserError(f"{_SETTING} needs Liger ({error}): pip install liger-kernel, or set it to auto") from None
    return ops


def _norm(function: Any, norm: Any, x: Tensor) -> Tensor:
    # "llama": rounded before the weight. Not in place: the gradient that arrives may be read by others too.
    return function.apply(x, norm.weight, norm.variance_epsilon, 0.0, "llama", False, None)


def _gated_mlp(function: Any, mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(function.apply(mlp.gate_proj(x), mlp.up_proj(x), 1.0, 1.0))


def _with_rotation(forward: Any, function: Any) -> FunctionType:
    """Return a layer's forward with another rotation; that of other models stays as it is."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return function.apply(q, k, cos, sin, None, unsqueeze_dim)

    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTATE: rotate},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


# --- what a layer computes ----------------------------------------------------------------------------


@cache
def _is_plain_norm(kind: type[Any]) -> bool:
    """Tell whether norms of a class compute w * round(x / rms), bit for bit in bfloat16."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = 3 * torch.randn(16, 64).bfloat16()
        norm = kind(64).bfloat16()
        if not hasattr(norm, "variance_epsilon") or getattr(norm, "weight", None) is None:
            return False
        nn.init.normal_(norm.weight)
        with torch.no_grad():
            wide = x.float()
            rate = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            return torch.equal(norm(x), norm.weight * (wide * rate).bfloat16())


@cache
def _is_plain_rotation(rotate: Callable[..., Any]) -> bool:
    """Tell whether a rotation turns x[i] and x[i + d/2] of a whole head."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 1, 2, 5, 8, generator=generator)
        angles = torch.randn(1, 5, 4, generator=generator).repeat(1, 1, 2)
        cos, sin = angles.cos(), angles.sin()
        wanted = [x * cos + torch.cat([-x[..., 4:], x[..., :4]], dim=-1) * sin for x in (q, k)]
        return all(torch.allclose(x, y) for x, y in zip(rotate(q, k, cos, sin), wanted, strict=True))
