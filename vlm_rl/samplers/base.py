"""What the trainer asks of a rollout engine, and the proof that the engine has the current weights.

A sampler turns prompts into groups of responses with the log-probs of the distribution that it drew
from. It owns a private copy of the policy: after every update the trainer streams the new weights in
with `load_weights` and then calls `check_fresh` with the learner's own fingerprint, because an engine
that silently kept the old weights (or one old tensor) would train on another policy's responses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.types import Prompt, Rollout

NamedTensors = Iterable[tuple[str, torch.Tensor]]
OnGroup = Callable[[int, list[Rollout]], None]

_CHUNK = 1 << 22  # elements hashed at a time: bounds the int64 temporaries to 32 MB each
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit multipliers of MurmurHash3's finaliser, as signed integers.
_MIX_1 = 0xFF51AFD7ED558CCD - (1 << 64)
_MIX_2 = 0xC4CEB9FE1A85EC53 - (1 << 64)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw responses; the same for all prompts of a call."""

    temperature: float  # 0 is greedy
    max_tokens: int  # of a response, the end-of-sequence token included
    responses: int  # G, per prompt
    top_p: float = 1.0  # evaluation only: training differentiates the untruncated distribution
    top_k: int = 0  # 0 is off; evaluation only

    def __post_init__(self) -> None:
        assert self.temperature >= 0 and self.max_tokens > 0 and self.responses > 0, self
        assert 0 < self.top_p <= 1 and self.top_k >= 0, self


class Sampler(Protocol):
    """A rollout engine. `policy_version` is what the last `load_weights` was told."""

    name: str
    policy_version: int
    dtype: torch.dtype  # of the engine's weights: the learner's fingerprint is taken in it

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        step: int,
        on_group: OnGroup | None = None,
    ) -> list[list[Rollout]]:
        """Draw `params.responses` responses per prompt, in the prompts' order.

        `on_group(index, rollouts)` is called as soon as a prompt has all its responses, in any order.

        Response g of a prompt depends on (weights, prompt, params, seed, step, g) alone, apart from
        float noise in the logits; the same call repeated gives the same bits. Log-probs are of the
        distribution that was drawn from: banned ids at minus infinity, then the temperature (1 when
        greedy), then any truncation. Raises UserError for a prompt that does not fit.
        """
        ...

    def stream(self, prompt: Prompt, params: SamplingParams, *, seed: int, step: int) -> Iterator[int]:
        """The ids of the one response that `generate` gives to this prompt alone, each as soon as it is drawn.

        Nothing is computed between two calls of next(): to leave the iterator is to end the generation.
        """
        ...

    def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        """Replace all weights. Names are those of the transformers model's `named_parameters()`."""
        ...

    def fingerprint(self) -> Fingerprint:
        """Computed from the weights that the next `generate` will multiply with."""
        ...

    def sleep(self) -> None:
        """Give the accelerator's memory back until `wake`; nothing on a CPU."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def response_seed(seed: int, step: int, problem_id: str, index: int) -> int:
    """A 63-bit seed for one response: BLAKE2 of its key, so that neighbours share no noise."""
    key = json.dumps([seed, step, problem_id, index]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def check_lengths(prompts: Sequence[Prompt], params: SamplingParams, *, max_model_len: int) -> None:
    """Raise UserError if a prompt and a full response exceed the context: nothing is ever cut."""
    for prompt in prompts:
        total = len(prompt.ids) + params.max_tokens
        if total > max_model_len:
            raise UserError(
                f"problem {prompt.problem_id!r}: {len(prompt.ids)} prompt tokens and up to {params.max_tokens} "
                f"response tokens are {total}, above the sampler's context of {max_model_len}: "
                "raise the context, or lower max_tokens, data.max_pixels or data.max_prompt_tokens"
            )


def make_rollout(
    prompt: Prompt,
    index: int,
    ids: np.ndarray,
    logprobs: np.ndarray,
    *,
    builder: PromptBuilder,
    version: int,
) -> Rollout:
    """One response as every engine returns it: `ids` as sampled, the end-of-sequence token included."""
    assert 0 < len(ids) == len(logprobs), (prompt.problem_id, len(ids), len(logprobs))
    return Rollout(
        problem_id=prompt.problem_id,
        index=index,
        ids=np.array(ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=builder.decode(ids),
        stop_reason="stop" if int(ids[-1]) in builder.eos_ids else "length",
        policy_version=version,
    )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A summary of a model's weights that does not depend on how an engine lays them out.

    Engines fuse q, k, v and gate, up into one tensor and pad the vocabulary with zero rows, so only
    sums over all elements compare. `checksum` adds up a hash of every element's bits modulo 2**64
    (zeros count 0): one changed bit anywhere changes it.
    """

    tensors: int  # as seen; differs between engines that fuse
    checksum: int  # 0 <= checksum < 2**64

    def agrees(self, other: Fingerprint) -> bool:
        return self.checksum == other.checksum


class FingerprintBuilder:
    """Adds tensors up one by one, for weights that are never in memory all at once.

    builder = FingerprintBuilder(dtype=sampler.dtype)
    sampler.load_weights(builder.watch(learner.stream_weights()), version=7)
    check_fresh(sampler, builder.result())
    """

    def __init__(self, *, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype  # elements are rounded to it first; None takes them as they come
        self._names: set[str] = set()
        self._checksum = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Tied weights are to be given once, as `named_parameters()` does."""
        assert name not in self._names, f"tensor {name} was given twice"
        self._names.add(name)
        for chunk in tensor.detach().reshape(-1).split(_CHUNK):
            # Adding 0 turns -0.0 into 0.0: an engine that reads its weights back may lose that sign.
            chunk = (chunk if self.dtype is None else chunk.to(self.dtype)) + 0
            self._checksum += _hash_sum(chunk)

    def watch(self, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors through, adding each one up on its way."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def result(self) -> Fingerprint:
        return Fingerprint(len(self._names), self._checksum % (1 << 64))


def _hash_sum(chunk: torch.Tensor) -> int:
    """Sum of a mixed hash of each element's bits; 0 for zeros. Integer overflow wraps by design."""
    bits = chunk.contiguous().view(_BITS[chunk.element_size()]).long() * _MIX_1
    return int(bits.bitwise_xor_(bits >> 33).mul_(_MIX_2).sum())


def fingerprint(tensors: NamedTensors, *, dtype: torch.dtype | None = None) -> Fingerprint:
    """The fingerprint of named tensors, rounded to `dtype` first where the engine's differs."""
    builder = FingerprintBuilder(dtype=dtype)
    for name, tensor in tensors:
        builder.add(name, tensor)
    return builder.result()


class StaleWeightsError(RuntimeError):
    """The sampler's weights are not the learner's: its responses would come from another policy."""


def check_fresh(sampler: Sampler, expected: Fingerprint) -> None:
    """Raise StaleWeightsError unless the engine holds exactly the weights of `expected`."""
    found = sampler.fingerprint()
    if found.agrees(expected):
        return
    raise StaleWeightsError(
        f"sampler {sampler.name!r} (policy version {sampler.policy_version}) does not hold the learner's weights: "
        f"checksum {found.checksum:016x} against {expected.checksum:016x}. "
        "A weight sync was skipped or incomplete; resume from the last checkpoint, "
        "and use rollout.sampler=transformers if it happens again"
    )
