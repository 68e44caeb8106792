"""The proof that a sampler holds the learner's current weights.

An engine that silently kept the old weights, or one old tensor, would train on the responses of a different
policy, and so would one that put a tensor in another's place. So the learner's weights are hashed on their way into
the sampler, the sampler's are read back under the same names, and `check_fresh` compares. No sync changes the
model's buffers: they must stay what they were when the engine had started.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from vlm_rl.config import Quantization
from vlm_rl.model_files.fp8 import as_held
from vlm_rl.types import NamedTensors

WeightLayout = Mapping[str, tuple[int, ...]]  # the learner's name of each tensor -> its shape

_CHUNK = 1 << 22  # elements hashed at a time: bounds the int64 temporaries to 32 MB each
_CPU_CHUNK = 1 << 16  # on a CPU, whose caches hold them
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit multipliers of MurmurHash3's finaliser and, for positions, 2^64 / phi, as signed integers.
_MIX_1 = 0xFF51AFD7ED558CCD - (1 << 64)
_MIX_2 = 0xC4CEB9FE1A85EC53 - (1 << 64)
_MIX_POSITION = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What one rank of an engine holds of a tensor: all of it, or all except for a range along one dimension."""

    name: str  # the learner's
    tensor: torch.Tensor
    whole: tuple[int, ...]  # the shape of the whole tensor
    dim: int = 0
    start: int = 0  # place of the range along `dim`


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A summary of a model's weights, under the learner's names.

    `checksum` adds up, modulo 2**64, a hash of every element's bits, of its position and of its tensor's name. One
    changed bit changes it, and so does a swap of two elements, two rows or two tensors. The order of the tensors
    does not, since an engine keeps its own.
    """

    checksum: int  # 0 <= checksum < 2**64
    layout: WeightLayout = field(compare=False)  # what was hashed: an engine is asked for the same

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of the tensors of both, which have no name in common."""
        assert not self.layout.keys() & other.layout.keys()
        return Fingerprint((self.checksum + other.checksum) % (1 << 64), {**self.layout, **other.layout})


class FingerprintBuilder:
    """Adds tensors up one by one, for weights that are never in memory all at once.

    builder = FingerprintBuilder(dtype=sampler.dtype, quantization=sampler.quantization)
    sampler.load_weights(builder.watch(learner.stream_weights()), version=7)
    check_fresh(sampler, builder.result())
    """

    def __init__(self, *, dtype: torch.dtype | None = None, quantization: Quantization | None = None) -> None:
        self.dtype = dtype  # elements are rounded to it first; None takes them as they are
        self.quantization: Quantization | None = quantization  # how the engine rounds some matrices beyond that
        self._layout: dict[str, tuple[int, ...]] = {}
        self._sums: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor. Tied weights are to be given once, as `named_parameters()` does."""
        assert name not in self._layout, f"tensor {name} was given twice"
        self._layout[name] = tuple(tensor.shape)
        if self.quantization is not None:
            assert self.dtype is not None
            tensor = as_held(name, tensor, dtype=self.dtype)
        self._sums.append(_hash_sum(Shard(name, tensor, tuple(tensor.shape)), dtype=self.dtype))

    def watch(self, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors through, adding each of them."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def result(self) -> Fingerprint:
        """Return the fingerprint of the tensors added so far."""
        return Fingerprint(sum(_read(self._sums)) % (1 << 64), dict(self._layout))


def fingerprint(
    tensors: NamedTensors, *, dtype: torch.dtype | None = None, quantization: Quantization | None = None
) -> Fingerprint:
    """Return the fingerprint of named tensors, each first rounded as FingerprintBuilder is told."""
    builder = FingerprintBuilder(dtype=dtype, quantization=quantization)
    for name, tensor in tensors:
        builder.add(name, tensor)
    return builder.result()


def shard_checksums(shards: Iterable[Shard], *, dtype: torch.dtype) -> dict[str, int]:
    """Return the part of a fingerprint that each shard is, each rounded to `dtype` first, by name and place."""
    sums: dict[str, torch.Tensor] = {}
    for shard in shards:
        place = f"{shard.name} {shard.dim}:{shard.start}"
        assert place not in sums, f"shard {place} was given twice"
        sums[place] = _hash_sum(shard, dtype=dtype)
    return dict(zip(sums, _read(list(sums.values())), strict=True))


def join_shards(ranks: Iterable[Mapping[str, int]], layout: WeightLayout) -> Fingerprint:
    """Return the fingerprint of an engine from the shard_checksums of all its ranks.

    What several ranks hold counts once. Where their copies differ each counts, so that the fingerprint cannot agree.
    """
    distinct = {shard for checksums in ranks for shard in checksums.items()}
    return Fingerprint(sum(checksum for _, checksum in distinct) % (1 << 64), layout)


def _hash_sum(shard: Shard, *, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the sum over a shard's elements of a hash of bits, position in the whole tensor, name and shape.

    It stays on the shard's device, so that nothing waits for it; `_read` completes it. Integers wrap by design.
    """
    # Over the shape too: a matrix and its transpose may hold the same elements in the same order.
    key = hashlib.blake2b(f"{shard.name} {shard.whole}".encode(), digest_size=8)
    seed = int.from_bytes(key.digest(), "big", signed=True)
    # In runs of `run` elements that are neighbours in the whole tensor too; it has `gap` others between two runs.
    stride = math.prod(shard.whole[shard.dim + 1 :])
    run = math.prod(shard.tensor.shape[shard.dim :])
    gap = math.prod(shard.whole[shard.dim :]) - run
    flat = shard.tensor.detach().reshape(-1)
    size = _CPU_CHUNK if flat.device.type == "cpu" else _CHUNK
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(flat.split(size)):
        # Adding 0 turns -0.0 into 0.0: an engine that reads its weights back may lose that sign.
        chunk = (chunk if dtype is None else chunk.to(dtype)) + 0
        first = number * size
        mixed = torch.arange(first, first + len(chunk), device=chunk.device)
        if gap:
            mixed += mixed // run * gap + shard.start * stride
        mixed.mul_(_MIX_POSITION).add_(seed)
        mixed.bitwise_xor_(mixed >> 29).mul_(_MIX_2)
        mixed.bitwise_xor_(chunk.view(_BITS[chunk.element_size()])).mul_(_MIX_1)
        total += mixed.bitwise_xor_(mixed >> 33).sum()
    return total


