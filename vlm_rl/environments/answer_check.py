"""A second try: a wrong answer is told to be wrong, once or more often, so that a policy learns to correct itself.

The grader of the reward decides. Nothing of the right answer is said.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vlm_rl.environments.environment import Done, EnvironmentSetup, Observation
from vlm_rl.types import Problem

OPTIONS: dict[str, Any] = {
    "tries": 2,  # answers in all
    "message": "That answer is wrong. Look again, and answer once more.",
}


class AnswerCheck:
    """One episode of answers."""

    is_quick = False
    instructions = ""

    def __init__(self, setup: EnvironmentSetup) -> None:
        self._left, self._message = setup.option("tries", 2), setup.option("message", OPTIONS["message"])
        self._grade = setup.grade

    async def reset(self, problem: Problem, seed: int) -> None:
        self._problem = problem

    async def step(self, text: str) -> Observation | Done:
        self._left -= 1
        if self._left <= 0 or await asyncio.to_thread(self._grade, self._problem, text):
            return Done()
        return Observation(self._message)  # no tool: a first answer is no call
