"""What runs in the process of a reward function: import it, see how it wants to be called, and answer calls.

The names of its parameters decide how it is called:

    def f(problem, response, grade, num_tokens) -> float               one response, by position, whatever their names
    def f(problem, responses, grades, lengths) -> list[float]          all responses to one prompt, by name
    def f(completions, prompts, answer, ..., **kwargs) -> list[float]  a batch, by name, as TRL calls it
    def f(data_source, solution_str, ground_truth, extra_info)         one response, by name, as verl calls it

Any of them may be `async def`. Calls and replies travel as JSON; the images of a prepared set are read from its file
on use.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import json
import math
import os
import reprlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from vlm_rl.data.stored_images import open_stored
from vlm_rl.errors import UserError
from vlm_rl.types import Call, Grade, Problem

Contract = Literal["positional", "group", "trl", "verl"]
SendReply = Callable[[Mapping[str, Any]], None]

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_COLUMNS = tuple(field.name for field in fields(Problem))
_BATCH_NAMES = ("prompts", "completions", *_COLUMNS, "problems", "grades", "lengths")
_GROUP_NAMES = ("problem", "responses", "grades", "lengths")
_VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


class CoroutineRunner(Protocol):
    """What runs the coroutines of async functions, as asyncio.Runner does."""

    def run(self, coroutine: Coroutine[Any, Any, Any], /) -> Any: ...


def serve(options: Mapping[str, Any]) -> None:
    """Answer the calls that arrive on the pipe, until its other end is closed."""
    connection, own = Connection(options["pipe"]), os.getpid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if sys.stdout is not None:
        cast(Any, sys.stdout).reconfigure(line_buffering=True)  # so that a kill loses nothing that was printed

    def reply(message: Mapping[str, Any]) -> None:
        if os.getpid() != own:
            os._exit(0)  # the function forked, and this is the child: only its parent answers
        connection.send_bytes(json.dumps(message).encode())

    try:
        caller = FunctionCaller(load_reward_function(options["function"]), timeout=options["timeout"])
    except BaseException as error:
        reply({"fault": str(error) if isinstance(error, UserError) else _told(error)})
        return
    reply({"one_at_a_time": caller.one_at_a_time, "takes_groups": caller.takes_groups})
    # One event loop for all calls: a client that the user's module keeps is bound to it.
    with suppress(EOFError), asyncio.Runner() as runner:
        while True:
            message = json.loads(connection.recv_bytes())
            problems = [_unpacked_problem(tree) for tree in message["problems"]]
            calls = [
                (problems[index], text, Grade(**grade), length) for index, text, grade, length in message["calls"]
            ]
            caller.answer(calls, reply, runner, groups=message["groups"])


def load_reward_function(path: str) -> Callable[..., Any]:
    """Import the function `module.name`. Raises UserError if there is none, and whatever its module raises."""
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(str(error)) from None
    if not callable(function):
        raise UserError(f"it is of type {type(function).__name__}")
    return function


class FunctionCaller:
    """Calls a function as its signature asks for, and replies with a value or a fault for each response."""

    def __init__(self, function: Callable[..., Any], *, timeout: float) -> None:
        """Read the signature. Raises UserError if it asks for what no call has.

        Args:
            function: the user's.
            timeout: seconds for each call of an async function that takes one response, or those to one prompt.
        """
        self._function = function
        self._timeout = timeout
        self._contract, self._names = _contract_of(function)
        self._is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self.takes_groups = self._contract == "group"
        self.one_at_a_time = self._contract != "trl" and not self._is_async

    def answer(
        self, calls: Sequence[Call], reply: SendReply, runner: CoroutineRunner, *, groups: Sequence[int] = ()
    ) -> None:
        """Reply once for each call, with its index.

        Args:
            calls: the responses.
            reply: gets the replies; in order where the function is called for one response or one prompt at a time.
            runner: of async functions.
            groups: the number of each call's group. Calls of a group are adjacent. Empty: all form one group.
        """
        if self._contract == "trl":
            columns = _batch_columns(calls)
            given = {name: columns[name] for name in self._names}
            for index, outcome in enumerate(self._several(given, len(calls), runner)):
                reply({"index": index, **outcome})
        elif self.takes_groups:
            numbers = groups or [0] * len(calls)
            of_groups = [[*members] for _, members in groupby(range(len(calls)), key=numbers.__getitem__)]
            if self._is_async:
                runner.run(self._answer_groups(calls, reply, of_groups))
                return
            for members in of_groups:
                outcomes = self._several(self._of_group(calls, members), len(members), runner)
                for index, outcome in zip(members, outcomes, strict=True):
                    reply({"index": index, **outcome})
        elif self._is_async:
            runner.run(self._answer_together(calls, reply))
        else:
            for index, call in enumerate(calls):
                reply({"index": index, **self._one(call)})

    def _one(self, call: Call) -> dict[str, Any]:
        try:
            return _checked(self._call(call))
        except BaseException as error:
            return {"fault": _told(error)}

    def _several(self, given: Mapping[str, Any], count: int, runner: CoroutineRunner) -> list[dict[str, Any]]:
        """Call the function once for `count` responses."""
        what = "completions" if self._contract == "trl" else "responses"
        try:
            raw = self._function(**given)
            return _all_checked(runner.run(_awaited(raw)) if inspect.isawaitable(raw) else raw, count, what)
        except BaseException as error:
            return [{"fault": _told(error)}] * count

    async def _answer_groups(self, calls: Sequence[Call], reply: SendReply, groups: Sequence[Sequence[int]]) -> None:
        """Reply for each group of an async function, which is called for all at once."""

        async def answer(members: Sequence[int]) -> None:
            limit = asyncio.timeout(self._timeout)
            try:
                async with limit:
                    raw = await self._function(**self._of_group(calls, members))
                    outcomes = _all_checked(raw, len(members), "responses")
            except BaseException as error:
                outcomes = [{"fault": late(self._timeout) if limit.expired() else _told(error)}] * len(members)
            for index, outcome in zip(members, outcomes, strict=True):
                reply({"index": index, **outcome})

        await _all_done(map(answer, groups))

    def _of_group(self, calls: Sequence[Call], members: Sequence[int]) -> dict[str, Any]:
        problems, *columns = (list(column) for column in zip(*(calls[index] for index in members), strict=True))
        given: dict[str, Any] = dict(zip(_GROUP_NAMES, (problems[0], *columns), strict=True))
        return {name: given[name] for name in self._names}

    async def _answer_together(self, calls: Sequence[Call], reply: SendReply) -> None:
        async def answer(index: int, call: Call) -> None:
            limit = asyncio.timeout(self._timeout)
            try:
                async with limit:
                    outcome = _checked(await self._call(call))
            except BaseException as error:
                outcome = {"fault": late(self._timeout) if limit.expired() else _told(error)}
            reply({"index": index, **outcome})

        await _all_done(answer(index, call) for index, call in enumerate(calls))

    def _call(self, call: Call) -> Any:
        if self._contract == "positional":
            return self._function(*call)
        problem, text, *_ = call
        values = (problem.source, text, problem.answer, dict(problem.meta))
        given: dict[str, Any] = dict(zip(_VERL_NAMES, values, strict=True))
        return self._function(**{name: given[name] for name in self._names})


def late(timeout: float) -> str:
    """Describe a call that took too long."""
    return f"did not return within reward.function_timeout={timeout:g} seconds"


def _contract_of(function: Callable[..., Any]) -> tuple[Contract, tuple[str, ...]]:
    """Return how to call a function, and the names that it is given. Raises UserError for a name that nothing has."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return "positional", ()
    contract: Contract
    if "completions" in parameters:
        contract, known = "trl", _BATCH_NAMES
    elif "solution_str" in parameters:
        contract, known = "verl", _VERL_NAMES
    elif "responses" in parameters:
        contract, known = "group", _GROUP_NAMES
    else:
        return "positional", ()
    for parameter in parameters.values():
        is_required = parameter.default is parameter.empty and parameter.kind not in _STARRED
        if is_required and (parameter.name not in known or parameter.kind is parameter.POSITIONAL_ONLY):
            raise UserError(f"it asks for {parameter.name!r}, and can be given {', '.join(known)}")
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return contract, tuple(name for name in known if takes_all or name in parameters)


