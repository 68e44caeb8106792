"""Attention over a shared-prefix row against padded rows, one for each response, through torch's own attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.flash_reference import flash_attention_on_cpu
from tests.helpers.torch_versions import SCHEMAS, VARLEN, operators
from vlm_rl.learner.attention import shared_prefix as attention
from vlm_rl.learner.attention.shared_prefix import may_attend, shared_prefix_attention
from vlm_rl.learner.packing import RowLayout, row_layout, windowed_runs

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3
Groups = list[tuple[int, list[int]]]  # tokens of each prompt and of its responses

rows = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), min_size=1, max_size=4)), min_size=1, max_size=4
)


def spans_of(groups: Groups) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
    spans, at = [], 0
    for prompt, responses in groups:
        placed = []
        start, at = at, at + prompt
        for length in responses:
            placed.append((at, length))
            at += length
        spans.append(((start, prompt), placed))
    return spans


def size_of(groups: Groups) -> int:
    return sum(prompt + sum(responses) for prompt, responses in groups)


def padded_rows(q: Tensor, k: Tensor, v: Tensor, groups: Groups, window: int = 10**6) -> Tensor:
    """Return [1, T, heads, width] by torch's attention over one row per response, filled up behind it."""
    out = torch.zeros(q.shape[2], HEADS, WIDTH, dtype=q.dtype)
    for (start, prompt), responses in spans_of(groups):
        for index, (at, length) in enumerate(responses):
            own = torch.cat([torch.arange(start, start + prompt), torch.arange(at, at + length)])
            filled = torch.cat([own, torch.zeros(3, dtype=torch.int64)])  # causal: nobody sees what is behind
            sees = torch.ones(len(filled), len(filled), dtype=torch.bool).tril().triu(1 - window)
            row = scaled_dot_product_attention(
                q[:, :, filled], k[:, :, filled], v[:, :, filled], attn_mask=sees, scale=SCALE, enable_gqa=True
            )[0].transpose(0, 1)
            first = prompt if index else 0  # the prompt's own outputs count once
            out = out.index_copy(0, own[first:], row[first : len(own)])
    return out[None]


