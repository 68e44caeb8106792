"""The proof that a sampler holds the learner's current weights.

An engine that silently kept the old weights, or one old tensor, would train on the responses of a different
policy. So the learner's weights are summed up on their way into the sampler, the sampler's are read back, and
`check_fresh` compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from vlm_rl.samplers.base import Sampler

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_CHUNK = 1 << 22  # elements hashed at a time: bounds the int64 temporaries to 32 MB each
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit multipliers of MurmurHash3's finaliser, as signed integers.
_MIX_1 = 0xFF51AFD7ED558CCD - (1 << 64)
_MIX_2 = 0xC4CEB9FE1A85EC53 - (1 << 64)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A summary of a model's weights that does not depend on how an engine lays them out.

    Engines fuse q, k, v and gate, up into one tensor and pad the vocabulary with rows of zeros, so only sums
    over all elements can be compared. `checksum` adds up a hash of every element's bits modulo 2**64 (a zero
    counts 0): one changed bit anywhere changes it.
    """

    checksum: int  # 0 <= checksum < 2**64


class FingerprintBuilder:
    """Adds tensors up one by one, for weights that are never in memory all at once.

    builder = FingerprintBuilder(dtype=sampler.dtype)
    sampler.load_weights(builder.watch(learner.stream_weights()), version=7)
    check_fresh(sampler, builder.result())
    """

    def __init__(self, *, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype  # elements are rounded to it first; None takes them as they are
        self._names: set[str] = set()
        self._checksum = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor. Tied weights are to be given once, as `named_parameters()` does."""
        assert name not in self._names, f"tensor {name} was given twice"
        self._names.add(name)
        for chunk in tensor.detach().reshape(-1).split(_CHUNK):
            # Adding 0 turns -0.0 into 0.0: an engine that reads its weights back may lose that sign.
            chunk = (chunk if self.dtype is None else chunk.to(self.dtype)) + 0
            self._checksum += _hash_sum(chunk)

    def watch(self, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors through, adding each of them."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def result(self) -> Fingerprint:
        """Return the fingerprint of the tensors added so far."""
        return Fingerprint(self._checksum % (1 << 64))


def fingerprint(tensors: NamedTensors, *, dtype: torch.dtype | None = None) -> Fingerprint:
    """Return the fingerprint of named tensors, each rounded to `dtype` first unless that is None."""
    builder = FingerprintBuilder(dtype=dtype)
    for name, tensor in tensors:
        builder.add(name, tensor)
    return builder.result()


def _hash_sum(chunk: torch.Tensor) -> int:
    """Return the sum of a mixed hash of each element's bits; 0 for zeros. Integer overflow wraps by design."""
    bits = chunk.contiguous().view(_BITS[chunk.element_size()]).long() * _MIX_1
    return int(bits.bitwise_xor_(bits >> 33).mul_(_MIX_2).sum())


class StaleWeightsError(RuntimeError):
    """The sampler's weights are not the learner's: its responses would come from a different policy."""


def check_fresh(sampler: Sampler, expected: Fingerprint) -> None:
    """Raise StaleWeightsError unless the engine holds exactly the weights of `expected`."""
    actual = sampler.fingerprint()
    if actual == expected:
        return
    raise StaleWeightsError(
        f"sampler {sampler.name!r} (policy version {sampler.policy_version}) does not hold the learner's weights: "
        f"checksum {actual.checksum:016x} against {expected.checksum:016x}. "
        "A weight sync was skipped or incomplete; resume from the last checkpoint, "
        "and use rollout.sampler=transformers if it happens again"
    )
