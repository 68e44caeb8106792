"""Attention over a shared-prefix row: each prompt to itself, each response to its prompt and itself.

Both are causal. The cost is P^2 + G (P R + R^2) for a prompt of P and G responses of R tokens, instead of the
(P + G R)^2 of a dense mask over the row.

Registered with transformers' AttentionInterface under NAME; the layout arrives as a keyword argument of the
model's forward. There is no mask to build, so the registered mask function returns None. Without a layout the
function refuses to run instead of attending to everything.

The softmax of a response has two parts, its own tokens and its prompt's. torch's kernels are called by their
private names, because only those give and take the log-sum-exp that joins the parts: no padding, no mask, no copy
of the prompt's keys for each response, and nothing to compile. On a GPU the kernel is flash attention for sequences
of different lengths, which takes bfloat16 and float16. What it does not take, float32 above all, gets a dense mask
there, in torch's own scaled_dot_product_attention.

A layer with a window attends in one part: a response sees only the end of its prompt, of which it gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from vlm_rl.learner.packing import RowLayout, Runs, WindowedRuns
from vlm_rl.learner.sequence_parallel import RowShare

NAME = "shared_prefix"


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: RowLayout | None = None,
    sliding_window: int | None = None,
    share: RowShare | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a packed row, [1, T, heads, head_dim], as transformers expects it.

    Where ranks share the row, T counts those of this rank's tokens, here and in the arguments.

    Args:
        module: the layer that attends; not used.
        query: [1, heads, T, head_dim].
        key: [1, kv_heads, T, head_dim].
        value: like key.
        attention_mask: not used, since the layout says which tokens attend to which.
        scaling: factor of the scores; None for 1 / sqrt(head_dim).
        layout: of the row; it must be given.
        sliding_window: tokens of the window, in a layer that has one.
        share: this rank's part of the row; None for all of it.
    """
    assert layout is not None, f"attention {NAME!r} needs the packed row's layout"
    assert query.shape[0] == 1, query.shape
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if share is None:
        return _attended(query, key, value, layout, scale, sliding_window), None
    output = _attended(*share.to_heads(query, key, value), layout, scale, sliding_window)
    return share.to_tokens(output), None


def _attended(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scale: float, sliding_window: int | None
) -> Tensor:
    """Return the attention of a whole row, [1, T, heads, head_dim]."""
    kernel = _CPU if query.device.type == "cpu" else _FLASH if takes_flash(query, key, value) else None
    if sliding_window is not None and layout.windowed is not None:
        assert layout.windowed.window == sliding_window, (layout.windowed.window, sliding_window)
        return _windowed(query, key, value, layout.windowed, scale, flash=kernel is _FLASH)
    if kernel is None:
        return _dense(query, key, value, layout, scale).transpose(1, 2)
    inputs = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # not x[0], whose gradient is a copy
    output: Any = _TwoSoftmaxes.apply(*inputs, layout, scale, kernel)
    return output[None]


def takes_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether torch's flash attention takes such tensors [1, heads, T, head_dim] on this GPU.

    torch asks for the dtype, the card and head_dim; it would pad a head_dim that is not a multiple of 8; we do not.
    """
    return query.shape[-1] % 8 == 0 and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, True))


# --- the two softmaxes ------------------------------------------------------------------------------


class _Kernel(NamedTuple):
    """Softmax attention over runs of tokens, forward and backward.

    forward(query [Q, heads, head_dim], key [K, kv_heads, head_dim], value, runs, *, causal, scale) returns the
    output [Q, heads, head_dim] and the log-sum-exp of the scaled scores [heads, Q], in float32 at least. `causal`
    is for runs of which queries and keys are the same tokens.

    backward(grad, query, key, value, output, log-sum-exp, runs, *, causal, scale) returns the gradients of query,
    key and value. Output and log-sum-exp may be those of a softmax over more keys than these: the result is then
    these keys' share of its gradient.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    shares_heads: bool  # kv_heads may be fewer than heads; otherwise they are repeated


