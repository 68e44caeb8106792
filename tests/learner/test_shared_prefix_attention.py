"""Attention over a shared-prefix row against one dense mask over the row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from vlm_rl.learner import shared_prefix_attention as attention
from vlm_rl.learner.packing import Layout, row_layout
from vlm_rl.learner.shared_prefix_attention import flex_mask, may_attend, shared_prefix_attention

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3

rows = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=4)), min_size=1, max_size=4
)


def layout_and_mask(groups: list[tuple[int, list[int]]]) -> tuple[Layout, torch.Tensor]:
    """The row's layout, and who may see whom, token by token: True at [query, key]."""
    spans, owner, piece, at = [], [], [], 0
    for group, (prompt, responses) in enumerate(groups):
        start, at = at, at + prompt
        owner += [group] * prompt
        piece += [-1] * prompt
        placed = []
        for index, length in enumerate(responses):
            placed.append((at, length))
            at += length
            owner += [group] * length
            piece += [index] * length
        spans.append(((start, prompt), placed))
    owner_T, piece_T = torch.tensor(owner), torch.tensor(piece)
    same_group = owner_T[:, None] == owner_T
    visible = (piece_T == -1) | (piece_T[:, None] == piece_T)  # the prompt, or the response's own tokens
    return row_layout(spans), (same_group & visible).tril()


def run(function, num_tokens: int) -> list[torch.Tensor]:
    """Output [1, T, heads, width] and gradients of a fixed weighting of it, float64."""
    generator = torch.Generator().manual_seed(num_tokens)
    inputs = [
        torch.randn(1, heads, num_tokens, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    output = function(*inputs)
    weights = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


@settings(max_examples=40)
@given(groups=rows)
def test_attention_and_the_flex_mask_equal_a_dense_mask(groups: list[tuple[int, list[int]]]) -> None:
    layout, mask = layout_and_mask(groups)
    index = torch.arange(len(mask))
    assert torch.equal(may_attend(layout.pieces_2T, index[:, None], index), mask)
    expected = run(
        lambda q, k, v: scaled_dot_product_attention(
            q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask, scale=SCALE
        ).transpose(1, 2),
        len(mask),
    )
    on_cpu = run(
        lambda q, k, v: shared_prefix_attention(torch.nn.Identity(), q, k, v, None, SCALE, layout)[0], len(mask)
    )
    for ours, wanted in zip(on_cpu, expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-12, rtol=1e-12)


def test_flex_attention_has_the_same_mask_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward alone: FlexAttention has no backward on a CPU. Filled-up tokens see nobody and nobody sees them."""
    monkeypatch.setattr(attention, "BUCKET", 128)
    layout, mask = layout_and_mask([(3, [2, 4, 1]), (5, [3])])
    block_mask = flex_mask(layout)
    assert block_mask.seq_lengths == (128, 128)
    q, k, v = (torch.randn(1, heads, len(mask), WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    expected, _ = shared_prefix_attention(torch.nn.Identity(), q, k, v, None, SCALE, layout)
    got, _ = shared_prefix_attention(torch.nn.Identity(), q, k, v, None, SCALE, layout, block_mask)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_without_a_layout_it_refuses() -> None:
    query = torch.zeros(1, HEADS, 3, WIDTH)
    with pytest.raises(AssertionError, match="layout"):
        shared_prefix_attention(torch.nn.Identity(), query, query, query, None)
