"""FlexAttention over a packed row: what perf/gpu_learner.py measures our attention against.

The block mask is made from the cuts between prompts and responses, without a dense mask of the row. On a GPU the
kernel is compiled once for rows of all sizes. On a CPU torch computes it uncompiled, and has no backward pass.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

from vlm_rl.learner.packing import RowLayout

NAME = "flex_rows"
BLOCK = 128  # tokens of a block's side
_compiled = torch.compile(flex_attention, dynamic=True)


def flex_rows(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: RowLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, heads, head_dim], as transformers expects it."""
    assert layout is not None
    mask = block_mask(layout, query.shape[2])
    attend: Any = _compiled if query.is_cuda else _uncompiled
    return attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2), None


def _uncompiled(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Call FlexAttention without torch's tracing, which may be turned off and takes seconds."""
    with patch.object(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        return flex_attention(query, key, value, **options)


@lru_cache(maxsize=1)  # all layers of a row ask for the same
def block_mask(layout: RowLayout, num_tokens: int, block: int = BLOCK) -> BlockMask:
    """Return which blocks of keys each block of queries attends to, whole or in part.

    A token sees its own run up to itself, and a response's token the whole of its prompt too: two intervals of keys.
    Their overlaps with each block of keys count the pairs of a block.
    """
    first_T, end_T = own = _own_keys(layout, num_tokens)
    prompt_T, prompt_end_T = of_prompt = _prompts(layout, num_tokens)

    def may_attend(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_own = (kv >= first_T[q]) & (kv < end_T[q])
        return in_own | ((kv >= prompt_T[q]) & (kv < prompt_end_T[q]))

    num_blocks = -(-num_tokens // block)
    starts_B = block * torch.arange(num_blocks, device=first_T.device)
    own_TB, prompt_TB = (
        (torch.minimum(end[:, None], starts_B + block) - torch.maximum(start[:, None], starts_B)).clamp(min=0)
        for start, end in (own, of_prompt)
    )
    pairs_TB = own_TB + prompt_TB
    filled = nn.functional.pad(pairs_TB, (0, 0, 0, num_blocks * block - num_tokens))
    pairs_BB = filled.unflatten(0, (num_blocks, block)).sum(1)
    whole_BB = pairs_BB == block**2
    return BlockMask.from_kv_blocks(
        *_ordered((pairs_BB > 0) & ~whole_BB),
        *_ordered(whole_BB),
        BLOCK_SIZE=block,
        mask_mod=may_attend,
        seq_lengths=(num_tokens, num_tokens),
    )


def _own_keys(layout: RowLayout, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return, for each token, the first key of its own run, and the key behind its last one: itself."""
    index_T = torch.arange(num_tokens, device=layout.own.queries.device)
    cuts = layout.own.queries.long()
    return cuts[torch.bucketize(index_T, cuts[1:], right=True)], index_T + 1


def _prompts(layout: RowLayout, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return, for each token, the first key of its prompt and the one behind its last; 0 and 0 for a prompt's own."""
    index_T = torch.arange(num_tokens, device=layout.own.queries.device)
    first_T, end_T = torch.zeros_like(index_T), torch.zeros_like(index_T)
    queries, keys = layout.shared.queries.long(), layout.shared.keys.long()
    of_response = index_T[layout.responses]
    run = torch.bucketize(torch.arange(len(of_response), device=index_T.device), queries[1:], right=True)
    in_prompts = index_T[layout.prompts]  # where in the row each key is
    first_T[of_response] = in_prompts[keys[:-1]][run]
    end_T[of_response] = in_prompts[keys[1:] - 1][run] + 1
    return first_T, end_T


def _ordered(is_there_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and their numbers, those first."""
    order_BB = is_there_BB.int().argsort(dim=-1, descending=True, stable=True).int()
    return is_there_BB.sum(-1).int()[None, None], order_BB[None, None]


AttentionInterface.register(NAME, flex_rows)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