def _batch_columns(calls: Sequence[Call]) -> dict[str, list[Any]]:
    """Return a batch by the names that TRL gives it, and the columns of a prepared set; a value for each response."""
    problems = [problem for problem, *_ in calls]
    columns = {name: [getattr(problem, name) for problem in problems] for name in _COLUMNS}
    return columns | {
        "prompts": columns["question"],
        "completions": [text for _, text, *_ in calls],
        "problems": problems,
        "grades": [grade for _, _, grade, _ in calls],
        "lengths": [length for *_, length in calls],
    }


def _all_checked(raw: Any, count: int, what: str) -> list[dict[str, Any]]:
    """Return the outcomes of `count` responses, by what the function returned for them."""
    values = list(raw)
    if len(values) != count:
        return [{"fault": f"returned {len(values)} values for {count} {what}"}] * count
    return [_checked(value) for value in values]


def _checked(raw: Any) -> dict[str, Any]:
    """Return a number as the value, and anything else as a fault."""
    if isinstance(raw, dict) and "score" in raw:  # verl's functions may return other figures beside it
        raw = raw["score"]
    try:
        value = math.nan if isinstance(raw, str | bytes | bytearray) else float(cast(Any, raw))
    except BaseException:  # a complex number, None, or an object whose own __float__ fails
        value = math.nan
    return {"value": value} if math.isfinite(value) else {"fault": f"returned {reprlib.repr(raw)}, no finite number"}


async def _all_done(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at the same time. Raises what the first of them raises, once the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _awaited(result: Any) -> Any:
    return await result


def _told(error: BaseException) -> str:
    """Return an exception and its place in a few words."""
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return f"raised {text:.300} ({Path(frames[-1].filename).name} line {frames[-1].lineno})"


def _unpacked_problem(tree: Mapping[str, Any]) -> Problem:
    values: dict[str, Any] = {**tree, "choices": tuple(tree["choices"])}
    if values.pop("stored"):
        values["images"] = open_stored(*tree["images"])
    else:
        values["images"] = tuple(map(base64.b64decode, tree["images"]))
    return Problem(**values)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone; the function may never return."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
