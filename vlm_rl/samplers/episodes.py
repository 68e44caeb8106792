"""Responses of several turns, whichever engine samples them: what is sampled next, and what is waited for.

    batch = EpisodeBatch(request, builder, version=3, on_group=on_group, lag=8)
    while turns := batch.ready(wait=nothing_else_to_do):
        ...sample each turn, whenever...
        batch.sampled(turn, ids, logprobs)

A turn's prompt is all that came before: the very ids that were sampled, and observations as they were encoded once.
Engines get one placeholder for each image, as in every prompt, and expand it themselves. `vision` of what is observed
is left out, since it is large and most engines make their own: `seen` adds it.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.turns import as_prompt
from vlm_rl.data.vision.family import join_vision
from vlm_rl.distributed import alive
from vlm_rl.samplers.base import Episode, OnGroup, SampleRequest, TurnAnswer, make_rollout
from vlm_rl.types import ObservedTokens, Prompt, Rollout, Turn

_WAIT_SECONDS = 1.0  # between two signs of life while every episode waits for its environment


@dataclass(eq=False)
class TurnToSample:
    """An episode that is to continue."""

    index: int  # of its prompt in the request
    g: int
    episode: Episode
    prompt: Prompt  # with all turns and observations so far
    max_tokens: int  # that are left
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # sampled so far
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    turns: tuple[Turn, ...] = ()

    def seen(self, builder: PromptBuilder) -> Prompt:
        """Return the prompt with `vision` of all its images, for an engine that takes that."""
        shown = [turn.observed for turn in self.turns if turn.observed is not None]
        parts = [self.prompt.vision, *(as_prompt(builder, observed).vision for observed in shown)]
        return replace(self.prompt, vision=join_vision(parts))


class EpisodeBatch:
    """The episodes of one request."""

    def __init__(
        self,
        request: SampleRequest,
        builder: PromptBuilder,
        *,
        version: int,
        on_group: OnGroup | None = None,
        lag: int | None = None,
    ) -> None:
        """Begin all episodes.

        Args:
            request: what to sample, with episodes.
            builder: the prompt builder of the model.
            version: of the policy.
            on_group: called with (index, rollouts) once all episodes of a prompt have ended.
            lag: steps of the engine, each with one call of `ready`, after which it takes up a quick answer, and
                waits for it if need be. It works on meanwhile, and what it samples together does not depend on time,
                so that a run repeats itself. None: an answer is taken up when it is there.
        """
        assert request.episodes is not None
        self._request, self._builder, self._version = request, builder, version
        self._on_group, self._episodes = on_group, request.episodes
        self._groups: list[dict[int, Rollout]] = [{} for _ in request.prompts]
        self._answered: queue.SimpleQueue[tuple[TurnToSample, Future[TurnAnswer]]] = queue.SimpleQueue()
        self._num_waiting = 0
        self._lag, self._step = lag, 0
        self._due: deque[tuple[int, TurnToSample, Future[TurnAnswer]]] = deque()  # by the step that takes them up
        self._ready = [
            TurnToSample(index, g, self._episodes.open(index, g, prompt), prompt, request.params.max_tokens)
            for index, prompt in enumerate(request.prompts)
            for g in range(request.params.responses)
        ]

    @property
    def groups(self) -> list[list[Rollout]]:
        """Return the responses to each prompt, all of which have ended."""
        return [[group[g] for g in sorted(group)] for group in self._groups]

    @property
    def is_over(self) -> bool:
        """Tell whether every episode has ended."""
        return all(len(group) == self._request.params.responses for group in self._groups)

    def seed_of(self, turn: TurnToSample) -> int:
        """Return the seed of a turn's tokens."""
        return self._request.seed_of(turn.index, turn.g, sampled=len(turn.ids))

    def ready(self, *, wait: bool) -> list[TurnToSample]:
        """Return the turns that can be sampled now.

        With `wait`, wait until there is one; none then means that every episode has ended.
        """
        self._step += 1
        while True:
            self._take_answers()
            if self._ready or not wait or not self._num_waiting:
                turns, self._ready = self._ready, []
                return turns
            alive()
            if self._due:
                self._step = self._due[0][0]  # nothing else is to be done until then
                continue
            try:
                self._continue(*self._answered.get(timeout=_WAIT_SECONDS))
            except queue.Empty:
                continue

    def settle(self) -> None:
        """Wait for every answer that is asked for, so that the order of turns is the same in each call."""
        while self._num_waiting:
            alive()
            try:
                self._continue(*self._answered.get(timeout=_WAIT_SECONDS))
            except queue.Empty:
                continue
        self._ready.sort(key=lambda turn: (turn.index, turn.g))

    def sampled(self, turn: TurnToSample, ids: np.ndarray, logprobs: np.ndarray, *, num_cached: int = 0) -> None:
        """Take over what was sampled, and ask the environment unless the turn was cut off."""
        ids = np.asarray(ids, dtype=np.int32)
        turn.ids = np.r_[turn.ids, ids].astype(np.int32)
        turn.logprobs = np.r_[turn.logprobs, logprobs].astype(np.float32)
        made = Turn(len(ids), self._builder.decode(ids), num_before=len(turn.prompt.ids), num_cached=num_cached)
        turn.turns = (*turn.turns, made)
        turn.prompt = _extended(turn.prompt, ids)
        if int(ids[-1]) not in self._builder.eos_ids:
            self._end(turn, "length")
            return
        self._num_waiting += 1
        asked = turn.episode.answer(turn.turns[-1].text, ids)
        if turn.episode.is_quick and self._lag is not None:
            self._due.append((self._step + self._lag, turn, asked))
        else:
            asked.add_done_callback(lambda future: self._answered.put((turn, future)))

    def _take_answers(self) -> None:
        while self._due and self._due[0][0] <= self._step:
            _, turn, asked = self._due.popleft()
            while wait_for([asked], timeout=_WAIT_SECONDS).not_done:
                alive()
            self._continue(turn, asked)
        while True:
            try:
                self._continue(*self._answered.get_nowait())
            except queue.Empty:
                return

    def _continue(self, turn: TurnToSample, asked: Future[TurnAnswer]) -> None:
        """Go on with an episode whose answer is there. Raises what the answering raised, which is a fault of ours."""
        self._num_waiting -= 1
        answer = asked.result()
        left = self._request.params.max_tokens - len(turn.ids)
        if isinstance(answer, str):
            self._end(turn, answer)
        elif len(turn.turns) >= self._episodes.max_turns:
            self._end(turn, "turns")
        elif not left:
            self._end(turn, "length")
        else:
            observation, observed, images = answer
            *earlier, last = turn.turns
            turn.turns = (*earlier, replace(last, observation=observation, observed=observed))
            turn.prompt = _joined(turn.prompt, observed, images)
            turn.max_tokens = left
            self._ready.append(turn)

    def _end(self, turn: TurnToSample, ending: str) -> None:
        *earlier, last = turn.turns
        self._request.watch.add(ended=1)
        group = self._groups[turn.index]
        group[turn.g] = make_rollout(
            self._request.prompts[turn.index],
            turn.g,
            turn.ids,
            turn.logprobs,
            builder=self._builder,
            version=self._version,
            turns=(*earlier, replace(last, ending=ending)),
        )
        if self._on_group is not None and len(group) == self._request.params.responses:
            self._on_group(turn.index, [group[g] for g in sorted(group)])


def _extended(prompt: Prompt, ids: np.ndarray) -> Prompt:
    """Return the prompt with sampled tokens added."""
    return replace(prompt, ids=np.r_[prompt.ids, ids], sampler_ids=np.r_[prompt.sampler_ids, ids])


def _joined(prompt: Prompt, observed: ObservedTokens, images: Sequence[Image.Image]) -> Prompt:
    """Return the prompt with observed tokens and their images added, without their `vision`."""
    parts = (prompt, observed)
    return replace(
        prompt,
        ids=np.concatenate([part.ids for part in parts]),
        sampler_ids=np.concatenate([part.sampler_ids for part in parts]),
        images=(*prompt.images, *images),
    )
