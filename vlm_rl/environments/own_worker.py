"""What runs in the process of a user's environment: one object for each episode, and a step at a time.

An episode whose process was ended is played again from its turns: an environment takes its noise from the seed.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import resource
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_rl.environments.environment import Done, Observation, StartDiffersError, digest_of
from vlm_rl.errors import UserError
from vlm_rl.types import Problem

MEMORY = 8 << 30  # bytes of address space beside what the process has at its start
_MOST_EPISODES = 4096  # whose objects are kept
_episodes: OrderedDict[str, tuple[Any, int]] = OrderedDict()  # by key: the object, and the turns that it has seen
_runner = asyncio.Runner()


def limit(path: Sequence[str], memory: int = MEMORY) -> None:
    """Take over the trainer's import path, and limit the process."""
    sys.path[:] = path
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + memory, held + memory))


def begin(path: Sequence[str], imported: Sequence[str]) -> None:
    """Prepare a process for its first task, whose time does not begin before this ends.

    Args:
        path: of imports.
        imported: classes that an earlier process could import.
    """
    limit(path)
    for name in imported:
        with suppress(BaseException):  # the task will meet it again
            load(name)


def load(path: str) -> type:
    """Import the class `module.Class`. Raises UserError if there is none, and whatever its module raises."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(str(error)) from None
    for method in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(found, method, None)):
            raise UserError(f"it has no method `async def {method}`; see docs/environments.md")
    return found


def describe(path: str, options: Mapping[str, Any]) -> str:
    """Return the instructions of a class. Raises UserError if it cannot be imported or opened."""
    try:
        return str(getattr(load(path)(**options), "instructions", ""))
    except UserError:
        raise
    except BaseException as error:
        raise UserError(f"{type(error).__name__}: {error}"[:300]) from None


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn to answer."""

    path: str  # of the class
    options: Mapping[str, Any]  # what it is opened with
    key: str  # of the episode
    problem: Problem
    seed: int
    start: str  # the digest of what reset must return
    before: Sequence[str]  # the texts of earlier turns, which an object that is new here is given again
    text: str
    timeout: float  # seconds of an answer that is awaited; the process has a limit of its own


def step(asked: Asked) -> Observation | Done:
    """Answer a turn. Where memory ends, all other episodes are forgotten first: they can be played again.

    Raises RuntimeError, with a message in one line, where the class raises or returns something else, and
    StartDiffersError where its reset shows something else than the prompt.
    """
    try:
        try:
            return _runner.run(_step(asked))
        except MemoryError:
            _episodes.clear()
            return _runner.run(_step(asked))
    except StartDiffersError:
        raise
    except BaseException as error:  # SystemExit too: the message goes to the policy, and must be able to travel
        raise RuntimeError(f"{type(error).__name__}: {error}"[:300]) from None


def start(path: str, options: Mapping[str, Any], problem: Problem, seed: int) -> Observation | None:
    """Return the observation of a new object of a class before the first turn, if any.

    Raises RuntimeError, with a message in one line, where the class raises or returns something else.
    """
    try:
        return _runner.run(_reset(load(path)(**options), problem, seed))
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}"[:300]) from None


async def _reset(environment: Any, problem: Problem, seed: int) -> Observation | None:
    shown = await environment.reset(problem, seed)
    if shown is None:
        return None
    if not isinstance(shown, Observation):
        raise TypeError(f"reset returned {type(shown).__name__}, neither an Observation nor None")
    return _checked(shown)


async def _step(asked: Asked) -> Observation | Done:
    environment, seen = _episodes.pop(asked.key, (None, 0))
    if environment is None or seen != len(asked.before):
        environment = load(asked.path)(**asked.options)
        if digest_of(await _reset(environment, asked.problem, asked.seed)) != asked.start:
            raise StartDiffersError
        for earlier in asked.before:
            await environment.step(earlier)
    try:
        async with asyncio.timeout(asked.timeout):
            answer = await environment.step(asked.text)
    except TimeoutError:
        raise TimeoutError(f"no answer within {asked.timeout:g} s") from None
    if isinstance(answer, Observation):
        _episodes[asked.key] = environment, len(asked.before) + 1
        if len(_episodes) > _MOST_EPISODES:
            _episodes.popitem(last=False)
        return _checked(answer)
    if isinstance(answer, Done):
        return Done(str(answer.reason)[:100])
    raise TypeError(f"step returned {type(answer).__name__}, neither an Observation nor Done")


def _checked(answer: Observation) -> Observation:
    images = tuple(answer.images)
    for image in images:
        if not isinstance(image, bytes):
            raise TypeError(
                f"an image of an Observation is {type(image).__name__}, not the bytes of a PNG, JPEG or WEBP"
            )
    for name in ("text", "error", "tool"):
        if type(getattr(answer, name)) is not str:
            raise TypeError(f"{name} of an Observation is {type(getattr(answer, name)).__name__}, not a text")
    return Observation(answer.text, images, answer.error[:300], answer.tool[:100])
