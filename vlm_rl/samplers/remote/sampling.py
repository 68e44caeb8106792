"""Ask servers for groups of responses. What one server does not answer, a different one is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import httpx
import numpy as np

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import alive, rank
from vlm_rl.samplers.base import SampleRequest, SamplingParams, make_rollout
from vlm_rl.samplers.remote.client import ServerError, ServerResponse, ask, ask_group, connected
from vlm_rl.samplers.remote.fleet import Fleet
from vlm_rl.samplers.remote.schedule import Schedule
from vlm_rl.types import Prompt, Rollout


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """A group to be sampled."""

    prompt: Prompt
    params: SamplingParams
    seeds: Sequence[int]  # of each response
    since: int  # the policy version when it was asked for: no token is of an earlier one
    on_done: Callable[[list[Rollout]], None]

    @classmethod
    def of(
        cls, request: SampleRequest, index: int, *, since: int, on_done: Callable[[list[Rollout]], None]
    ) -> GroupRequest:
        """Return the group of one prompt of a request."""
        return cls(request.prompts[index], request.params, request.seeds(index), since, on_done)


class Sampling:
    """Groups that are being sampled. Everything happens in the event loop that `run` is awaited in."""

    def __init__(
        self,
        fleet: Fleet,
        builder: PromptBuilder,
        rooms: Mapping[str, int],
        requests: Iterable[GroupRequest] = (),
        *,
        size: int,
    ) -> None:
        """Begin nothing yet.

        Args:
            fleet: the servers.
            builder: the prompt builder of the model.
            rooms: the servers to ask, and the most responses of this rank that each samples at once.
            requests: the groups, in the order in which they are begun.
            size: responses of a group.
        """
        self.is_stuck = False  # groups are missing, and no server is left
        self._fleet, self._builder = fleet, builder
        self._numbers = count()
        self._requests: dict[int, GroupRequest] = {}
        self._schedule = Schedule((), size=size, rooms=rooms, first=rank())
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._tasks: dict[asyncio.Task[Any], tuple[str, int | None]] = {}  # of a server; None: its watch
        self._changed = asyncio.Event()
        self.add(requests)

    def add(self, requests: Iterable[GroupRequest]) -> None:
        """Sample these groups too, after the others."""
        numbered = dict(zip(self._numbers, requests, strict=False))
        self._requests |= numbered
        self._schedule.waiting.extend(numbered)
        self._note_change()

    def use(self, rooms: Mapping[str, int]) -> None:
        """Ask these servers from now on. What others were sampling is sampled again."""
        for url in self._schedule.at.keys() - rooms.keys():
            self._lose(url)
        for url in rooms.keys() - self._schedule.at.keys():
            self._schedule.join(url, rooms[url])
        self._note_change()

    async def run(self, *, for_ever: bool = False) -> bool:
        """Sample until every group is there or no server is left, and tell whether groups are missing.

        With `for_ever` it waits for more groups and servers, until it is cancelled.
        """
        async with AsyncExitStack() as connections:
            change = asyncio.create_task(self._changed.wait())
            try:
                while for_ever or (self._schedule.left and self._schedule.at):
                    if change.done():
                        self._changed.clear()
                        change = asyncio.create_task(self._changed.wait())
                    await self._hand_out(connections)
                    done, _ = await asyncio.wait([*self._tasks, change], return_when=asyncio.FIRST_COMPLETED)
                    for task in done - {change}:
                        self._settle(task)
                    self.is_stuck = self._schedule.left and not self._schedule.at
            finally:
                tasks = [*self._tasks, change]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return self._schedule.left

    def _note_change(self) -> None:
        self.is_stuck = self._schedule.left and not self._schedule.at
        self._changed.set()

    async def _hand_out(self, connections: AsyncExitStack) -> None:
        """Ask the servers for as many groups as they have room for."""
        watched = {url for url, number in self._tasks.values() if number is None}
        for url in [url for url in self._schedule.at if url not in watched]:
            if url not in self._clients:
                self._clients[url] = await connections.enter_async_context(connected(url, self._fleet.token))
            self._tasks[asyncio.create_task(self._watch(self._clients[url]))] = (url, None)
        while given := self._schedule.next():
            url, number = given
            self._tasks[asyncio.create_task(self._ask(self._clients[url], self._requests[number]))] = given

    def _settle(self, task: asyncio.Task[Any]) -> None:
        """Take a finished task's group, or take its server off."""
        if task not in self._tasks:  # of a server that was lost a moment ago, for the same reason
            return
        url, number = self._tasks.pop(task)
        try:
            group = task.result()
        except ServerError as error:
            self._fleet.say(
                url, f"{error}: its requests go elsewhere, and it gets the weights again at the next sync"
            )
            self._fleet.lose(url)
            self._lose(url)
            return
        assert number is not None, "a watch never ends"
        self._schedule.done(url, number)
        self._requests.pop(number).on_done(group)

    def _lose(self, url: str) -> None:
        """Take a server off; what it was sampling is sampled elsewhere, from its beginning."""
        self._schedule.lose(url)
        for task in [task for task, (place, _) in self._tasks.items() if place == url]:
            del self._tasks[task]
            task.cancel()

    async def _ask(self, client: httpx.AsyncClient, request: GroupRequest) -> list[Rollout]:
        """Return one group.

        Raises ServerError, also where a token was sampled by weights of another run, by earlier ones than those of
        the request, or by earlier ones than the token before it.
        """
        prompt = request.prompt
        responses = await ask_group(client, prompt, request.params, request.seeds, builder=self._builder)
        rollouts: list[Rollout] = []
        for g, response in enumerate(responses):
            *older, (version, _) = self._versions(response, since=request.since)
            rollout = make_rollout(
                prompt,
                g,
                np.array(response.ids),
                np.array(response.logprobs),
                builder=self._builder,
                version=version,
                num_cached=response.num_cached,
            )
            rollouts.append(replace(rollout, older=tuple(older)))
        return rollouts

    def _versions(self, response: ServerResponse, *, since: int) -> list[tuple[int, int]]:
        """Return (policy version, tokens) of the parts of a response, in order. Raises ServerError, see `_ask`."""
        fleet = self._fleet
        parts = [(fleet.version_of(label), end - start) for start, end, label in response.versions]
        versions = [-1 if version is None else version for version, _ in parts]
        if not all(before < after for before, after in pairwise([since - 1, *versions])):
            labels = ", ".join(label for _, _, label in response.versions)
            raise ServerError(f"its tokens are of the weights {labels}, not {fleet.label}")
        return [(version, tokens) for version, (_, tokens) in zip(versions, parts, strict=True)]

    async def _watch(self, client: httpx.AsyncClient) -> None:
        """Look after a server while it samples. Raises ServerError once it is silent, or holds other weights."""
        fleet, silence = self._fleet, self._fleet.settings.silence
        while True:
            before, was_settled = fleet.changes, not fleet.is_pushing
            info = await ask(client, "/weight_info", seconds=silence, post=False)
            alive()
            if was_settled and before == fleet.changes and info != {"weight_version": fleet.label}:
                raise ServerError(f"it holds the weights {str(info)[:100]}, not {fleet.label}")
            await asyncio.sleep(min(5.0, silence / 4))
