"""What an environment is. This is all that a class of your own needs:

    class Guess:
        instructions = "Guess a number. You are told whether it is too small."

        async def reset(self, problem: Problem, seed: int) -> None:
            self.gold = int(problem.answer)

        async def step(self, text: str) -> Observation | Done:
            numbers = re.findall(r"\\d+", text)
            if not numbers or int(numbers[-1]) == self.gold:
                return Done()
            return Observation("too small" if int(numbers[-1]) < self.gold else "too large")

There is one object for each response. What its reset returns, if anything, is shown to the model before the first
turn, as the end of the prompt that all responses to a problem share. Loads no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vlm_rl.errors import UserError, near
from vlm_rl.types import Observation, Problem

__all__ = ["Done", "Environment", "EnvironmentSetup", "Observation", "StartDiffersError", "digest_of"]


class StartDiffersError(UserError):
    """Raised where the reset of a response shows something else than its prompt."""


def digest_of(shown: Observation | None) -> str:
    """Return a digest of what a reset returns, "" for nothing."""
    if shown is None or not (shown.text or shown.images or shown.error):
        return ""
    parts = [repr((shown.text, shown.error, shown.tool)).encode(), *shown.images]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@dataclass(frozen=True, slots=True)
class Done:
    """Ends an episode: the turn that was answered so is its last."""

    reason: str = "done"


class Environment(Protocol):
    """Answers the turns of one response."""

    instructions: str  # what the system's message says about it; the same for all problems

    async def reset(self, problem: Problem, seed: int) -> Observation | None:
        """Begin an episode, and return what is shown before the first turn, if anything.

        All noise of the environment comes from the seed, so that a resumed run repeats it. An environment that shows
        something gets the seed of the problem, in each of its responses: it must show the same each time. One that
        shows nothing gets a seed for each response.
        """
        ...

    async def step(self, text: str) -> Observation | Done:
        """Answer a turn. What it raises becomes an observation with an error: the episode goes on.

        Args:
            text: of the turn, decoded without control tokens.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EnvironmentSetup:
    """What a shipped environment is opened with."""

    options: Mapping[str, Any]  # environment.options
    calls: str  # how the model writes a call: tool_call or fenced
    model_type: str  # the model's, which says what its coordinates mean
    workers: int  # programs at the same time
    timeout: float  # seconds that an answer may take
    max_turns: int  # of the policy; what the last one calls would not be shown to it
    grade: Callable[[Problem, str], bool]  # whether a text answers a problem rightly
    shown: Callable[[Problem], list[tuple[int, int]]]  # width and height of each image as the model sees it
    resources: dict[str, Any] = field(default_factory=dict)  # what the episodes of a run share, by name

    def option(self, name: str, default: Any) -> Any:
        """Return an option. Raises UserError if its type is not the default's."""
        value = self.options.get(name, default)
        if type(value) is not type(default) and not (isinstance(default, float) and isinstance(value, int)):
            raise UserError(f"environment.options.{name} is {value!r}, and must be of type {type(default).__name__}")
        return value

    def calls_left(self, default: int) -> int:
        """Return the most calls of an episode that are followed: the option `calls`, and none in its last turn."""
        return min(self.option("calls", default), self.max_turns - 1)

    def check_options(self, known: Mapping[str, Any]) -> None:
        """Raise UserError for an option that the environment does not have, or of another type."""
        for name in self.options:
            if name not in known:
                hint = near(name, list(known), otherwise=f"it has {', '.join(known) or 'none'}")
                raise UserError(f"environment.options.{name}: this environment has no such option; {hint}")
            self.option(name, known[name])