def _read(sums: Sequence[torch.Tensor]) -> list[int]:
    """Return checksums from the sums of hashes, all of which wait for their last factor. Devices are read once."""
    if not sums:
        return []
    together = torch.stack([total.to(sums[0].device) for total in sums])
    return together.mul_(_MIX_2).tolist()


def buffer_digests(model: nn.Module) -> dict[str, str]:
    """Return a digest of each buffer's bits by name: the rotary caches and whatever else no sync changes."""
    return {
        name: hashlib.blake2b(
            buffer.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, digest_size=8
        ).hexdigest()
        for name, buffer in model.named_buffers()
    }


class StaleWeightsError(RuntimeError):
    """The sampler's weights are not the learner's: its responses would come from a different policy."""


class Provable(Protocol):
    """The part of a sampler that its weights are proved by."""

    @property
    def name(self) -> str:
        """See Sampler.name."""
        ...

    @property
    def policy_version(self) -> int:
        """See Sampler.policy_version."""
        ...

    def fingerprint(self, layout: WeightLayout) -> Fingerprint:
        """See Sampler.fingerprint."""
        ...


def check_fresh(sampler: Provable, expected: Fingerprint) -> None:
    """Raise StaleWeightsError unless the engine holds exactly the weights of `expected`."""
    actual = sampler.fingerprint(expected.layout)
    if actual == expected:
        return
    raise StaleWeightsError(
        f"sampler {sampler.name!r} (policy version {sampler.policy_version}) does not hold the learner's weights: "
        f"checksum {actual.checksum:016x} against {expected.checksum:016x}. "
        "A weight sync was skipped or incomplete, or put a tensor in the wrong place; "
        "resume from the last checkpoint; if it happens again, start a new run with rollout.sampler=transformers"
    )


def check_buffers(sampler_name: str, now: Mapping[str, str], at_start: Mapping[str, str]) -> None:
    """Raise StaleWeightsError, which names it, for a buffer that is not what it was when the engine had started."""
    changed = sorted(name for name in now.keys() | at_start.keys() if now.get(name) != at_start.get(name))
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise StaleWeightsError(
            f"sampler {sampler_name!r}: its buffer {changed[0]}{more} is not what it was at the engine's start, "
            "and no sync changes a buffer: its responses would come from a different policy; resume from the last "
            "checkpoint; if it happens again, start a new run with rollout.sampler=transformers"
        )
