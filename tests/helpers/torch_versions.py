"""What torch 2.11 and 2.13 call the arguments of their attention, so that our calls are tried against both.

The operators are defined once for each version, in namespaces of their own. Their schemas are the versions'. What
they compute is written out in flash_reference, or is the installed torch's on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.helpers import flash_reference

_FLASH = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None{more}) -> "
    "(Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
)
_BOTH = {
    "_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor rng_state, "
        "Tensor unused, *, float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None) -> "
        "(Tensor, Tensor, Tensor)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}
SCHEMAS: dict[str, dict[str, str]] = {
    "2.11": {"_flash_attention_forward": _FLASH.format(more=""), **_BOTH},
    "2.13": {
        "_flash_attention_forward": _FLASH.format(more=", Tensor? block_table=None, int? num_splits=None"),
        **_BOTH,
    },
}


def operators(version: str) -> dict[str, Any]:
    """Return the operators of a version of torch by their names in torch.ops.aten."""
    namespace = getattr(torch.ops, _NAMESPACE.format(version.replace(".", "_")))
    return {name: getattr(namespace, name) for name in SCHEMAS[version]}


_NAMESPACE = "vlm_rl_tests_torch_{}"
_COMPUTED: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_reference.forward,
    "_flash_attention_backward": flash_reference.backward,
    **{name: getattr(torch.ops.aten, name).default for name in _BOTH if name.startswith("_scaled")},
}
_libraries = []  # the operators go with them
for _version, _schemas in SCHEMAS.items():
    _libraries.append(torch.library.Library(_NAMESPACE.format(_version.replace(".", "_")), "DEF"))
    for _name, _schema in _schemas.items():
        _libraries[-1].define(_name + _schema)
        _libraries[-1].impl(_name, _COMPUTED[_name], "CPU")


def varlen_attn_of_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """Stand for torch.nn.attention.varlen.varlen_attn, which takes fewer heads of keys without being told."""
    return _varlen(query, key, value, cu_seq_q, cu_seq_k, scale, window_size)


def varlen_attn_of_2_13(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, return_aux: object = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: object = None, block_table: object = None, num_splits: object = None,
) -> Tensor:  # fmt: skip
    """Stand for the same function of a later torch, which must be told."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return _varlen(query, key, value, cu_seq_q, cu_seq_k, scale, window_size)


VARLEN: dict[str, Callable[..., Tensor]] = {"2.11": varlen_attn_of_2_11, "2.13": varlen_attn_of_2_13}


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cut_q: Tensor,
    cut_k: Tensor,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    outputs: list[Tensor] = []
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for (q, q_end), (k, k_end) in zip(pairwise(cut_q.tolist()), pairwise(cut_k.tolist()), strict=True):
        s = flash_reference.scores(
            query[q:q_end], key[k:k_end], causal=False, scale=factor, left=window[0], right=window[1]
        )
        values = value[k:k_end].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        outputs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), values))
    return torch.cat(outputs)
