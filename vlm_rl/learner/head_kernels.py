"""Triton kernels of the output head: a chunk's logits are read once forward, and read and written once backward.

They compute what vlm_rl.learner.head computes with torch, in float32, and keep no copy of the logits: the gradient is
written over them. Under TRITON_INTERPRET=1 they run on a CPU, which is how they are tested.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_BLOCK, _WARPS = 4096, 8


@triton.jit
def _score_kernel(logits, target, logp, entropy, lse, vocabulary, temperature, BLOCK: tl.constexpr):
    """Reduce one row: m the largest logit so far, s = sum e^(x - m), and t = sum e^(x - m) (x - m)."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocabulary
    m = tl.full([], -1e30, tl.float32)  # below every logit that is not -inf
    s = tl.full([], 0.0, tl.float32)
    t = tl.full([], 0.0, tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(start + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(m, tl.max(x, axis=0))
        shrunk = tl.exp(m - higher)
        e = tl.exp(x - higher)
        t = shrunk * (t + (m - higher) * s) + tl.sum(e * tl.where(x > -1e30, x - higher, 0.0), axis=0)
        s = shrunk * s + tl.sum(e, axis=0)
        m = higher
    log_s = tl.log(s)
    chosen = tl.load(start + tl.load(target + row)).to(tl.float32) / temperature
    tl.store(lse + row, m + log_s)
    tl.store(logp + row, chosen - m - log_s)
    tl.store(entropy + row, log_s - t / s)


@triton.jit
def _gradient_kernel(
    logits, target, lse, entropy, grad, grad_entropy, vocabulary, temperature,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write (g (onehot(target) - p) - e p (log p + H)) / temperature over a block of one row's logits."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = logits + row * vocabulary + column
    inside = column < vocabulary
    g = tl.load(grad + row)
    x = tl.load(here, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    log_p = x - tl.load(lse + row)
    p = tl.exp(log_p)
    slope = g
    if HAS_ENTROPY:
        slope += tl.load(grad_entropy + row) * tl.where(x > -1e30, log_p + tl.load(entropy + row), 0.0)
    value = (tl.where(column == tl.load(target + row), g, 0.0) - p * slope) / temperature
    tl.store(here, value.to(logits.dtype.element_ty), mask=inside)


@torch.library.custom_op("vlm_rl::score_logits", mutates_args=())
def score_logits(logits_CV: Tensor, target_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of the targets, entropies and log-sum-exps of the logits over the temperature, float32 [C]."""
    logp_C, entropy_C, lse_C = (torch.empty_like(target_C, dtype=torch.float32) for _ in range(3))
    if len(logits_CV):
        assert logits_CV.is_contiguous()
        launch: Any = _score_kernel[(len(logits_CV),)]
        launch(
            logits_CV, target_C, logp_C, entropy_C, lse_C, logits_CV.shape[1], temperature,
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return logp_C, entropy_C, lse_C


@score_logits.register_fake
def _(logits_CV: Tensor, target_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(target_C, dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


@torch.library.custom_op("vlm_rl::logit_gradient_", mutates_args={"logits_CV"})
def logit_gradient_(
    logits_CV: Tensor,
    target_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor | None,
    grad_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
) -> None:
    """Write the gradient of the logits over them.

    Args:
        logits_CV: as score_logits got them, contiguous.
        target_C: the targets.
        lse_C: what score_logits returned.
        entropy_C: what it returned too; read only where entropies have a gradient.
        grad_C: of the log-probs.
        grad_entropy_C: of the entropies; None if they have none.
        temperature: divides the logits.
    """
    rows, vocabulary = logits_CV.shape
    if not rows:
        return
    assert logits_CV.is_contiguous()
    grads = [lse_C if x is None else x.contiguous() for x in (entropy_C, grad_C, grad_entropy_C)]
    launch: Any = _gradient_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))]
    launch(
        logits_CV, target_C, lse_C, *grads, vocabulary, temperature,
        HAS_ENTROPY=grad_entropy_C is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


@logit_gradient_.register_fake
def _(*_: object) -> None:
    return None
