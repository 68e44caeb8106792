"""Compute: a program of the model runs inside the sandbox, and what it prints comes back as text.

Pictures that a program draws do not come back: the sandbox gives out text alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vlm_rl.environments.calls import ToolCallError, described, read_call
from vlm_rl.environments.environment import Done, EnvironmentSetup, Observation
from vlm_rl.errors import UserError
from vlm_rl.sandbox.programs import Program, ProgramLimits, Sandbox, SandboxError
from vlm_rl.types import Problem

OPTIONS: dict[str, Any] = {
    "tool": "python",  # its name
    "calls": 4,  # most that are followed
    "seconds": 10.0,  # of a program
    "characters": 2000,  # of its output that are shown: the beginning and the end
}


class Python:
    """One episode of programs. Each is a process of its own: variables do not stay."""

    is_quick = False

    def __init__(self, setup: EnvironmentSetup) -> None:
        self._tool, self._left = setup.option("tool", "python"), setup.calls_left(OPTIONS["calls"])
        self._seconds, self._characters = setup.option("seconds", 10.0), setup.option("characters", 2000)
        self._form = setup.calls
        if self._seconds >= setup.timeout:
            raise UserError(
                f"environment.options.seconds is {self._seconds:g}, and environment.timeout {setup.timeout:g}: a "
                "program must end before its answer is late; lower the first or raise the second"
            )
        if "sandbox" not in setup.resources:
            sandbox = Sandbox(workers=setup.workers)
            sandbox.check()
            setup.resources["sandbox"] = sandbox
        self._sandbox: Sandbox = setup.resources["sandbox"]
        code = {"type": "string", "description": "a whole program; print what you want to see"}
        purpose = "Runs a Python program and shows what it prints. Variables do not stay between calls."
        self.instructions = described(self._tool, purpose, {"code": code}, ["code"], setup.calls)

    async def reset(self, problem: Problem, seed: int) -> None:
        del problem, seed

    async def step(self, text: str) -> Observation | Done:
        try:
            call = read_call(text, self._form)
            if call is None:
                return Done()
            if self._left <= 0:
                raise ToolCallError("no calls are left; answer now")
            if call.name != self._tool:
                raise ToolCallError(f"there is no tool {call.name[:40]!r}; call {self._tool}")
            code = call.arguments.get("code")
            if not isinstance(code, str):
                raise ToolCallError("code must be the text of a program")
        except ToolCallError as error:
            return Observation(f"Error: {error}", error=str(error), tool=self._tool)
        self._left -= 1
        limits = ProgramLimits(seconds=self._seconds, cpu_seconds=max(1, round(self._seconds)))
        try:
            run = await asyncio.to_thread(self._sandbox.run, Program(code, limits=limits))
        except SandboxError as error:
            return Observation("Error: the program could not be run", error=str(error), tool=self._tool)
        shown = _middle_cut(run.stdout.decode(errors="replace").rstrip(), self._characters)
        if run.succeeded:
            return Observation(shown or "(it printed nothing)", tool=self._tool)
        return Observation(f"{shown}\nError: {run.reason}".strip(), error=run.reason, tool=self._tool)


def _middle_cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"
