"""Ask servers for groups of responses. What one server does not answer, another one is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import rank
from vlm_rl.samplers.base import SamplingParams, make_rollout
from vlm_rl.samplers.schedule import Schedule
from vlm_rl.samplers.server_client import ServerError, ask, ask_group, connected
from vlm_rl.samplers.server_fleet import Fleet
from vlm_rl.types import Prompt, Rollout


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """A group to be drawn."""

    prompt: Prompt
    params: SamplingParams
    seeds: Sequence[int]  # of each response
    on_done: Callable[[list[Rollout]], None]


class Drawing:
    """Groups that are being drawn. Everything happens in the event loop that `run` is awaited in."""

    def __init__(
        self,
        fleet: Fleet,
        builder: PromptBuilder,
        rooms: Mapping[str, int],
        requests: Iterable[GroupRequest],
        *,
        size: int,
    ) -> None:
        """Begin nothing yet.

        Args:
            fleet: the servers.
            builder: the prompt builder of the model.
            rooms: the servers to ask, and the most responses of this rank that each draws at once.
            requests: the groups, in the order in which they are begun.
            size: responses of a group.
        """
        self._fleet, self._builder = fleet, builder
        self._requests = dict(enumerate(requests))
        self._schedule = Schedule(self._requests, size=size, rooms=rooms, first=rank())
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._tasks: dict[asyncio.Task[Any], tuple[str, int | None]] = {}  # of a server; None: its watch

    async def run(self) -> bool:
        """Draw until every group is there or no server is left, and tell whether groups are missing."""
        async with AsyncExitStack() as connections:
            try:
                for url in self._schedule.at:
                    client = await connections.enter_async_context(connected(url, self._fleet.token))
                    self._clients[url] = client
                    self._tasks[asyncio.create_task(self._watch(client))] = (url, None)
                while self._schedule.left and self._schedule.at:
                    self._hand_out()
                    done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        self._settle(task)
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._schedule.left

    def _hand_out(self) -> None:
        """Ask the servers for as many groups as they have room for."""
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
        """Take a server off; what it was drawing is drawn elsewhere, from its beginning."""
        self._schedule.lose(url)
        for task in [task for task, (place, _) in self._tasks.items() if place == url]:
            del self._tasks[task]
            task.cancel()

    async def _ask(self, client: httpx.AsyncClient, request: GroupRequest) -> list[Rollout]:
        """Return one group. Raises ServerError, also where a token was drawn by other weights than the current."""
        fleet, prompt = self._fleet, request.prompt
        responses = await ask_group(client, prompt, request.params, request.seeds, builder=self._builder)
        labels = {label for response in responses for _, _, label in response.versions}
        if labels != {fleet.label}:
            raise ServerError(f"its tokens are of the weights {', '.join(map(str, labels))}, not {fleet.label}")
        return [
            make_rollout(
                prompt,
                g,
                np.array(response.ids),
                np.array(response.logprobs),
                builder=self._builder,
                version=fleet.version,
            )
            for g, response in enumerate(responses)
        ]

    async def _watch(self, client: httpx.AsyncClient) -> None:
        """Look after a server while it draws. Raises ServerError once it is silent, or holds other weights."""
        fleet, silence = self._fleet, self._fleet.settings.silence
        while True:
            info = await ask(client, "/weight_info", seconds=silence, post=False)
            if info != {"weight_version": fleet.label}:
                raise ServerError(f"it holds the weights {str(info)[:100]}, not {fleet.label}")
            await asyncio.sleep(min(5.0, silence / 4))
