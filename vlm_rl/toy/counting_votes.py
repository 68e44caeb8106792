"""The long-horizon task: a list of 364 votes, and "Did more than half vote for the colour of the picture?"

Whoever reads more votes is right more often, and how many are enough depends on the problem: where the result is
clear a row of 14 does, where it is close nearly all are needed. A row takes 57 tokens and the whole list about
1,490. After each row a response goes on or answers, so its length is chosen in small steps, and each of them can
be right or wrong. The warm start mixes guesses, rows read until a coin says stop, and whole lists.

A colour follows its voter's name in the question as in a scan of it, and a vote has as many tokens in both. What is
to be read next is therefore always equally far behind, and behind the same word. A tiny model learns to find it
within two hundred steps. It learns to count before, on single rows that begin with some lead: on the whole lists,
large leads are rare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from vlm_rl.toy.counting_task import CountingTask, chat_texts, draw_cells, keyed_rng, respond

ROWS = "abcdefghijklmnopqrstuvwxyz"
COLUMNS = 14
SIZE = len(ROWS) * COLUMNS
MIN_LEAD, MAX_LEAD = 8, 180
"""The winner's votes minus the others on the whole list, log-uniform: it decides how many rows are enough."""
STOP = 0.25
"""Chance that a `look` answers after a row."""
AGES = range(18, 90)
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (235, 70, 70),
    "blue": (80, 120, 240),
    "green": (70, 200, 95),
    "yellow": (240, 220, 70),
}


@dataclass(frozen=True, slots=True)
class VotesProblem:
    """The colour of a picture and a list of votes."""

    id: str
    target: str
    first: int  # place of the first of these votes on the whole list
    votes: tuple[str, ...]  # colours, row by row
    question: str
    start: int = 0  # the target's lead before the first of these votes

    @property
    def count(self) -> int:
        """Return the right answer: 1 if more than half voted for the target, else 0."""
        return int(self.start + 2 * self.votes.count(self.target) > len(self.votes))


class CountingVotes(CountingTask[VotesProblem]):
    """Decide a vote by reading as many rows of it as are needed.

    Styles of traces: guess, no row; look, rows until a coin says stop; all, every row; broken, a look without a box.
    The first lesson of a warm start has lists of one row, each with a lead of up to `most_start` to begin with.
    """

    style_shares: ClassVar[Mapping[str, float]] = {"guess": 0.1, "look": 0.7, "all": 0.15, "broken": 0.05}
    clean_style = "look"

    def __init__(self, rows: int = len(ROWS), *, most_start: int = 0) -> None:
        self.rows, self.most_start = rows, most_start

    def make_problems(self, count: int, *, seed: int, split: str) -> list[VotesProblem]:
        """Return `count` problems, a function of (seed, split), with either answer in half of the cases."""
        rngs = [keyed_rng(seed, "votes", split, number) for number in range(count)]
        return [self._make_problem(rng, f"Votes-{split}-{n}") for n, rng in enumerate(rngs)]

    def draw(self, problem: VotesProblem, *, seed: int) -> Image.Image:
        """Return the 56 x 56 RGB image of a problem: four squares of the target's colour."""
        colour = np.array(COLOURS[problem.target], dtype=float)
        return draw_cells([colour] * 4, jitter=12, rng=keyed_rng(seed, problem.id, "picture"))

    def trace(self, problem: VotesProblem, style: str, rng: np.random.Generator) -> str:
        """Return a response of this style in the full template, without the end-of-sequence token."""
        if style == "guess":
            return respond(" guess", int(rng.integers(2)))
        rows = self.rows if style == "all" else min(int(rng.geometric(STOP)), self.rows)
        scan, lead = _scan(problem, rows)
        answer = int(lead > 0) if lead else int(rng.integers(2))
        return f"<think>{scan}</think><answer>{answer}</answer>" if style == "broken" else respond(scan, answer)

    def tokenizer_texts(self) -> list[str]:
        """Return texts on which a tokenizer learns every word of the task and the prompt as a single token."""
        leads = [f"{word}{size}" for word in ("lead", "lag") for size in range(1, MAX_LEAD + COLUMNS + 1)]
        words = [*map(_name, range(SIZE)), *leads, *COLOURS, *map(str, AGES), "aged", "even", "yes", "no"]
        words += ["next", "so", "guess", "0", "1"]
        return [*(f" {word}" for word in words * 20), *[_question(" a0.")] * 20, *chat_texts()]

    def _make_problem(self, rng: np.random.Generator, problem_id: str) -> VotesProblem:
        size = self.rows * COLUMNS
        lead = np.exp(rng.uniform(np.log(MIN_LEAD), np.log(MAX_LEAD))) * size / SIZE
        lead = max(2, 2 * round(lead / 2)) * rng.choice([-1, 1])
        target = list(COLOURS)[rng.integers(len(COLOURS))]
        others = [colour for colour in COLOURS if colour != target]
        votes = [others[i] for i in rng.integers(len(others), size=size)]
        for place in rng.choice(size, size=(size + lead) // 2, replace=False):
            votes[place] = target
        first = COLUMNS * int(rng.integers(len(ROWS) - self.rows + 1))
        start = int(rng.integers(-self.most_start, self.most_start + 1))
        listed = [
            f" {_name(first + index)} {colour} aged {age}" + ("." if (index + 1) % COLUMNS == 0 else "")
            for index, (age, colour) in enumerate(zip(rng.choice(AGES, size=size), votes, strict=True))
        ]
        text = (f" {_lead(start)}" if self.most_start else "") + "".join(listed)
        return VotesProblem(problem_id, target, first, tuple(votes), _question(text), start)


VOTES = CountingVotes()


def _question(listed: str) -> str:
    return f"<image>\nDid more than half vote for the colour of the picture? Answer 1 or 0.{listed}"


def _scan(problem: VotesProblem, rows: int) -> tuple[str, int]:
    """Return ` a0 red yes lead1 a1 blue no even ... next b0 ... so`, and the target's lead in these rows."""
    parts, lead = [], problem.start
    for index, colour in enumerate(problem.votes[: rows * COLUMNS]):
        if index and index % COLUMNS == 0:
            parts.append(" next")
        lead += 1 if colour == problem.target else -1
        seen = "yes" if colour == problem.target else "no"
        parts.append(f" {_name(problem.first + index)} {colour} {seen} {_lead(lead)}")
    return "".join([*parts, " so"]), lead


def _lead(lead: int) -> str:
    if lead == 0:
        return "even"
    return f"lead{lead}" if lead > 0 else f"lag{-lead}"


def _name(index: int) -> str:
    row, column = divmod(index, COLUMNS)
    return f"{ROWS[row]}{column}"