def run(function: Callable[..., Tensor], num_tokens: int) -> list[Tensor]:
    """Return output [1, T, heads, width] and gradients of a fixed weighting of it, float64."""
    generator = torch.Generator().manual_seed(num_tokens)
    inputs = [
        torch.randn(1, heads, num_tokens, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    output = function(*inputs)
    weights = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


def ours(layout: RowLayout, window: int | None = None) -> Callable[..., Tensor]:
    return lambda q, k, v: shared_prefix_attention(torch.nn.Identity(), q, k, v, None, SCALE, layout, window)[0]


@pytest.fixture(params=["cpu 2.11", "cpu 2.13", "flash 2.11", "flash 2.13", "flash", "dense"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each way in turn, through the operators of this torch or with the arguments that a version's have.

    Flash attention's operators are given a CPU kernel.
    """
    way, _, version = request.param.partition(" ")
    if way == "flash":
        monkeypatch.setattr(attention, "_CPU", attention._FLASH)
    elif way == "dense":
        monkeypatch.setattr(attention, "_CPU", None)
    if version:
        for name, operator in operators(version).items():
            monkeypatch.setattr(torch.ops.aten, name, operator)
        monkeypatch.setattr(attention, "varlen_attn", VARLEN[version])
    with flash_attention_on_cpu():
        yield


def test_what_is_recorded_of_this_torch_is_so() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    assert version in SCHEMAS, "add the arguments of this version of torch to tests/helpers/torch_versions.py"
    for name, schema in SCHEMAS[version].items():
        assert str(getattr(torch.ops.aten, name).default._schema) == f"aten::{name}{schema}"
    recorded, real = (signature(function).parameters.values() for function in (VARLEN[version], varlen_attn))
    assert [(p.name, p.kind, p.default) for p in recorded] == [(p.name, p.kind, p.default) for p in real]


@pytest.mark.usefixtures("kernel")
def test_output_and_gradients_equal_padded_rows() -> None:
    @settings(max_examples=25)
    @given(groups=rows)
    @example(groups=[(3, [2, 4, 1])])  # one prompt: its parts are views of the row
    @example(groups=[(3, [0]), (2, [1, 0, 2]), (1, [0, 0])])  # prompts of no response, responses of no token
    @example(groups=[(1, [1]), (1, [1])])
    def check(groups: Groups) -> None:
        expected = run(lambda q, k, v: padded_rows(q, k, v, groups), size_of(groups))
        got = run(ours(row_layout(spans_of(groups))), size_of(groups))
        for value, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(value, wanted, atol=1e-12, rtol=1e-12)

    check()


@pytest.mark.usefixtures("kernel")
def test_a_window_equals_padded_rows_with_a_band() -> None:
    @settings(max_examples=25)
    @given(groups=rows, window=st.integers(1, 12))
    @example(groups=[(3, [2, 4, 1])], window=3)
    @example(groups=[(3, [0]), (2, [1, 0, 9]), (1, [0, 0])], window=2)
    @example(groups=[(9, [9])], window=1)
    def check(groups: Groups, window: int) -> None:
        spans = spans_of(groups)
        layout = replace(row_layout(spans), windowed=windowed_runs(spans, window))
        longest = max(prompt + max(responses, default=0) for prompt, responses in groups)
        assert (layout.windowed is None) == (longest <= window), "a window that no sequence fills costs nothing"
        expected = run(lambda q, k, v: padded_rows(q, k, v, groups, window), size_of(groups))
        for value, wanted in zip(run(ours(layout, window), size_of(groups)), expected, strict=True):
            torch.testing.assert_close(value, wanted, atol=1e-12, rtol=1e-12)

    check()


def test_the_mask_by_hand() -> None:
    """A prompt of 2 with responses of 1 and 2, then a prompt of 1 with a response of 1."""
    groups = [(2, [1, 2]), (1, [1])]
    wanted = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert may_attend(row_layout(spans_of(groups)), 7).int().tolist() == wanted


class Calls(TorchDispatchMode):
    """Remembers the shapes and dtypes that flash attention's operators got."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[tuple[int, ...], torch.dtype]]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_flash_attention" in func.name():
            tensors = [(tuple(x.shape), x.dtype) for x in args if isinstance(x, Tensor)]
            self.seen.append((func.name(), tensors))
        return func(*args, **(kwargs or {}))


def test_the_gpu_kernels_get_every_token_once_and_shared_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors, through the operators' real schema: two calls each way, of P + G R and of G R queries."""
    monkeypatch.setattr(attention, "_CPU", attention._FLASH)
    layout = row_layout(spans_of([(3, [2, 4]), (5, [1])]))
    with FakeTensorMode(allow_non_fake_inputs=True), Calls() as calls:
        q, k, v = (
            torch.empty(1, heads, 15, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        output = ours(layout)(q, k, v)
        assert output.shape == (1, 15, HEADS, WIDTH) and output.dtype == torch.bfloat16
        grads = torch.autograd.grad(output, (q, k, v), torch.empty_like(output))
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    bf16, cuts = torch.bfloat16, (((6,), torch.int32), ((3,), torch.int32))
    queries, keys = [((n, HEADS, WIDTH), bf16) for n in (15, 7)], [((n, KV_HEADS, WIDTH), bf16) for n in (15, 8)]
    lse = [((HEADS, n), torch.float32) for n in (15, 7)]
    unread = [((2,), torch.uint64), ((0,), torch.float32)]
    assert calls.seen == [
        *(("aten::_flash_attention_forward", [queries[i], keys[i], keys[i], cuts[i], cuts[i]]) for i in (0, 1)),
        *(
            (
                "aten::_flash_attention_backward",
                [queries[i], queries[i], keys[i], keys[i], queries[i], lse[i], cuts[i], cuts[i], *unread],
            )
            for i in (0, 1)
        ),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_merges_as_exactly_as_one_softmax(dtype: torch.dtype) -> None:
    """Against float64, the two parts joined err at most 1.2 times as much as one kernel over each response's row."""
    groups = [(40, [30, 60, 10]), (25, [20])]
    expected = run(lambda q, k, v: padded_rows(q, k, v, groups), size_of(groups))

    def errors(function: Callable[..., Tensor]) -> list[float]:
        got = run(lambda q, k, v: function(q.to(dtype), k.to(dtype), v.to(dtype)).double(), size_of(groups))
        return [float((x - wanted).norm() / wanted.norm()) for x, wanted in zip(got, expected, strict=True)]

    two, one = errors(ours(row_layout(spans_of(groups)))), errors(lambda q, k, v: padded_rows(q, k, v, groups))
    assert all(a < 1.2 * b for a, b in zip(two, one, strict=True)), (two, one)


def test_torch_is_asked_whether_its_flash_attention_takes_the_tensors() -> None:
    """Here it does not; a changed signature would raise."""
    query = torch.zeros(1, HEADS, 3, WIDTH, dtype=torch.bfloat16)
    assert not attention.takes_flash(query, query[:, :KV_HEADS], query[:, :KV_HEADS])


def test_without_a_layout_it_refuses() -> None:
    query = torch.zeros(1, HEADS, 3, WIDTH)
    with pytest.raises(AssertionError, match="layout"):
        shared_prefix_attention(torch.nn.Identity(), query, query, query, None)
