"""Reward functions of a notebook's cell or of a script, called in this process.

    function = CellFunction(my_reward, "reward.functions.my_reward.path", timeout=60.0)
    outcomes = function.outcomes([(problem, response, grade, num_tokens), ...])

Such a function cannot be imported by another process. So nothing can end it: a call that takes too long is noticed
once it returns, and ends the run. Those that are async have one event loop, which lasts as long as the process: what
a cell keeps, a client or a lock, is bound to it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.rewards.function_worker import FunctionCaller, late
from vlm_rl.types import Call, Outcome

CELL = "cell:"  # how the path of such a function begins in a configuration; its name follows
_REMEDY = "change the function and call vlm_rl.fit again, with resume=True where the run has a checkpoint"


class CellFunction:
    """A function of this process, called as its signature asks for (vlm_rl.rewards.function_worker)."""

    def __init__(self, function: Callable[..., Any], key: str, *, timeout: float, stops_run: bool = True) -> None:
        """Read the signature. Raises UserError, which names the key, where it asks for what no call has.

        Args:
            function: the user's.
            key: the key of the configuration that names it.
            timeout: seconds that one call may take: for a response, a prompt's responses or a batch.
            stops_run: whether a failure of the function raises UserError, instead of being the outcome.
        """
        self._key, self._timeout, self._stops_run = key, timeout, stops_run
        self._is_aborted = False
        try:
            self._caller = FunctionCaller(function, timeout=timeout)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None

    @property
    def takes_groups(self) -> bool:
        """Tell whether the function takes all responses to a prompt at once."""
        return self._caller.takes_groups

    def outcomes(
        self,
        calls: Sequence[Call],
        *,
        groups: Sequence[int] = (),
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        """Return the function's value of each call, in order, or why it has none.

        The arguments are those of UserFunction. Between two calls, `is_stopped` may end the batch; the values that
        are missing are then 0.
        Raises UserError if a call took too long, and if the function fails and `stops_run` is set.
        """
        with ThreadPoolExecutor(1) as pool:  # where no event loop runs: a notebook's runs in the main thread
            return pool.submit(self._answer, calls, groups, is_stopped).result()

    def abort(self) -> None:
        """Let the batch end with the call in progress."""
        self._is_aborted = True

    def close(self) -> None:
        """Nothing is open."""

    def _answer(self, calls: Sequence[Call], groups: Sequence[int], is_stopped: Callable[[], bool]) -> list[Outcome]:
        outcomes: list[Outcome] = [0.0] * len(calls)
        begun = time.monotonic()

        def reply(message: Mapping[str, Any]) -> None:
            nonlocal begun
            index, fault = message["index"], message.get("fault")
            is_late = time.monotonic() - begun > self._timeout
            begun = time.monotonic()
            if self._is_aborted or is_stopped():
                raise _AbandonedError
            if is_late or (fault and self._stops_run):
                said = late(self._timeout) if is_late else fault
                raise UserError(f"{self._key} at problem {calls[index][0].id!r} {said}: {_REMEDY}")
            outcomes[index] = fault or message["value"]

        with suppress(_AbandonedError):
            self._caller.answer(calls, reply, _OWN_LOOP, groups=groups)
        return outcomes


class _AbandonedError(Exception):
    """Raised where the step is going to be abandoned."""


class _OwnLoop:
    """Runs coroutines in an event loop of its own, in a thread that the first one starts."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, Any], /) -> Any:
        """Return what a coroutine returns. Raises what it raises."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="cell functions", daemon=True).start()
        value, error = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop).result()
        if error is not None:
            raise error
        return value


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    try:
        return await coroutine, None
    except BaseException as error:  # SystemExit too, which would end the loop
        return None, error


_OWN_LOOP = _OwnLoop()


def cell_function(functions: Mapping[str, Callable[..., Any]], path: str, key: str) -> Callable[..., Any]:
    """Return the function of a path such as cell:NAME. Raises UserError if this process does not have it."""
    name = path.removeprefix(CELL)
    if name not in functions:
        raise UserError(
            f"{key} is {path!r}: a function of a notebook's cell or of a script, which no other process can find. "
            f"Give it again: vlm_rl.fit(out=..., resume=True, reward=[{name}]); or put it into a module, and name "
            "it in a new run as module.function"
        )
    return functions[name]
