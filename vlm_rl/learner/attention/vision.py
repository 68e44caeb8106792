"""The vision tower of Qwen's models with fewer calls than in transformers, and the same numbers.

Image patches do not overlap, so their embedding is one matrix product, not a convolution. Windows of the same
length are attended to in one call, and on a GPU all windows in one call of flash attention. transformers hands the
windows to an attention function one by one, unless its name contains "flash"; then it hands them over all together,
so ours has that word in its name.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface

from vlm_rl.learner.attention.shared_prefix import takes_flash

NAME = "flash_windows"


def install_embedding(visual: Any) -> list[str]:
    """Replace the patch embedding of a transformers vision tower, in place. Returns the names."""
    projection = visual.patch_embed.proj
    if projection.kernel_size != projection.stride:
        return []
    projection.forward = partial(embed_patches, projection)
    return ["vision patch embedding"]


def install_attention(visual: Any) -> list[str]:
    """Replace the tower's attention, unless it is that of the flash_attn library. Returns the names."""
    if visual.config._attn_implementation != "sdpa":
        return []
    visual.config._attn_implementation = NAME
    return ["vision attention"]


def embed_patches(projection: nn.Conv3d, patches: Tensor) -> Tensor:
    """Return [patches, width] for [patches, channels, time, height, width]: a patch is as large as the kernel."""
    return linear(patches.flatten(1), projection.weight.flatten(1), projection.bias)


def windowed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from every patch to those of its window. Returns [1, patches, heads, head_dim], as transformers does.

    Args:
        module: the layer that attends; not used.
        query: [1, heads, patches, head_dim].
        key: like query.
        value: like query.
        attention_mask: None, since windows have no mask.
        scaling: factor of the scores; on a GPU 1 / sqrt(head_dim).
        cu_seq_lens_q: int32 [windows + 1]: where each window starts, then the end.
        max_length_q: patches of the longest window.
    """
    assert attention_mask is None
    if query.is_cuda and takes_flash(query, key, value):
        assert scaling == query.shape[-1] ** -0.5  # what the kernel takes by itself
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        longest = int(max_length_q)  # some versions of transformers give a tensor
        out: Any = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest)
        return out[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    runs = [(length, sum(1 for _ in same)) for length, same in groupby(lengths)]
    parts = zip(
        *(x[0].split([length * count for length, count in runs], dim=1) for x in (query, key, value)), strict=True
    )
    outputs = []
    for (_length, count), part in zip(runs, parts, strict=True):
        q, k, v = (x.unflatten(1, (count, -1)).transpose(0, 1) for x in part)  # [windows, heads, length, head_dim]
        out = scaled_dot_product_attention(q, k, v, scale=scaling)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


AttentionInterface.register(NAME, windowed_attention)
