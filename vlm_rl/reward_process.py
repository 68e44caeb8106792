"""Run the user's part of the reward in a process of its own, where it cannot end, fork or block the trainer.

    process = RewardProcess("my_rewards.politeness", timeout=60.0)
    values = process.values([(problem, response, grade, num_tokens), ...])
    process.close()

The process imports the function once and answers one call after another. It gets the trainer's environment, working
directory and `sys.path`, but shares no memory, and Ctrl-C does not reach it. It ends with the trainer. Calls and
values travel as JSON; the images of a prepared set are read from its file on use.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
import os
import reprlib
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, cast

from vlm_rl.data.stored_images import ImageColumn, StoredImages
from vlm_rl.errors import UserError
from vlm_rl.types import Grade, Problem

Call = tuple[Problem, str, Grade, int]  # problem, response, grade, tokens
UserFunction = Callable[[Problem, str, Grade, int], float]  # a call -> part of the reward

_START_SECONDS = 300.0  # to import the function's module
_END_SECONDS = 5.0  # to end by itself
_WAIT_SECONDS = 0.1  # between two looks at whether the run is stopped
_PROGRAM = """
import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options["path"]
from vlm_rl.reward_process import serve
serve(options)
"""


class RewardProcess:
    """The process that calls `module.name`. A failure of the function raises UserError and ends the process."""

    def __init__(self, function: str, *, timeout: float) -> None:
        """Start the process and import the function. Raises UserError, which names the key, if that fails.

        Args:
            function: the function, as module.name.
            timeout: seconds that one call may take.
        """
        self.function = function
        self.timeout = timeout
        self._connection, theirs = Pipe()
        path = [str(Path(folder).absolute()) for folder in sys.path]
        options = {"path": path, "function": function, "pipe": theirs.fileno()}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        place = f"reward.function is {function!r}"
        try:
            reply = self._receive(_START_SECONDS, place, "was not imported", is_stopped=lambda: False)
            if reply is None or "fault" in reply:
                raise UserError(f"{place}: {reply and reply['fault']}; give an importable module.function")
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def values(self, calls: Sequence[Call], *, is_stopped: Callable[[], bool] = lambda: False) -> list[float]:
        """Return the function's value of each call, in order.

        Once `is_stopped` says so the process is killed, and the values that are missing are 0.
        Raises UserError where the function fails, gives no finite number or does not return in time.
        """
        values: list[float] = []
        with suppress(OSError):  # a process that has ended is noticed below
            self._connection.send_bytes(json.dumps(_packed(calls)).encode())
        for problem, *_ in calls:
            place = f"reward.function {self.function} at problem {problem.id!r}"
            late = f"did not return within reward.function_timeout={self.timeout:g} seconds"
            reply = None if is_stopped() else self._receive(self.timeout, place, late, is_stopped=is_stopped)
            if reply is None:
                self.kill()
                return values + [0.0] * (len(calls) - len(values))
            if "fault" in reply:
                raise UserError(f"{place} {reply['fault']}: fix the function, then resume")
            values.append(reply["value"])
        return values

    def kill(self) -> None:
        """End the process at once, with all that it started; a thread that waits for it is woken."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Let the process end by itself, for a few seconds."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.kill()

    def _receive(
        self, seconds: float, place: str, late: str, *, is_stopped: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """Return the next message, or None when the run is stopped. Raises UserError if it does not come."""
        # Waits are counted, not clocked: a trainer that was suspended meanwhile does not blame the function.
        for _ in range(math.ceil(seconds / _WAIT_SECONDS)):
            has_ended = self._process.poll() is not None  # asked first: what it sent before that still counts
            try:
                if self._connection.poll(_WAIT_SECONDS):
                    return json.loads(self._connection.recv_bytes())
                if has_ended:  # and something that it started keeps the pipe open
                    raise EOFError
            except (OSError, EOFError, ValueError):
                raise UserError(f"{place} {self._how_it_ended()}: fix the function, then resume") from None
            if is_stopped():
                return None
        self.kill()
        raise UserError(f"{place} {late}: make it faster or raise the limit, then resume")

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_SECONDS)
            return f"ended its process with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
        return "closed the pipe of its process"


def _packed(calls: Sequence[Call]) -> dict[str, Any]:
    """Return calls as JSON; a problem that several calls share is there once."""
    problems = {id(problem): problem for problem, *_ in calls}
    number = {key: index for index, key in enumerate(problems)}
    return {
        "problems": [_packed_problem(problem) for problem in problems.values()],
        "calls": [[number[id(problem)], text, asdict(grade), length] for problem, text, grade, length in calls],
    }


def _packed_problem(problem: Problem) -> dict[str, Any]:
    tree = {field.name: getattr(problem, field.name) for field in fields(Problem)}
    images = problem.images
    if isinstance(images, StoredImages):
        return tree | {"images": [str(images.file.path.absolute()), images.row, len(images)], "stored": True}
    return tree | {"images": [base64.b64encode(image).decode() for image in images], "stored": False}


# -- in the process --------------------------------------------------------------------------------


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
        function = load_reward_function(options["function"])
    except BaseException as error:
        reply({"fault": str(error) if isinstance(error, UserError) else _told(error)})
        return
    reply({})
    with suppress(EOFError):
        while True:
            message = json.loads(connection.recv_bytes())
            problems = [_unpacked_problem(tree) for tree in message["problems"]]
            for index, text, grade, length in message["calls"]:
                reply(_answer(function, problems[index], text, Grade(**grade), length))


def load_reward_function(path: str) -> UserFunction:
    """Import the function `module.name`. Raises UserError if there is none, and whatever its module raises."""
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(str(error)) from None
    if not callable(function):
        raise UserError(f"it is of type {type(function).__name__}")
    return cast(UserFunction, function)


def _answer(function: UserFunction, *call: Any) -> dict[str, Any]:
    """Call the function and return its value, or what is wrong with it."""
    try:
        raw = function(*call)
    except BaseException as error:
        return {"fault": _told(error)}
    try:
        value = math.nan if isinstance(raw, str | bytes | bytearray) else float(raw)
    except BaseException:  # a complex number, None, or an object whose own __float__ fails
        value = math.nan
    return {"value": value} if math.isfinite(value) else {"fault": f"returned {reprlib.repr(raw)}, no finite number"}


def _told(error: BaseException) -> str:
    """Return an exception and its place in a few words."""
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return f"raised {text:.300} ({Path(frames[-1].filename).name} line {frames[-1].lineno})"


def _unpacked_problem(tree: Mapping[str, Any]) -> Problem:
    values: dict[str, Any] = {**tree, "choices": tuple(tree["choices"])}
    if values.pop("stored"):
        path, row, count = tree["images"]
        values["images"] = StoredImages(_column(path), row, count)
    else:
        values["images"] = tuple(map(base64.b64decode, tree["images"]))
    return Problem(**values)


@cache
def _column(path: str) -> ImageColumn:
    return ImageColumn(Path(path))


def _end_with(parent: int) -> None:
    """End this process when its parent is gone; the function may never return."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
