"""What the trainer asks of a rollout engine, and what all engines share. Loads no torch.

A sampler turns prompts into groups of responses, with the log-probs of the distribution that they are from. It
owns a private copy of the policy: after every update the trainer streams the new weights in with `load_weights`
and checks with vlm_rl.samplers.fingerprint that they arrived.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from vlm_rl.config import Quantization
from vlm_rl.errors import UserError
from vlm_rl.samplers.watch import SamplingWatch
from vlm_rl.types import KeptIds, NamedTensors, Observation, ObservedTokens, Prompt, Rollout, Turn

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.samplers.fingerprint import Fingerprint, WeightLayout

PROBE_PLACES = 4  # of a server that samples ahead: for the responses of a sync's probe (vlm_rl.learner.sync_probe)

# The answer to a turn, its tokens, and its images as the engine gets them. A text says why the episode ends there.
TurnAnswer: TypeAlias = "tuple[Observation, ObservedTokens, tuple[Image.Image, ...]] | str"

OnGroup = Callable[[int, list[Rollout]], None]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample responses; the same for all prompts of a request."""

    temperature: float  # 0 is greedy
    max_tokens: int  # of a response, the end-of-sequence token included
    responses: int  # G, per prompt
    top_p: float = 1.0  # in training with a top_k, whose kept ids the learner renormalises over
    top_k: int = 0  # 0 is off

    def __post_init__(self) -> None:
        assert self.temperature >= 0 and self.max_tokens > 0 and self.responses > 0, self
        assert 0 < self.top_p <= 1 and self.top_k >= 0, self


class Episode(Protocol):
    """One response of several turns, from the environment's side."""

    @property
    def is_quick(self) -> bool:
        """Tell whether an answer takes well under a second, so that an engine may count its steps until then."""
        ...

    def answer(self, text: str, ids: np.ndarray) -> Future[TurnAnswer]:
        """Answer a turn. What fails is an observation with an error, so the future has a result.

        Args:
            text: of the turn, decoded.
            ids: int32, as it was sampled.
        """
        ...


class Episodes(Protocol):
    """What answers the turns of a request's responses."""

    max_turns: int  # of the policy

    def open(self, index: int, g: int, prompt: Prompt) -> Episode:
        """Begin the episode of response g to the prompt with this index in the request."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """What to sample: a group of responses to each prompt. A response's noise is keyed by seed and step."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    seed: int  # of the run
    step: int  # the rollout step, which gives each step noise of its own
    begun: Sequence[Sequence[Rollout]] = ()  # the responses to each prompt so far; (): none
    episodes: Episodes | None = None  # None: a response is one turn
    together: bool = False  # every rank makes this call now, so that one which lost its servers gets others
    watch: SamplingWatch = field(default_factory=SamplingWatch)

    def seeds(self, index: int) -> list[int]:
        """Return the seed of each response to a prompt, from their first token on."""
        return [self.seed_of(index, g) for g in range(self.params.responses)]

    def seed_of(self, index: int, g: int, *, sampled: int = 0) -> int:
        """Return the seed of response g to a prompt, after the tokens that it already has."""
        return response_seed(self.seed, self.step, self.prompts[index], g, sampled=sampled)

    def check_lengths(self, max_model_len: int) -> None:
        """Raise UserError if a prompt and a full response exceed the context: nothing is ever cut.

        What an environment may add is in the context too, as the configuration has checked.
        """
        for prompt in self.prompts:
            total = len(prompt.ids) + self.params.max_tokens
            if total > max_model_len:
                raise UserError(
                    f"problem {prompt.problem_id!r}: {len(prompt.ids)} prompt tokens and up to "
                    f"{self.params.max_tokens} response tokens are {total}, above the sampler's context of "
                    f"{max_model_len}: allow longer prompts (data.max_prompt_tokens, or --max-prompt-tokens of "
                    "vlm-rl eval), or make the images smaller (vlm-rl prepare --max-pixels)"
                )


