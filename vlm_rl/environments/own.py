"""A user's environment, in separate processes, where it can neither end, fork nor block the trainer."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Mapping
from concurrent.futures import TimeoutError as LateError
from typing import Any

from pebble import ProcessExpired, ProcessPool

from vlm_rl.environments import own_worker
from vlm_rl.environments.environment import Done, Observation
from vlm_rl.errors import UserError, where_to_look
from vlm_rl.types import Problem

_START_SECONDS = 300.0  # to import the class's module


class OwnEnvironments:
    """The processes in which a user's class runs. An episode stays in one of them."""

    def __init__(self, path: str, options: Mapping[str, Any], *, timeout: float, workers: int) -> None:
        """Import the class once. Raises UserError if that fails.

        Args:
            path: of the class, as module.Class.
            options: what it is opened with.
            timeout: seconds of a step.
            workers: processes.
        """
        self.path, self.options, self.timeout = path, dict(options), timeout
        imported: list[str] = []  # what later processes begin with
        self._pools = [_pool(imported) for _ in range(workers)]
        asked = self._pools[0].schedule(own_worker.describe, args=[path, self.options], timeout=_START_SECONDS)
        try:
            self.instructions: str = asked.result()
        except (UserError, LateError, ProcessExpired) as error:
            self.close()
            step = where_to_look(path, str(error))
            raise UserError(f"environment.name is {path!r}, and cannot be used: {error}{step}") from None
        imported.append(path)

    def open(self, number: int, key: str, start: str) -> OwnEnvironment:
        """Return the environment of one episode.

        Args:
            number: of the episode, which chooses its process.
            key: which no other episode has.
            start: the digest of what its reset must show.
        """
        return OwnEnvironment(self, self._pools[number % len(self._pools)], key, start)

    async def start(self, problem: Problem, seed: int) -> Observation | None:
        """Return the observation before the first turn, if any. Raises as `OwnEnvironment.step` does."""
        pool = self._pools[seed % len(self._pools)]
        asked = pool.schedule(own_worker.start, args=[self.path, self.options, problem, seed], timeout=self.timeout)
        return await self.answer(asked)

    async def answer(self, asked: Any) -> Any:
        """Return a process's answer. Raises, with a message of one line, if the process is late or ends."""
        try:
            return await asyncio.wrap_future(asked)
        except LateError:
            raise TimeoutError(f"no answer within {self.timeout:g} s") from None
        except ProcessExpired as error:
            raise RuntimeError(f"its process ended with exit code {error.exitcode}") from None

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools:
            pool.stop()
            pool.join()


class OwnEnvironment:
    """One episode of a user's environment, whose object lives elsewhere."""

    is_quick = False

    def __init__(self, owner: OwnEnvironments, pool: ProcessPool, key: str, start: str) -> None:
        self.instructions = owner.instructions
        self._owner, self._pool, self._key, self._start = owner, pool, key, start
        self._before: list[str] = []

    async def reset(self, problem: Problem, seed: int) -> None:
        self._problem, self._seed = problem, seed

    async def step(self, text: str) -> Observation | Done:
        owner = self._owner
        limit = owner.timeout * (1 + len(self._before))  # a new object is given all earlier turns again
        turn = own_worker.Asked(
            owner.path,
            owner.options,
            self._key,
            self._problem,
            self._seed,
            self._start,
            tuple(self._before),
            text,
            owner.timeout,
        )
        asked = self._pool.schedule(own_worker.step, args=[turn], timeout=limit)
        answer = await owner.answer(asked)
        self._before.append(text)  # a turn that failed is not played again
        return answer


def _pool(imported: list[str]) -> ProcessPool:
    context: Any = multiprocessing.get_context("spawn")
    return ProcessPool(1, initializer=own_worker.begin, initargs=[[*sys.path], imported], context=context)
