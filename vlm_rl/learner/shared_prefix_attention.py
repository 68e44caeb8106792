"""Attention over a shared-prefix row: each prompt to itself, each response to its prompt and itself.

Both are causal. The cost is P^2 + G (P R + R^2) for a prompt of P and G responses of R tokens, instead of the
(P + G R)^2 of a dense mask over the row.

Registered with transformers' AttentionInterface under NAME; the layout arrives as a keyword argument of the
model's forward. There is no mask to build, so the registered mask function returns None. Without a layout the
function refuses to run instead of attending to everything.

On a CPU torch's own kernels are called by their private names, because only those give and take the
log-sum-exp that joins the two parts of a response's softmax: no padding, no mask, no copy of the prompt's keys
for each response. A GPU gets FlexAttention over the row, which skips the blocks that `may_attend` leaves empty.
FlexAttention has no backward on a CPU, so CPU tests cover its mask and its forward alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from vlm_rl.learner.packing import Layout

NAME = "shared_prefix"
BUCKET = 1024  # tokens: FlexAttention compiles once for each multiple of it


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    block_mask: BlockMask | None = None,  # flex_mask(layout), made once for all layers; None: the CPU's way
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, heads, head_dim], as transformers expects it."""
    assert layout is not None, f"attention {NAME!r} needs the packed row's layout"
    assert query.shape[0] == 1, query.shape
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Any  # a Function's apply has no annotation
    if block_mask is not None:
        output = flex(query, key, value, block_mask, scale)
    else:
        output = _TwoSoftmaxes.apply(query, key, value, layout, scale)
    return output.transpose(1, 2), None


def may_attend(pieces_2T: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return whether the tokens at ``query`` may attend to those at ``key`` (indices that broadcast)."""
    own, prompt = pieces_2T
    piece = own[key]
    return (key <= query) & ((piece == own[query]) | (piece == prompt[query]))


def flex_mask(layout: Layout) -> BlockMask:
    """Return FlexAttention's mask of a row, filled up to a multiple of BUCKET with tokens of no piece.

    Few different lengths mean few compilations.
    """
    num_tokens = layout.pieces_2T.shape[1]
    size = -(-num_tokens // BUCKET) * BUCKET
    pieces_2T = pad(layout.pieces_2T, (0, size - num_tokens), value=-1)
    return create_block_mask(
        lambda _batch, _head, query, key: may_attend(pieces_2T, query, key),
        B=None,
        H=None,
        Q_LEN=size,
        KV_LEN=size,
        device=str(pieces_2T.device),
    )


def flex(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: float) -> Tensor:
    """Return [1, heads, T, head_dim] from one kernel over the row that visits the mask's blocks alone."""
    num_tokens = query.shape[2]
    missing = block_mask.seq_lengths[0] - num_tokens
    q, k, v = (pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    function: Any = _compiled_flex() if query.is_cuda else flex_attention
    return function(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=True)[:, :, :num_tokens]


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


class _TwoSoftmaxes(torch.autograd.Function):
    """Attend, on a CPU, from every prompt and response to itself, then from a prompt's responses to the prompt.

    With l_1, l_2 the log-sum-exps of the two parts of a response's softmax, the whole softmax has
    l = log(e^l_1 + e^l_2), and its output is the sum of the parts' outputs weighted by e^(l_1 - l) and
    e^(l_2 - l). The backward kernel of either part, given the whole's output and l, yields that part's share
    of the whole's gradient.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        """Return [1, heads, T, head_dim], stored as [1, T, heads, head_dim]: what comes next copies nothing."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        k, v = (_repeat_heads(x, query.shape[1]) for x in (key, value))
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for own in _pieces(layout):
            out[:, :, own], lse[:, :, own] = kernel(
                query[:, :, own], k[:, :, own], v[:, :, own], 0.0, True, scale=scale
            )
        for prompt, responses in _prompts_and_responses(layout):
            of_prompt, prompt_lse = kernel(
                query[:, :, responses], k[:, :, prompt], v[:, :, prompt], 0.0, False, scale=scale
            )
            share = torch.sigmoid(prompt_lse - lse[:, :, responses])  # e^(l_2 - l)
            out[:, :, responses].lerp_(of_prompt, share[..., None].to(out.dtype))
            lse[:, :, responses] = torch.logaddexp(lse[:, :, responses], prompt_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, out, lse = ctx.saved_tensors
        k, v = (_repeat_heads(x, query.shape[1]) for x in (key, value))

        def part(queries: slice, keys: slice, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            q, o, g = (x[:, :, queries] for x in (query, out, grad))
            return kernel(g, q, k[:, :, keys], v[:, :, keys], o, lse[:, :, queries], 0.0, causal, scale=ctx.scale)

        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (query, k, v))
        for own in _pieces(ctx.layout):
            grad_q[:, :, own], grad_k[:, :, own], grad_v[:, :, own] = part(own, own, causal=True)
        for prompt, responses in _prompts_and_responses(ctx.layout):
            dq, dk, dv = part(responses, prompt, causal=False)
            grad_q[:, :, responses] += dq
            grad_k[:, :, prompt] += dk
            grad_v[:, :, prompt] += dv
        grad_k, grad_v = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, None, None


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _pieces(layout: Layout) -> Iterator[slice]:
    """Yield the slice of every prompt and of every response that has tokens."""
    for cuts in layout.cuts:
        yield from (slice(start, end) for start, end in pairwise(cuts) if start < end)


def _prompts_and_responses(layout: Layout) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of every prompt and of its responses together, where those have tokens."""
    for start, first, *_, end in layout.cuts:
        if first < end:
            yield slice(start, first), slice(first, end)


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