class Sampler(Protocol):
    """A rollout engine."""

    name: str
    policy_version: int  # what the last `load_weights` was given
    dtype: torch.dtype  # of the engine's weights: the learner's fingerprint is taken in it
    quantization: Quantization | None  # how some of them are rounded beyond that; in the fingerprint too

    def generate(self, request: SampleRequest, *, on_group: OnGroup | None = None) -> list[list[Rollout]]:
        """Sample `params.responses` whole responses per prompt, and return them in the prompts' order.

        Response g of a prompt depends only on (weights, prompt, params, seed, step, g), apart from float noise
        in the logits; the same call repeated gives the same bits. Log-probs are those of the distribution that
        was sampled: banned ids at minus infinity, then the temperature (1 when greedy), then any truncation.
        Ranks that share an engine call this together, each with its own prompts, or none.

        Args:
            request: what to sample. Responses so far are not read.
            on_group: called with (index, rollouts) as soon as a prompt has all its responses, in any order.

        Raises UserError for a prompt that does not fit.
        """
        ...

    def stream(self, request: SampleRequest) -> Iterator[int]:
        """Yield the ids of the single response that `generate` gives to a single prompt, as they are sampled.

        Nothing is computed between two calls of next(): closing the iterator ends the generation.
        """
        ...

    def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        """Replace every weight, and wake an engine that sleeps.

        Names are those of the transformers model's `named_parameters()`.
        """
        ...

    def fingerprint(self, layout: WeightLayout) -> Fingerprint:
        """Return the fingerprint of the weights that the next `generate` will multiply with.

        `layout` names them and their shapes as the learner does. Other weights are hashed under the engine's
        names, and the two fingerprints then differ.
        """
        ...

    def sleep(self) -> None:
        """Free the accelerator's memory until the next `load_weights`; on a CPU there is none to free."""
        ...

    def close(self) -> None:
        """Shut the engine down; it cannot be used afterwards."""
        ...


@runtime_checkable
class InProcessSampler(Sampler, Protocol):
    """A rollout engine that can stop before all responses are complete, and continue them later."""

    def generate_until(self, request: SampleRequest, *, enough: int, on_group: OnGroup) -> list[list[Rollout]]:
        """Continue the responses so far until `enough` groups are complete, and return all groups as they are then.

        If the engine has room for only some, it continues those of the first prompts. More groups may be complete;
        they are returned complete. Every response stops at `max_tokens`, earlier tokens included. New noise depends
        only on `response_seed`.

        Args:
            request: what to sample.
            enough: groups to wait for.
            on_group: called with (index, rollouts) for exactly `enough` groups, in the order in which they complete.
        """
        ...


@runtime_checkable
class BackgroundSampler(Sampler, Protocol):
    """A rollout engine that samples the batches of later steps during training, across syncs of new weights."""

    def begin(self, request: SampleRequest) -> None:
        """Begin the batch of a later step, after those begun before; `take` waits for it.

        A response may hold tokens of several versions. Complete groups among the responses so far are kept, and
        the others are sampled from the beginning. The params are the same in all calls.
        """
        ...

    def take(self, step: int, on_group: OnGroup) -> list[list[Rollout]]:
        """Wait for a batch that was begun, and return its groups in order; all ranks at once.

        `on_group(index, rollouts)` is called once for each group.
        """
        ...

    def sampled(self, step: int) -> list[list[Rollout] | None]:
        """Return this rank's groups of a batch that was begun; None for one that is not complete."""
        ...

    def forget(self, step: int) -> None:
        """Drop a batch that was taken."""
        ...


def response_seed(seed: int, step: int, prompt: Prompt, index: int, *, sampled: int = 0) -> int:
    """Return a 63-bit seed for one response: BLAKE2 of its key, since neighbours must not share noise.

    Args:
        seed: of the run.
        step: the rollout step.
        prompt: that is answered; its problem and the epoch count.
        index: the response's place in its group.
        sampled: tokens that it already has: what follows gets different noise, within the same step too.
    """
    later = (sampled, prompt.epoch) if prompt.epoch else (sampled,) if sampled else ()
    key = json.dumps([seed, step, prompt.problem_id, index, *later]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def make_rollout(
    prompt: Prompt,
    index: int,
    ids: np.ndarray,
    logprobs: np.ndarray,
    *,
    builder: PromptBuilder,
    version: int,
    experts: np.ndarray | None = None,
    turns: Sequence[Turn] = (),
    num_cached: int = 0,
    kept: KeptIds | None = None,
) -> Rollout:
    """Return one response as every engine gives it.

    Args:
        prompt: what was answered.
        index: the response's place in its group.
        ids: as sampled, the end-of-sequence token included.
        logprobs: of these ids.
        builder: decodes them, and knows the end-of-sequence ids.
        version: the policy version that sampled them.
        experts: of each token that the sampler read, [P + R - 1 or more, layers, K], if routing is recorded.
        turns: of an episode; the text is then the last turn's.
        num_cached: prompt tokens whose keys and values the engine had.
        kept: the ids that truncation left of each token, if they are replayed.
    """
    assert 0 < len(ids) == len(logprobs), (prompt.problem_id, len(ids), len(logprobs))
    return Rollout(
        problem_id=prompt.problem_id,
        index=index,
        ids=np.array(ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=turns[-1].text if turns else builder.decode(ids),
        stop_reason="stop" if int(ids[-1]) in builder.eos_ids else "length",
        policy_version=version,
        experts=None if experts is None else experts[len(prompt.ids) : len(prompt.ids) + len(ids) - 1],
        prompt_experts=experts[: len(prompt.ids)] if experts is not None and index == 0 else None,
        turns=tuple(turns),
        num_cached=num_cached,
        kept=kept,
        start=prompt.start,
    )
