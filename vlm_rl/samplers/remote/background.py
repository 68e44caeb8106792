"""Batches that servers sample while the learner trains: one thread of each rank, with an event loop of its own.

The thread calls no collective. What it has sampled stays until `forget`, so that a checkpoint can store it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.samplers.base import OnGroup, SampleRequest
from vlm_rl.samplers.remote.fleet import Fleet
from vlm_rl.samplers.remote.sampling import GroupRequest, Sampling
from vlm_rl.types import Rollout

_LOOK = 0.2  # seconds after which a waiting thread looks whether a server is left


class Background:
    """Batches by the number of their step, each sampled group by group. The oldest batch is begun first."""

    def __init__(self, fleet: Fleet, builder: PromptBuilder, rooms: Mapping[str, int], *, size: int) -> None:
        """Start the thread; nothing is asked for. The arguments are those of Sampling."""
        self._batches: dict[int, dict[int, list[Rollout]]] = {}
        self._sizes: dict[int, int] = {}
        self._given: dict[int, set[int]] = {}  # the groups that `wait` has passed on
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._sampling = Sampling(fleet, builder, rooms, size=size)
        self._loop = asyncio.new_event_loop()
        self._work = self._loop.create_task(self._sampling.run(for_ever=True))
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._work)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # raised again where somebody waits for a group
            self._error = error
        finally:
            self._loop.close()
            with self._changed:
                self._changed.notify_all()

    def begin(self, request: SampleRequest, *, version: int) -> None:
        """Sample the groups of a request that are not complete, after those of earlier calls.

        Args:
            request: of the step that is to train on them.
            version: of the current weights.
        """
        step = request.step
        complete = {
            index: list(group)
            for index, group in enumerate(request.begun)
            if all(rollout.stop_reason != "unfinished" for rollout in group)
        }
        self._batches[step], self._sizes[step], self._given[step] = complete, len(request.prompts), set()
        requests = [
            GroupRequest.of(request, index, since=version, on_done=partial(self._take, step, index))
            for index in range(len(request.prompts))
            if index not in complete
        ]
        self._call(partial(self._sampling.add, requests))

    def use(self, rooms: Mapping[str, int]) -> None:
        """Ask these servers from now on."""
        self._call(partial(self._sampling.use, rooms))

    def wait(self, step: int, on_group: OnGroup) -> bool:
        """Wait until a batch is there or no server is left, and tell whether groups are missing.

        `on_group` is called once for each group, in this thread. Raises what a fault of the thread raised.
        """
        given, groups = self._given[step], self._batches[step]
        while len(given) < self._sizes[step]:
            with self._changed:
                new = {index: group for index, group in groups.items() if index not in given}
                if not new:
                    if self._error is not None:
                        raise self._error
                    if self._sampling.is_stuck:
                        return True
                    self._changed.wait(_LOOK)
            for index, group in new.items():
                given.add(index)
                on_group(index, group)
        return False

    def sampled(self, step: int) -> list[list[Rollout] | None]:
        """Return the groups of a batch as they now are; None for one that is not complete."""
        with self._changed:
            groups = dict(self._batches[step])
        return [groups.get(index) for index in range(self._sizes[step])]

    def forget(self, step: int) -> None:
        """Drop a batch that is done."""
        for kept in (self._batches, self._sizes, self._given):
            kept.pop(step, None)

    def close(self) -> None:
        """Stop sampling; servers drop what was asked of them."""
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._work.cancel)
        self._thread.join()

    def _take(self, step: int, index: int, group: list[Rollout]) -> None:
        with self._changed:
            self._batches[step][index] = group
            self._changed.notify_all()

    def _call(self, work: Callable[[], None]) -> None:
        """Do this in the thread, and wait until it is done."""
        if self._error is not None:
            raise self._error

        async def act() -> None:
            work()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result()