class _TwoSoftmaxes(torch.autograd.Function):
    """Attend from every prompt and response to itself, then from a prompt's responses to the prompt.

    With l_1, l_2 the log-sum-exps of the two parts of a response's softmax, the whole softmax has
    l = log(e^l_1 + e^l_2), and its output is the sum of the parts' outputs weighted by e^(l_1 - l) and
    e^(l_2 - l). The backward kernel of either part, given the whole's output and l, yields that part's share
    of the whole's gradient, as in ring attention (arXiv 2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scale: float, kernel: _Kernel
    ) -> Tensor:
        """Return [T, heads, head_dim]."""
        k, v = (_heads_for(kernel, x, query) for x in (key, value))
        out, lse = kernel.forward(query, k, v, layout.own, causal=True, scale=scale)
        lse = lse.contiguous()  # what it is merged with may not be: the order in memory decides how torch rounds
        if layout.shared.longest_query:
            r, p = layout.responses, layout.prompts
            of_prompt, prompt_lse = kernel.forward(query[r], k[p], v[p], layout.shared, causal=False, scale=scale)
            share = torch.sigmoid(prompt_lse - lse[:, r])  # e^(l_2 - l)
            out[r] = torch.lerp(out[r], of_prompt, share.T[..., None].to(out.dtype))
            lse[:, r] = torch.logaddexp(lse[:, r], prompt_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale, ctx.kernel = layout, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        layout, kernel = ctx.layout, ctx.kernel
        k, v = (_heads_for(kernel, x, query) for x in (key, value))
        grads = kernel.backward(grad, query, k, v, out, lse, layout.own, causal=True, scale=ctx.scale)
        if layout.shared.longest_query:
            r, p = layout.responses, layout.prompts
            parts = kernel.backward(
                grad[r], query[r], k[p], v[p], out[r], lse[:, r], layout.shared, causal=False, scale=ctx.scale
            )
            for whole, part, where in zip(grads, parts, (r, p, p), strict=True):
                whole[where] += part
        grad_q, *grads_kv = grads
        if not kernel.shares_heads:
            grads_kv = [x.unflatten(1, (key.shape[1], -1)).sum(2) for x in grads_kv]
        return grad_q, *grads_kv, None, None, None


def _heads_for(kernel: _Kernel, x: Tensor, query: Tensor) -> Tensor:
    """Return keys or values [tokens, heads, head_dim]; repeated ones lie head by head in memory."""
    if kernel.shares_heads:
        return x
    return x.transpose(0, 1).repeat_interleave(query.shape[1] // x.shape[1], dim=0).transpose(0, 1)


# --- on a CPU: one call for each run ----------------------------------------------------------------


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32)).T
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for q, k in _slices(runs):
        output, lse_of_run = kernel(*map(_batch, (query[q], key[k], value[k])), 0.0, causal, scale=scale)
        out[q], lse[:, q] = output[0].transpose(0, 1), lse_of_run[0]
    return out, lse


def _cpu_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for q, k in _slices(runs):
        inputs = map(_batch, (grad[q], query[q], key[k], value[k], out[q]))
        for whole, part, where in zip(
            grads, kernel(*inputs, lse[None, :, q], 0.0, causal, scale=scale), (q, k, k), strict=True
        ):
            whole[where] = part[0].transpose(0, 1)
    return grads


def _batch(x: Tensor) -> Tensor:
    """Return [1, heads, tokens, head_dim] for [tokens, heads, head_dim]."""
    return x.transpose(0, 1)[None]


def _slices(runs: Runs) -> Iterator[tuple[slice, slice]]:
    for queries, keys in zip(pairwise(runs.queries.tolist()), pairwise(runs.keys.tolist()), strict=True):
        yield slice(*queries), slice(*keys)


# --- on a GPU: one call for all runs ----------------------------------------------------------------


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    cuts = runs.queries, runs.keys, runs.longest_query, runs.longest_key
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *cuts, 0.0, causal, return_debug_mask=False, scale=scale
    )
    return out, lse


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    cuts = runs.queries, runs.keys, runs.longest_query, runs.longest_key
    # The random state is read only for dropout, but the kernel asks for its dtype.
    random_state, unused = torch.empty(2, dtype=torch.uint64, device=lse.device), lse.new_empty(0)
    # The kernel reads the log-sum-exp as if it were contiguous, and does not check.
    return torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse.contiguous(), *cuts, 0.0, causal, random_state, unused, scale=scale
    )


_CPU = _Kernel(_cpu_forward, _cpu_backward, shares_heads=False)
_FLASH = _Kernel(_flash_forward, _flash_backward, shares_heads=True)


# --- what flash attention does not take ---------------------------------------------------------------


def _dense(query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scale: float) -> Tensor:
    """Return [1, heads, T, head_dim], attending under one mask over the row."""
    # torch's kernels that do not hold all scores of all heads at once take no mask together with shared heads.
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return scaled_dot_product_attention(query, k, v, attn_mask=may_attend(layout, query.shape[2]), scale=scale)


# --- layers with a window -----------------------------------------------------------------------------


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, windowed: WindowedRuns, scale: float, *, flash: bool
) -> Tensor:
    """Return [1, T, heads, head_dim], each response in one softmax over its prompt's end and itself.

    The ends of the prompts are copied for each response. Where flash attention takes the tensors, the cost is that of
    the window; elsewhere a run's scores are computed in full, and a mask keeps the window.
    """
    runs, keys = windowed.runs, windowed.keys
    k, v = key[:, :, keys], value[:, :, keys]
    if flash:
        q, k, v = (x[0].transpose(0, 1) for x in (query, k, v))
        cuts = runs.queries, runs.keys, runs.longest_query, runs.longest_key
        window = (windowed.window - 1, 0)
        out: Any = varlen_attn(q, k, v, *cuts, scale=scale, window_size=window, **_with_shared_heads())
        return out[None]
    # torch's kernels that do not hold all scores of all heads at once take no mask together with shared heads.
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outputs = []
    for q_run, k_run in _slices(runs):
        num_queries, num_keys = q_run.stop - q_run.start, k_run.stop - k_run.start
        before = num_keys - num_queries  # the keys in front of the first query
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(before).triu(before - windowed.window + 1)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, q_run], k[:, :, k_run], v[:, :, k_run], attn_mask=mask, scale=scale
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _with_shared_heads() -> dict[str, Any]:
    """Return how varlen_attn is told that keys have fewer heads. That of torch 2.11 takes them without being told."""
    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def may_attend(layout: RowLayout, num_tokens: int) -> Tensor:
    """Return which token of the row may attend to which: bool [T, T], queries first."""
    index = torch.arange(num_tokens, device=layout.own.queries.device)
    own = torch.bucketize(index, layout.own.queries[1:].long(), right=True)
    mask = (own[:, None] == own).tril()
    responses, prompts = index[layout.responses], index[layout.prompts]
    query_run = torch.bucketize(index[: len(responses)], layout.shared.queries[1:].long(), right=True)
    key_run = torch.bucketize(index[: len(prompts)], layout.shared.keys[1:].long(), right=True)
    mask[responses[:, None], prompts] = query_run[:, None] == key_run
    return mask


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
