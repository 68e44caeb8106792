"""Episodes whose environment answers at random, and the reference that they are compared with.

The reference is the unmodified transformers model on one episode alone: its prompt, turns and observations in a row.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.turns import TurnWriter, as_prompt, open_images
from vlm_rl.data.vision.family import join_vision
from vlm_rl.samplers.base import TurnAnswer
from vlm_rl.types import EpisodeStart, Observation, Prompt, Rollout, Turn

ENDS = 60  # ordinary tokens that end a turn of a random model, beside its own


def png(rng: np.random.Generator, width: int, height: int) -> bytes:
    """Return a picture of noise."""
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def let_turns_end(builder: PromptBuilder) -> None:
    """Let some ordinary tokens end a turn, as a random model hardly ever draws the one that does."""
    allowed = np.setdiff1d(np.arange(300), np.array(builder.banned_ids, dtype=int))
    more = np.random.default_rng(0).choice(allowed, ENDS, replace=False)
    builder.eos_ids = (builder.eos_ids[0], *(int(i) for i in more if i != builder.eos_ids[0]))


class RandomEpisodes:
    """A vlm_rl.samplers.base.Episodes that shows texts and pictures, always the same in an episode's n-th turn."""

    def __init__(self, writer: TurnWriter, *, max_turns: int = 4, is_quick: bool = True) -> None:
        self.writer, self.max_turns, self.is_quick = writer, max_turns, is_quick

    def open(self, index: int, g: int, prompt: Prompt) -> RandomEpisode:
        return RandomEpisode(self, 10 * index + g)


class RandomEpisode:
    def __init__(self, owner: RandomEpisodes, seed: int) -> None:
        self.is_quick, self._owner, self._rng = owner.is_quick, owner, np.random.default_rng(seed)

    def answer(self, text: str, ids: np.ndarray) -> Future[TurnAnswer]:
        future: Future[TurnAnswer] = Future()
        observation = random_observation(self._rng)
        observed = self._owner.writer.write(observation, after=ids)
        future.set_result((observation, observed, open_images(observed)))
        return future


def random_observation(rng: np.random.Generator) -> Observation:
    images = tuple(png(rng, *(int(side) for side in rng.integers(30, 90, 2))) for _ in range(rng.integers(3)))
    return Observation("seen: 7 <|im_end|>" * int(rng.integers(2)) or " ", images)


def random_start(writer: TurnWriter, rng: np.random.Generator, num_images: int) -> EpisodeStart:
    """Return what an environment shows before the first turn, with so many pictures."""
    pictures = [png(rng, *(int(side) for side in rng.integers(30, 90, 2))) for _ in range(num_images)]
    return EpisodeStart("a board <image> <|im_end|>" * int(rng.integers(2)), writer.fit(pictures).packed, "")


def random_episode(
    writer: TurnWriter, builder: PromptBuilder, rng: np.random.Generator, *, turns: int, longest: int
) -> Rollout:
    """Return an episode of random sampled tokens."""
    allowed = np.setdiff1d(np.arange(len(builder.tokenizer)), np.array(builder.banned_ids, dtype=int))
    made: list[Turn] = []
    parts: list[np.ndarray] = []
    for number in range(turns):
        ids = rng.choice(allowed, int(rng.integers(1, longest + 1))).astype(np.int32)
        parts.append(ids)
        observation = random_observation(rng) if number + 1 < turns else None
        observed = observation and writer.write(observation, after=ids)
        made.append(Turn(len(ids), "", observation, observed, "" if observation else "done"))
    ids = np.concatenate(parts)
    return Rollout("p", 0, ids, np.zeros(len(ids), np.float32), "", "stop", 0, turns=tuple(made))


def sequence(builder: PromptBuilder, prompt: Prompt, rollout: Rollout) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the ids of a whole episode [T], which of them were sampled [T], and the images."""
    parts = [(prompt.ids, False, prompt.vision)]
    begun = 0
    for end, observed in [*rollout.observed, (len(rollout.ids), None)]:
        parts.append((rollout.ids[begun:end], True, {}))
        begun = end
        if observed is not None:
            seen = as_prompt(builder, observed)
            parts.append((seen.ids, False, seen.vision))
    ids = torch.from_numpy(np.concatenate([ids for ids, *_ in parts]).astype(np.int64))
    sampled = torch.cat([torch.full((len(ids),), is_sampled) for ids, is_sampled, _ in parts])
    return ids, sampled, join_vision([vision for *_, vision in parts])


def reference_logps(model: Any, builder: PromptBuilder, prompt: Prompt, rollout: Rollout) -> Tensor:
    """Return the log-probs [R] of an episode's sampled tokens by the unmodified model."""
    ids, sampled, vision = sequence(builder, prompt, rollout)
    extra: dict[str, Any] = {}
    if builder.family is not None and vision:
        extra = {**builder.family.vision_inputs(vision), **builder.family.token_types(model.config, ids)}
        model.model.rope_deltas = None
    logits = model(input_ids=ids[None], **extra).logits[0, :-1]
    banned = torch.tensor(builder.banned_ids)
    logps = logits.index_fill(1, banned, -torch.inf).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logps[sampled[1:]]


def largest_gap(model: Any, builder: PromptBuilder, prompts: Sequence[Prompt], groups: Any) -> float:
    """Return the largest difference between the samplers' log-probs and the reference's."""
    with torch.no_grad():
        return max(
            float((reference_logps(model, builder, prompt, rollout) - torch.from_numpy(rollout.logprobs)).abs().max())
            for prompt, group in zip(prompts, groups, strict=True)
            for rollout in group
        )


def open_reference(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
