"""Fingerprints of weights: the same for every layout, different after any change."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.pretended_cuda import PretendedCuda
from vlm_rl.samplers import fingerprint as fingerprint_module
from vlm_rl.samplers.fingerprint import Shard, fingerprint, join_shards, shard_checksums


def test_a_fingerprint_does_not_depend_on_the_order_of_the_tensors() -> None:
    tensors = {
        name: torch.randn(n, 6, generator=torch.Generator().manual_seed(n)) for name, n in (("q", 4), ("k", 2))
    }
    assert fingerprint(tensors.items()) == fingerprint(reversed(tensors.items()))
    assert fingerprint([("b", torch.zeros(5))]) == fingerprint([("b", -torch.zeros(5))])


def test_the_same_elements_elsewhere_are_found() -> None:
    """Tensors, rows or elements that changed places, a transpose, and a shard shifted by one row."""
    a, b = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    right = fingerprint([("a", a), ("b", b)])
    moved = {
        "tensors": [("a", b), ("b", a)],
        "rows": [("a", a[[1, 0, 2, 3]]), ("b", b)],
        "elements": [("a", a[:, [1, 0, 2, 3]]), ("b", b)],
        "transpose": [("a", a.T), ("b", b)],
        "shift": [("a", a.roll(1, dims=0)), ("b", b)],
        "halves of two": [("a", torch.cat([a[:2], b[:2]])), ("b", torch.cat([a[2:], b[2:]]))],
        "shape": [("a", a.reshape(2, 8)), ("b", b)],
        "zeros": [("a", torch.cat([a, torch.zeros(1, 4)])), ("b", b)],
    }
    assert {name for name, tensors in moved.items() if fingerprint(tensors) == right} == set()


def test_a_fingerprint_is_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = fingerprint([("w", tensor)])
    monkeypatch.setattr(fingerprint_module, "_CPU_CHUNK", 7)
    assert fingerprint([("w", tensor)]) == whole


@settings(max_examples=200)
@given(index=st.integers(0, 59), bit=st.integers(0, 15), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_flipped_bit_changes_the_fingerprint(index: int, bit: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(60, generator=torch.Generator().manual_seed(0)).to(dtype)
    flipped = tensor.clone()
    bits = flipped.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits[index] ^= torch.tensor(1, dtype=bits.dtype) << bit
    assert fingerprint([("w", tensor)]) != fingerprint([("w", flipped)])


def test_a_checksum_by_hand() -> None:
    """In whole numbers of any size, reduced at the end: a server of another version computes the same."""
    part, whole = torch.tensor([[1.5, -0.0], [-3.25, 7e30]]), (2, 5)  # columns 2 and 3 of five

    def signed(value: int, bits: int = 64) -> int:
        return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)

    key = hashlib.blake2b(f"w {whole}".encode(), digest_size=8).digest()
    total = 0
    for (row, column), value in zip(itertools.product(range(2), (2, 3)), [1.5, 0.0, -3.25, 7e30], strict=True):
        mixed = signed((5 * row + column) * 0x9E3779B97F4A7C15 + int.from_bytes(key, "big"))
        mixed = signed((mixed ^ mixed >> 29) * 0xC4CEB9FE1A85EC53)
        (bits,) = struct.unpack("i", struct.pack("f", value))
        mixed = signed((mixed ^ bits) * 0xFF51AFD7ED558CCD)
        total += (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53
    shard = Shard("w", part, whole, dim=1, start=2)
    assert join_shards([shard_checksums([shard], dtype=torch.float32)], {}).checksum == total % (1 << 64)


def test_changes_that_cancel_in_the_sums_are_found() -> None:
    """Moving the same amount from one element to another keeps every sum of values or of bits."""
    first, second = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.5, 1.5, 4.0])
    assert float(first.sum()) == float(second.sum())
    assert fingerprint([("w", first)]) != fingerprint([("w", second)])


def test_a_fingerprint_in_the_engines_precision() -> None:
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert fingerprint([("w", tensor)], dtype=torch.bfloat16) == fingerprint([("w", tensor.bfloat16())])


def shards_of(tensor: torch.Tensor, dim: int, ranks: int, *, parts: int = 1) -> list[list[Shard]]:
    """Divide each of the `parts` of a tensor among ranks, as vLLM does with what it fuses."""
    whole, size = tuple(tensor.shape), tensor.shape[dim] // parts // ranks
    return [
        [
            Shard("w", tensor.narrow(dim, start, size).clone(), whole, dim, start)
            for start in range(rank * size, tensor.shape[dim], ranks * size)
        ]
        for rank in range(ranks)
    ]


def joined(ranks: list[list[Shard]]) -> int:
    return join_shards([shard_checksums(shards, dtype=torch.float32) for shards in ranks], {}).checksum


@pytest.mark.parametrize("chunk", [7, 1 << 22])
@pytest.mark.parametrize(("dim", "ranks", "parts"), [(0, 2, 1), (1, 3, 1), (2, 2, 1), (0, 2, 2), (1, 2, 3)])
def test_shards_add_up_to_the_whole(
    dim: int, ranks: int, parts: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(4, 12, 6, generator=torch.Generator().manual_seed(0))
    whole = fingerprint([("w", tensor)]).checksum
    monkeypatch.setattr(fingerprint_module, "_CPU_CHUNK", chunk)
    shards = shards_of(tensor, dim, ranks, parts=parts)
    assert joined(shards) == whole
    assert joined([shards[0], *shards]) == whole, "what two ranks hold counts once"


@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_that_is_wrong_on_one_rank_is_found(dim: int) -> None:
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    whole = fingerprint([("w", tensor)]).checksum

    def held(last: Callable[[Shard], Shard]) -> int:
        first, (shard,) = shards_of(tensor, dim, 2)
        return joined([first, [last(shard)]])

    assert held(lambda shard: shard) == whole
    wrong = {
        "stale": lambda shard: replace(shard, tensor=shard.tensor + 1),
        "shifted": lambda shard: replace(shard, tensor=shard.tensor.roll(1, dim)),
        "the other rank's": lambda shard: replace(shard, tensor=shards_of(tensor, dim, 2)[0][0].tensor),
        "counted twice": lambda shard: replace(shard, start=0),
    }
    assert {name for name, change in wrong.items() if held(change) == whole} == set()
    copies = [[Shard("w", tensor, (4, 6))], [Shard("w", tensor + 1, (4, 6))]]
    assert whole not in (joined(copies), joined(copies[::-1])), "copies that differ"


def test_a_gpu_is_read_once() -> None:
    """However many tensors are hashed there; some may be elsewhere."""
    tensors = [(f"t{n}", torch.randn(5, generator=torch.Generator().manual_seed(n))) for n in range(3)]
    with PretendedCuda() as gpu:
        there = [(name, tensor.to("cuda")) for name, tensor in tensors]
        gpu.host_reads.clear()
        found = fingerprint(there)
        assert sum(gpu.host_reads.values()) == 1, gpu.host_reads
        assert fingerprint([*there[:2], tensors[2]]) == found
    assert found == fingerprint(tensors)
