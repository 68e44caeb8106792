"""Attention over a shared-prefix row, in two parts.

Each prompt attends to itself causally; each response attends to its prompt and, causally, to
itself. The cost is P^2 + G (P R + R^2) instead of the (P + G R)^2 of a dense mask over the row.

Registered with transformers' AttentionInterface under NAME; the layout reaches it as a keyword
argument of the model's forward. There is no mask to build, so the registered mask function
returns None, and without a layout the function refuses to run instead of attending to everything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from vlm_rl.packing import Layout

NAME = "shared_prefix"


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Output [1, T, heads, head_dim], as transformers expects it."""
    assert layout is not None, f"attention {NAME!r} needs the packed row's layout"
    assert query.shape[0] == 1, query.shape
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs: list[Tensor] = []
    for block in layout.blocks:
        for queries, keys, mask in (
            (block.prompt_index_bp, block.prompt_index_bp, None),
            (block.query_index_nr, block.key_index_nk, block.mask_rk),
        ):
            q, k, v = (_gather(x, index) for x, index in ((query_THD, queries), (key_TKD, keys), (value_TKD, keys)))
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.inverse_T)[None], None


def _gather(x_THD: Tensor, index: Tensor) -> Tensor:
    """[batch, heads, tokens, head_dim] of the tokens that ``index`` [batch, tokens] names."""
    rows = x_THD.index_select(0, index.flatten())
    return rows.view(*index.shape, *x_THD.shape[1:]).transpose(1, 2)


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
