"""Call the user's own reward functions, each in a process of its own, where none can end, fork or block the trainer.

    function = UserFunction("my_rewards.politeness", timeout=60.0)
    outcomes = function.outcomes([(problem, response, grade, num_tokens), ...])
    function.close()

The process imports the function once. It gets the trainer's environment, working directory and `sys.path`, but shares
no memory, and Ctrl-C does not reach it. It ends with the trainer.
"""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from vlm_rl.config import RewardPartConfig
from vlm_rl.data.stored_images import StoredImages
from vlm_rl.errors import UserError, where_to_look
from vlm_rl.rewards.cell_functions import CELL, CellFunction, cell_function
from vlm_rl.rewards.function_worker import late
from vlm_rl.rewards.part import GradedResponse, Part, PartVerdict, RewardSetup
from vlm_rl.types import Call, Outcome, Problem

_START_SECONDS = 300.0  # to import the function's module
_END_SECONDS = 5.0  # to end by itself
_WAIT_SECONDS = 0.1  # between two looks at whether the run is stopped
_LATE_SECONDS = 2.0  # for an async function, beyond the limit that its own process keeps
_MAX_LOST = 3  # processes that a batch may cost
_PROGRAM = """
import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options["path"]
from vlm_rl.rewards.function_worker import serve
serve(options)
"""


def open_function(name: str, setup: RewardSetup) -> Iterator[Part]:
    """Yield the part of `reward.function`, whose failure stops the run. Raises UserError if it cannot be imported."""
    config = setup.config
    if config.function and config.allow_function:
        function = UserFunction(config.function, timeout=config.function_timeout)
        yield _part(name, RewardPartConfig(weight=config.function_weight), function, setup)


def open_functions(_: str, setup: RewardSetup) -> Iterator[Part]:
    """Yield a part for each of `reward.functions`, by the user's name. Raises UserError if one cannot be imported."""
    for name, section in setup.config.functions.items():
        key, how = f"reward.functions.{name}.path", {"timeout": setup.config.function_timeout}
        stops_run = section.on_failure == "stop"
        if section.path.startswith(CELL):
            own = cell_function(setup.functions, section.path, key)
            function = CellFunction(own, key, **how, stops_run=stops_run)
        else:
            function = UserFunction(section.path, key=key, **how, stops_run=stops_run)
        if function.takes_groups and section.role == "accuracy":
            function.close()
            raise UserError(
                f"reward.functions.{name}.role is accuracy, and {section.path} takes all responses to a prompt, of "
                "which an evaluation may have one: give it the role part, and reward.accuracy=0 where it shall stand "
                "in for the grader"
            )
        yield replace(_part(name, section, function, setup), may_fail=True)


def _part(name: str, section: RewardPartConfig, function: UserFunction | CellFunction, setup: RewardSetup) -> Part:
    def verdicts(responses: Sequence[GradedResponse]) -> list[PartVerdict]:
        calls = [response.call for response in responses]
        groups = [response.group for response in responses]
        outcomes = function.outcomes(calls, groups=groups, is_stopped=setup.is_stopped)
        return [PartVerdict(outcome) for outcome in outcomes]

    return Part(name, section, verdicts, abort=function.abort, close=function.close)


