"""Episodes on servers: a turn is a group of one response, asked for as soon as its environment has answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.samplers.base import SampleRequest
from vlm_rl.samplers.episodes import EpisodeBatch, TurnToSample
from vlm_rl.samplers.remote.fleet import Fleet
from vlm_rl.samplers.remote.sampling import GroupRequest, Sampling
from vlm_rl.types import Rollout

_LOOK = 0.02  # seconds between two looks for answers of environments


class TurnSampling:
    """The turns of one request that servers sample. What a lost server was sampling is asked for again."""

    def __init__(self, fleet: Fleet, builder: PromptBuilder, request: SampleRequest, batch: EpisodeBatch) -> None:
        self._fleet, self._builder, self._request, self._batch = fleet, builder, request, batch
        self._asked: dict[int, TurnToSample] = {}  # that no server has answered
        self.num_sampled = 0  # turns

    async def run(self, rooms: Mapping[str, int]) -> bool:
        """Sample until every episode has ended or no server is left, and tell whether episodes are missing.

        Args:
            rooms: the servers to ask, and the most responses of this rank that each samples at once.
        """
        begun = [self._group_of(turn) for turn in self._asked.values()]
        sampling = Sampling(self._fleet, self._builder, rooms, begun, size=1)
        work = asyncio.create_task(sampling.run(for_ever=True))
        try:
            while self._asked or not self._batch.is_over:
                if turns := self._batch.ready(wait=False):
                    self._asked |= {id(turn): turn for turn in turns}
                    sampling.add([self._group_of(turn) for turn in turns])
                if sampling.is_stuck:
                    return True
                await asyncio.wait([work], timeout=_LOOK)
                if work.done():
                    work.result()
            return False
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    def _group_of(self, turn: TurnToSample) -> GroupRequest:
        params = replace(self._request.params, responses=1, max_tokens=turn.max_tokens)
        seeds = [self._batch.seed_of(turn)]
        return GroupRequest(turn.prompt, params, seeds, self._fleet.version, partial(self._take, turn))

    def _take(self, turn: TurnToSample, group: list[Rollout]) -> None:
        del self._asked[id(turn)]
        self.num_sampled += 1
        (rollout,) = group
        self._request.watch.add(tokens=len(rollout.ids), longest=len(turn.ids) + len(rollout.ids))
        self._batch.sampled(turn, rollout.ids, rollout.logprobs, num_cached=rollout.num_cached)
