"""torch's variable-length flash attention written out, with what its kernels require and do not all check.

Registered with the dispatcher in place of the CUDA kernels, so that code which calls the operators runs on a CPU, in
any dtype, through the operators' own schema. As in the kernels, scores, softmax and sums are float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def scores(query: Tensor, key: Tensor, *, causal: bool, scale: float, left: int = -1, right: int = -1) -> Tensor:
    """Return the scaled scores [heads, queries, keys] of one run; the last query sees the last key.

    A query sees this many keys to the left and to the right of its own; -1 is not a limit.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    all_scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    before, everything = key.shape[0] - query.shape[0], torch.ones_like(all_scores[0], dtype=torch.bool)
    right = 0 if causal else right
    hidden = everything.triu(1 + before + right) if right >= 0 else ~everything
    if left >= 0:
        hidden = hidden | everything.tril(before - left - 1)
    return all_scores.masked_fill(hidden, -torch.inf)


def check(query: Tensor, key: Tensor, value: Tensor, cuts: tuple[Tensor, Tensor, int, int]) -> None:
    assert all(x.dim() == 3 and x.stride(-1) == 1 for x in (query, key, value))
    assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0
    for cut, longest, tokens in ((cuts[0], cuts[2], len(query)), (cuts[1], cuts[3], len(key))):
        assert cut.dtype == torch.int32 and cut.is_contiguous() and len(cut) > 1
        assert cut[0] == 0 and cut[-1] == tokens and cut.diff().min() > 0 and cut.diff().max() == longest
    assert len(cuts[0]) == len(cuts[1])


def sides(left: int | None, right: int | None) -> dict[str, int]:
    return {"left": -1 if left is None else left, "right": -1 if right is None else right}


def forward(
    query: Tensor, key: Tensor, value: Tensor, cut_q: Tensor, cut_k: Tensor, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **unused: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    check(query, key, value, (cut_q, cut_k, max_q, max_k))
    assert dropout_p == 0 and not return_debug_mask
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    dtype, precise = query.dtype, torch.promote_types(query.dtype, torch.float32)
    query, key, value = (x.to(precise) for x in (query, key, value))
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1])
    group = query.shape[1] // key.shape[1]
    for run in range(len(cut_q) - 1):
        q, k = slice(cut_q[run], cut_q[run + 1]), slice(cut_k[run], cut_k[run + 1])
        s = scores(query[q], key[k], causal=is_causal, scale=factor, **sides(window_size_left, window_size_right))
        lse[:, q] = s.logsumexp(-1)
        out[q] = torch.einsum("hqk,khd->qhd", s.softmax(-1), value[k].repeat_interleave(group, dim=1))
    return out.to(dtype), lse, query.new_empty(2), query.new_empty(0), query.new_empty(0)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cut_q: Tensor, cut_k: Tensor,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor,
    *, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    check(query, key, value, (cut_q, cut_k, max_q, max_k))
    assert dropout_p == 0 and grad.shape == out.shape == query.shape
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    assert lse.shape == query.shape[1::-1] and lse.is_contiguous(), "the kernel reads on from its first element"
    dtype, group = query.dtype, query.shape[1] // key.shape[1]
    precise = torch.promote_types(dtype, torch.float32)
    grad, query, key, value, out = (x.to(precise) for x in (grad, query, key, value, out))
    grad_q, grad_k, grad_v = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for run in range(len(cut_q) - 1):
        q, k = slice(cut_q[run], cut_q[run + 1]), slice(cut_k[run], cut_k[run + 1])
        s = scores(query[q], key[k], causal=is_causal, scale=factor, **sides(window_size_left, window_size_right))
        p = (s - lse[:, q, None]).exp()
        of_p = torch.einsum("qhd,khd->hqk", grad[q], value[k].repeat_interleave(group, dim=1))
        of_scores = p * (of_p - (grad[q] * out[q]).sum(-1).T[..., None]) * factor
        grad_q[q] = torch.einsum("hqk,khd->qhd", of_scores, key[k].repeat_interleave(group, dim=1))
        grad_k[k] = torch.einsum("hqk,qhd->khd", of_scores, query[q]).unflatten(1, (-1, group)).sum(2)
        grad_v[k] = torch.einsum("hqk,qhd->khd", p, grad[q]).unflatten(1, (-1, group)).sum(2)
    return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype)


@contextmanager
def flash_attention_on_cpu() -> Iterator[None]:
    """Let aten::_flash_attention_forward and _backward take CPU tensors for the length of a `with` block."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield
