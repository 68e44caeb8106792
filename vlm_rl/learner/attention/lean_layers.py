"""RMSNorm and the SiLU-gated MLP of a transformers model, with a backward pass that keeps less.

Autograd keeps the inputs of every single operation. Of an RMSNorm these are the input and the normalized input
(in bfloat16 a float32 copy too); of a gated MLP the gate, its SiLU, the other factor and the product. Here a
norm keeps its input and one number per token, and an MLP keeps gate, factor and product; the backward pass
computes the rest again. Without gradient checkpointing this saves about a quarter of a layer's activations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers.activations import SiLUActivation


def install(model: nn.Module) -> list[str]:
    """Replace the forward of every RMSNorm and every SiLU-gated MLP that transformers built, in place.

    Returns the names of the kinds that the model has.
    """
    kinds: set[str] = set()
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
            kinds.add("RMSNorm")
        elif is_gated_mlp(module):
            module.forward = partial(_gated_mlp, module)
            kinds.add("SiLU-gated MLP")
    return sorted(kinds)


def is_gated_mlp(module: nn.Module) -> bool:
    """Tell whether a module is down(silu(gate(x)) up(x)) and nothing else; GLM's merger begins with more layers."""
    parts = dict(module.named_children())
    return parts.keys() == {"gate_proj", "up_proj", "down_proj", "act_fn"} and isinstance(
        parts["act_fn"], SiLUActivation
    )


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    return _RMSNorm.apply(x, norm.weight, norm.variance_epsilon)


def _gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(_SiluTimes.apply(mlp.gate_proj(x), mlp.up_proj(x)))


class _RMSNorm(torch.autograd.Function):
    """Compute y = w n with n = x r and r = (mean(x^2) + epsilon)^(-1/2), over the last dimension.

    With g the gradient of y, that of w is the sum of g n over tokens, and that of x is
    r (g w - n mean(g w n)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise).square_()
        rate = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, rate)
        return (x * rate).to(x.dtype) * weight  # rounded before the weight, as transformers and vLLM do

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, rate = ctx.saved_tensors
        normal = x * rate
        product = grad * normal
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = (grad * weight).to(rate.dtype).addcmul_(normal, mean, value=-1).mul_(rate)
        return grad_x.to(x.dtype), grad_weight, None


class _SiluTimes(torch.autograd.Function):
    """Compute silu(gate) * factor."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(gate, factor)
        return silu(gate).mul_(factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, factor = ctx.saved_tensors
        through = grad * factor
        torch.ops.aten.silu_backward.grad_input(through, gate, grad_input=through)
        return through, silu(gate).mul_(grad)
