"""Attention over packed rows against padded ones, in the kernel that this machine gives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from vlm_rl.devices import default_device
from vlm_rl.doctor.check import Check, phase
from vlm_rl.learner.attention.shared_prefix import shared_prefix_attention
from vlm_rl.learner.packing import TokenSpan, row_layout

FLOAT32_LIMIT = 1e-4  # share of the norm of the output, or of a gradient
BFLOAT16_FACTOR = 1.5  # times the error of torch's own kernel over padded rows
HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128  # of Qwen2.5-VL-7B
FUSED = "_flash_attention_forward"  # what a GPU must call in bfloat16: the dense mask grows with the row's square

Groups = tuple[tuple[int, tuple[int, ...]], ...]  # tokens of each prompt, and of its responses
ON_GPU: Groups = ((1024, (64, 300, 1000, 2048)), (300, (1, 17, 500)))
ON_CPU: Groups = ((64, (3, 30, 70)), (20, (1, 9)))


class AttentionKernels(TorchDispatchMode):
    """Remembers the names of the attention kernels that the forward passes call."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if ("attention" in name or "attn" in name) and "backward" not in name:
            self.names.add(name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def attention_fp32(_: object) -> Check:
    """Compare output and gradients in float32, which takes a different kernel than training on a GPU."""
    groups = _groups()
    with AttentionKernels() as kernels:
        error = _error(_packed(groups), torch.float32, groups)
    detail = f"output and gradients within {error:.1e} of padded rows' (limit {FLOAT32_LIMIT:.0e})"
    return _answer("attention fp32", detail, kernels, wrong=not error <= FLOAT32_LIMIT)


def attention_bf16(_: object) -> Check:
    """Compare the errors of output and gradients in bfloat16 with those of torch's own attention over padded rows."""
    groups = _groups()
    padded = _error(_padded(groups), torch.bfloat16, groups)
    with AttentionKernels() as kernels:
        error = _error(_packed(groups), torch.bfloat16, groups)
    detail = (
        f"output and gradients err by {error:.1e}, padded rows by {padded:.1e} (limit {BFLOAT16_FACTOR} times that)"
    )
    wrong = not error <= BFLOAT16_FACTOR * padded
    is_slow = default_device().type == "cuda" and kernels.names != {FUSED}
    return _answer("attention bf16", detail, kernels, wrong=wrong, is_slow=is_slow)


def _answer(name: str, detail: str, kernels: AttentionKernels, *, wrong: bool, is_slow: bool = False) -> Check:
    detail += f", by {', '.join(sorted(kernels.names)) or 'no attention kernel'}"
    if wrong:
        return Check(name, "off", detail, "do not train here: report this with the versions above")
    if is_slow:
        return Check(name, "off", f"{detail}, not {FUSED}", "use a card from Ampere on, with torch's CUDA build")
    return Check(name, "ok", detail)


def _groups() -> Groups:
    return ON_GPU if default_device().type == "cuda" else ON_CPU


def _error(attend: Callable[..., Tensor], dtype: torch.dtype, groups: Groups) -> float:
    """Return the largest share by which output or a gradient differs from padded rows in float64."""
    got = _run(attend, dtype, groups)
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(got, _expected(groups), strict=True)]
    return float(torch.stack(errors).max())  # NaN where one is


@cache
def _expected(groups: Groups) -> list[Tensor]:
    phase("padded rows in float64")
    return _run(_padded(groups), torch.float64, groups)


def _run(attend: Callable[..., Tensor], dtype: torch.dtype, groups: Groups) -> list[Tensor]:
    """Return the output [1, T, heads, head_dim] of fixed random inputs, and their gradients."""
    tokens = sum(prompt + sum(responses) for prompt, responses in groups)
    generator = torch.Generator().manual_seed(0)
    device = default_device()

    def random(*shape: int) -> Tensor:  # the same bfloat16 numbers in every dtype
        return torch.randn(shape, generator=generator).bfloat16().to(device, dtype)

    inputs = [random(1, heads, tokens, HEAD_DIM).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, random(1, tokens, HEADS, HEAD_DIM))]


def _packed(groups: Groups) -> Callable[..., Tensor]:
    layout = row_layout(_spans(groups)).to(default_device())
    return lambda q, k, v: shared_prefix_attention(torch.nn.Identity(), q, k, v, None, layout=layout)[0]


def _padded(groups: Groups) -> Callable[..., Tensor]:
    """Return the same attention through torch's own, with a row for each response."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pieces = []
        for (start, prompt), responses in _spans(groups):
            for index, (at, size) in enumerate(responses):
                own = torch.cat([torch.arange(start, start + prompt), torch.arange(at, at + size)]).to(query.device)
                q, k, v = (x[:, :, own] for x in (query, key, value))
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
                pieces.append(out[:, 0 if index == 0 else prompt :])  # the prompt's own outputs count once
        return torch.cat(pieces, dim=1)

    return attend


def _spans(groups: Groups) -> list[tuple[TokenSpan, list[TokenSpan]]]:
    spans, at = [], 0
    for prompt, responses in groups:
        start, at = at, at + prompt
        placed = []
        for size in responses:
            placed.append((at, size))
            at += size
        spans.append(((start, prompt), placed))
    return spans


ATTENTION_CHECKS = (attention_fp32, attention_bf16)
