"""Reward functions as a user would write them; configurations of tests name them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from vlm_rl.types import Grade, Problem


def short_words(problem: Problem, response: str, grade: Grade, length: int) -> float:
    return 1.0 if len(response) < 10 * length else 0.0


def letter_share(problem: Problem, response: str, grade: Grade, length: int) -> float:
    """Return the share of letters, which differs between the responses of an untrained model too."""
    return sum(character.isascii() and character.isalpha() for character in response) / max(1, len(response))


def digest(problem: Problem, response: str, grade: Grade, length: int) -> float:
    """Return a number that depends on every part of the call."""
    images = [hashlib.sha256(image).hexdigest() for image in problem.images]
    whole = (replace(problem, images=()), images, response, grade, length)
    return int.from_bytes(hashlib.sha256(repr(whole).encode()).digest()[:6])


not_a_function = 3


# -- functions that are called by the names of their parameters, and one that does what a response says --------------


def answers_in_completions(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Take a batch, as TRL's functions do."""
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


async def letters(problem: Problem, response: str, grade: Grade, length: int) -> float:
    await asyncio.sleep(0)
    return does_as_told(problem, response, grade, length)


def does_as_told(problem: Problem, response: str, grade: Grade, length: int) -> Any:
    if response == "exit":
        os._exit(7)
    if response == "raise":
        raise ValueError("as told")
    if response == "hang":
        hangs()
    return None if response == "none" else len(response)


def ranks(problem: Problem, responses: list[str], grades: list[Grade], lengths: list[int]) -> list[float]:
    """Return how many of the responses to a prompt are shorter than each; do as one of them says."""
    told = [does_as_told(problem, text, grade, 0) for text, grade in zip(responses, grades, strict=True)]
    return [sum(other < mine for other in told) for mine in told]


# -- functions that go wrong ----------------------------------------------------------------------


def returns_text(*_: object) -> Any:
    return "0.5"


def returns_none(*_: object) -> Any:
    return None


def returns_nan(*_: object) -> Any:
    return float("nan")


def returns_inf(*_: object) -> Any:
    return -float("inf")


def returns_complex(*_: object) -> Any:
    return 1 + 2j


def returns_unprintable(*_: object) -> Any:
    class Unprintable:
        def __repr__(self) -> str:
            raise RuntimeError

        __float__ = __repr__

    return Unprintable()


def raises(*_: object) -> float:
    raise ValueError("no judge there")


def exits(*_: object) -> float:
    sys.exit(7)


def exits_at_once(*_: object) -> float:
    os._exit(7)


def is_killed(*_: object) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def forks(*_: object) -> float:
    """Return in the parent and in the child."""
    return 0.5 if os.fork() else 2.0


def leaves_a_child(*_: object) -> float:
    """End at once, and leave a child that holds everything open."""
    if os.fork():
        os._exit(7)
    return hangs()


def hangs(*_: object) -> float:
    time.sleep(10_000)
    return 0.0


def hangs_deaf(*_: object) -> float:
    """Hang where no signal but SIGKILL ends the process."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return hangs()


def terminates_and_hangs(*_: object) -> float:
    """Send the trainer SIGTERM, and hang."""
    os.kill(os.getppid(), signal.SIGTERM)
    return hangs_deaf()


def interrupts_and_hangs(*_: object) -> float:
    """Send the trainer what Ctrl-C sends, and hang."""
    os.kill(os.getppid(), signal.SIGINT)
    return hangs_deaf()
