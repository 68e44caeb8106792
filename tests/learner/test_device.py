"""Everything an update touches is on one device: tried on torch's fake CUDA tensors, which need no GPU.

A fake tensor has a shape and a device but no numbers, and an operation on two devices raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.groups import WeighedGroup, pack
from tests.helpers.torch_versions import VARLEN
from vlm_rl.doctor.attention import AttentionKernels
from vlm_rl.learner import shared_prefix_attention as attention
from vlm_rl.learner import vision_attention
from vlm_rl.learner.packing import Chunk, PackedRow
from vlm_rl.learner.policy import Head
from vlm_rl.losses import RATIOS, SURROGATES, policy_loss, supervised_loss
from vlm_rl.types import Prompt, Rollout

LENGTHS = (3, 1, 4)
HIDDEN, VOCABULARY, HEADS, KV_HEADS = 8, 32, 4, 2
OPTIONS = {"clip_low": 0.1, "clip_high": 0.1, "cap": 2.0}


def make_group(index: int) -> WeighedGroup:
    ids = np.arange(5 + index, dtype=np.int32)
    prompt = Prompt(str(index), "", "", ids, ids, (), {"pixel_values": torch.zeros(4, 8)})
    rollouts = [
        Rollout(str(index), i, np.arange(n, dtype=np.int32), np.zeros(n, np.float32), "", "stop", 0)
        for i, n in enumerate(LENGTHS)
    ]
    return WeighedGroup(prompt, rollouts, np.ones(3), np.ones(3), [np.zeros(n) for n in LENGTHS])


@pytest.fixture
def row() -> PackedRow:
    """Two groups, with images, old log-probs and the sampler's."""
    chunks = [Chunk(0, (0, 1, 2)), Chunk(1, (0, 1, 2))]
    groups = [make_group(0), make_group(1)]
    return pack(chunks, groups, lambda p: torch.arange(len(p.ids)).expand(3, -1), with_sampler=True)


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}[{key}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{name}[{index}]")


def test_every_tensor_of_a_row_moves(row: PackedRow) -> None:
    moved = dict(tensors_in(row.to("meta"), "row"))
    assert moved.keys() == dict(tensors_in(row, "row")).keys()
    assert {"row.loss.weights_n", "row.loss.old_logp_K", "row.vision[pixel_values]"} < moved.keys()
    assert {"row.layout.own.queries", "row.layout.shared.keys", "row.layout.responses"} < moved.keys()
    assert not [name for name, tensor in moved.items() if tensor.device.type != "meta"]


@pytest.mark.parametrize("ratio", list(RATIOS))
@pytest.mark.parametrize("surrogate", list(SURROGATES))
def test_the_loss_stays_on_its_device(row: PackedRow, ratio: str, surrogate: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = row.to("cuda").loss
        logp_K = torch.empty(len(row.target_K), device="cuda")
        loss, sums = policy_loss(logp_K, logp_K, inputs, ratio=ratio, surrogate=surrogate, **OPTIONS)
        assert {loss.device.type, *(value.device.type for value in sums.values())} == {"cuda"}
        assert supervised_loss(logp_K, logp_K, inputs)[0].device.type == "cuda"


def test_a_row_left_behind_is_refused(row: PackedRow) -> None:
    """Else the tests of this file could not fail."""
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="device"):
        logp_K = torch.empty(len(row.target_K), device="cuda")
        policy_loss(logp_K, logp_K, row.loss, ratio="token", surrogate="clip", **OPTIONS)


@pytest.mark.parametrize(("dtype", "takes_flash"), [(torch.bfloat16, True), (torch.float32, False)])
def test_attention_and_head_stay_on_their_device(
    row: PackedRow, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, takes_flash: bool
) -> None:
    num_tokens = len(row.ids_T)
    monkeypatch.setattr(attention, "takes_flash", lambda *_: takes_flash)  # torch would ask the card
    with FakeTensorMode(allow_non_fake_inputs=True):
        moved = row.to("cuda")
        query = torch.empty(1, HEADS, num_tokens, HIDDEN, dtype=dtype, device="cuda")
        key = value = torch.empty(1, KV_HEADS, num_tokens, HIDDEN, dtype=dtype, device="cuda")
        output, _ = attention.shared_prefix_attention(nn.Module(), query, key, value, None, layout=moved.layout)
        assert output.device.type == "cuda"
        assert output.shape == (1, num_tokens, HEADS, HIDDEN)
        head = Head(nn.Linear(HIDDEN, VOCABULARY, bias=False, device="cuda"), banned_ids=[1], temperature=1.0)
        head.banned = head.banned.to("cuda")
        logp_K, entropy_K = head(torch.empty(len(row.target_K), HIDDEN, device="cuda"), moved.target_K)
        assert logp_K.device.type == entropy_K.device.type == "cuda"
        assert logp_K.shape == entropy_K.shape == (8 * 2,)


@pytest.mark.parametrize("version", [None, *VARLEN])
def test_windows_of_the_vision_tower_stay_on_their_device(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through this torch's function, and with the arguments that a version's has."""

    def varlen_attn(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        signature(VARLEN[version or ""]).bind(query, *args, **kwargs)
        return torch.empty_like(query)

    if version is not None:
        monkeypatch.setattr(vision_attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(vision_attention, "takes_flash", lambda *_: True)
    with FakeTensorMode(allow_non_fake_inputs=True), AttentionKernels() as kernels:
        query = torch.empty(1, HEADS, 12, HIDDEN, dtype=torch.bfloat16, device="cuda")
        output, _ = vision_attention.windowed_attention(
            nn.Module(),
            query,
            query,
            query,
            None,
            scaling=HIDDEN**-0.5,
            cu_seq_lens_q=torch.empty(4, dtype=torch.int32, device="cuda"),
            max_length_q=4,
        )
        assert output.device.type == "cuda" and output.shape == (1, 12, HEADS, HIDDEN)
    if version is None:
        assert kernels.names == {"torch_attn::_varlen_attn"}, "the doctor names this kernel"