class UserFunction:
    """A function of the user's module. Its process is started again where the function ended it."""

    def __init__(self, path: str, *, timeout: float, key: str = "reward.function", stops_run: bool = True) -> None:
        """Start the process and import the function. Raises UserError, which names the key, if that fails.

        Args:
            path: the function, as module.name.
            timeout: seconds that one call may take: for a response, a prompt's responses or a batch.
            key: the key of the configuration that names it.
            stops_run: whether a failure of the function raises UserError, instead of being the outcome.
        """
        self.path, self.timeout, self.key = path, timeout, key
        self._stops_run = stops_run
        self._is_aborted = False
        self._process = _Process(path, key=key, timeout=timeout)

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    @property
    def takes_groups(self) -> bool:
        """Tell whether the function takes all responses to a prompt at once."""
        return self._process.takes_groups

    def outcomes(
        self,
        calls: Sequence[Call],
        *,
        groups: Sequence[int] = (),
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        """Return the function's value of each call, in order, or why it has none.

        A call that ends the process costs itself alone where the function takes one response at a time, its group
        where it takes those to one prompt, and otherwise the whole batch.

        Args:
            calls: the responses.
            groups: the number of each one's group. Calls of a group are adjacent. Empty: all form one group.
            is_stopped: once it says so the process is killed, and the values that are missing are 0.

        Raises UserError if the function fails and `stops_run` is set.
        """

        def has_stopped() -> bool:
            return self._is_aborted or is_stopped()

        outcomes: dict[int, Outcome] = {}
        for _ in range(_MAX_LOST):
            left = [index for index in range(len(calls)) if index not in outcomes]
            if not left or has_stopped():
                break
            try:
                if self._process.has_ended:
                    self._process.close()
                    self._process = _Process(self.path, key=self.key, timeout=self.timeout)
                self._ask(calls, left, outcomes, has_stopped, groups)
            except _LostError as lost:
                if has_stopped():
                    break
                unanswered = [index for index in left if index not in outcomes]
                for index in self._lost_with(unanswered, groups):
                    outcomes[index] = self._fault(calls[index], str(lost), remedy=lost.remedy)
        gave_up = 0.0 if has_stopped() else f"was not called: {_MAX_LOST} calls before it cost the process"
        if has_stopped():
            self._process.kill()
        return [outcomes.get(index, gave_up) for index in range(len(calls))]

    def abort(self) -> None:
        """Kill the function, which may never return; `outcomes` in another thread ends."""
        self._is_aborted = True
        self._process.kill()

    def close(self) -> None:
        """Let the process end by itself, for a few seconds."""
        self._process.close()

    def _ask(
        self,
        calls: Sequence[Call],
        left: Sequence[int],
        outcomes: dict[int, Outcome],
        is_stopped: Callable[[], bool],
        groups: Sequence[int],
    ) -> None:
        """Put the outcomes of the calls that are `left` into `outcomes`. Raises _LostError if the process is lost."""
        numbers = [groups[index] if groups else 0 for index in left]
        self._process.send({**_packed([calls[index] for index in left]), "groups": numbers})
        for _ in left:
            message = self._process.receive(is_stopped)
            if message is None:
                return
            index = left[message["index"]]
            fault = message.get("fault")
            outcomes[index] = message["value"] if fault is None else self._fault(calls[index], fault)

    def _lost_with(self, unanswered: Sequence[int], groups: Sequence[int]) -> Sequence[int]:
        """Return the calls that were under way when the process was lost, of those without an answer."""
        if not self._process.one_at_a_time:
            return unanswered
        if not self.takes_groups:
            return unanswered[:1]
        return [index for index in unanswered if not groups or groups[index] == groups[unanswered[0]]]

    def _fault(self, call: Call, fault: str, *, remedy: str = "fix the function") -> str:
        if self._stops_run:
            raise UserError(f"{self.key} {self.path} at problem {call[0].id!r} {fault}: {remedy}, then resume")
        return fault


class _LostError(Exception):
    """Raised where a process ended, or did not answer in time and was killed."""

    def __init__(self, how: str, remedy: str = "fix the function") -> None:
        super().__init__(how)
        self.remedy = remedy


class _Process:
    """One process that has imported one function."""

    def __init__(self, function: str, *, key: str, timeout: float) -> None:
        """Start it. Raises UserError if the function cannot be imported."""
        self.timeout = timeout
        self.one_at_a_time, self.takes_groups = True, False
        self._connection, theirs = Pipe()
        path = [str(Path(folder).absolute()) for folder in sys.path]
        options = {"path": path, "function": function, "timeout": timeout, "pipe": theirs.fileno()}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        try:
            reply = self._wait(_START_SECONDS, "was not imported", lambda: False) or {}
            if "fault" in reply:
                step = where_to_look(function, reply["fault"]) or "; give an importable module.function"
                raise UserError(f"{key} is {function!r}: {reply['fault']}{step}")
            self.one_at_a_time, self.takes_groups = reply["one_at_a_time"], reply["takes_groups"]
        except _LostError as lost:
            self.kill()
            raise UserError(f"{key} is {function!r} {lost}: {lost.remedy}, then resume") from None
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # a process that has ended is noticed by `receive`
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self, is_stopped: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the reply to one call, or None when the run is stopped. Raises _LostError if it does not come."""
        seconds = self.timeout + (0 if self.one_at_a_time else _LATE_SECONDS)
        return self._wait(seconds, late(self.timeout), is_stopped)

    def kill(self) -> None:
        """End the process at once, with all that it started; a thread that waits for it is woken."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.kill()

    def _wait(self, seconds: float, too_late: str, is_stopped: Callable[[], bool]) -> dict[str, Any] | None:
        # Waits are counted, not clocked: a trainer that was suspended meanwhile does not blame the function.
        for _ in range(math.ceil(seconds / _WAIT_SECONDS)):
            has_ended = self.has_ended  # asked first: what it sent before that still counts
            try:
                if self._connection.poll(_WAIT_SECONDS):
                    return json.loads(self._connection.recv_bytes())
                if has_ended:  # and something that it started keeps the pipe open
                    raise EOFError
            except (OSError, EOFError, ValueError):
                how = self._how_it_ended()
                self.kill()
                raise _LostError(how) from None
            if is_stopped():
                return None
        self.kill()
        raise _LostError(too_late, "make it faster or raise the limit")

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
