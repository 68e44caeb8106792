"""The quickstart's task: an 84 x 84 image of 3 x 3 coloured squares, and "Count the red squares."

A careful response takes 27 words: each cell, its colour and the running count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from vlm_rl.toy.counting_task import MAX_COUNT, CountingTask, chat_texts, draw_cells, keyed_rng, respond

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 45, 45),
    "blue": (45, 85, 215),
    "green": (45, 165, 75),
    "yellow": (225, 200, 50),
}
CELLS = ("a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2", "c3")  # row by row
PHRASINGS = (
    "Count the {} squares.",
    "How many {} squares are there?",
    "Find the number of {} squares.",
)

FORCED_SCAN = "<think> a1"
"""The first words of every scan. As the given start of a response they force the careful style: the accuracy
that this gives before any reinforcement is what the model can already see."""


@dataclass(frozen=True, slots=True)
class SquaresProblem:
    """An image and its question, before the image is drawn."""

    id: str
    cells: tuple[str, ...]  # nine colour names, row by row
    target: str  # the colour asked for
    question: str

    @property
    def count(self) -> int:
        """Return the right answer."""
        return self.cells.count(self.target)


class CountingSquares(CountingTask[SquaresProblem]):
    """Count the squares of a colour.

    Styles of traces: guess, a word of reasoning and a uniform guess; partial, a scan that stops early and guesses
    the rest; full, all nine cells; check, a second pass over them; broken, a scan or a guess in a wrong format.
    """

    style_shares: ClassVar[Mapping[str, float]] = {
        "guess": 0.62,
        "partial": 0.1,
        "full": 0.1,
        "check": 0.1,
        "broken": 0.08,
    }
    clean_style = "full"

    def make_problems(self, count: int, *, seed: int, split: str) -> list[SquaresProblem]:
        """Return `count` problems, a function of (seed, split), with answers uniform on 0..8."""
        held_out = split == "heldout"
        return [_make_problem(keyed_rng(seed, split, n), f"Toy-{split}-{n}", held_out=held_out) for n in range(count)]

    def draw(self, problem: SquaresProblem, *, seed: int) -> Image.Image:
        """Return the 84 x 84 RGB image of a problem."""
        colours = [np.array(COLOURS[colour]) for colour in problem.cells]
        return draw_cells(colours, jitter=15, rng=keyed_rng(seed, problem.id, 0))

    def trace(self, problem: SquaresProblem, style: str, rng: np.random.Generator) -> str:
        """Return a response of this style in the full template, without the end-of-sequence token."""
        if style == "guess":
            return respond(" guess", _guess(rng))
        if style == "partial":
            cells = int(rng.integers(3, 7))
            seen = problem.cells[:cells].count(problem.target)
            rest = int(rng.integers(0, min(MAX_COUNT - seen, len(CELLS) - cells) + 1))
            return respond(_scan(problem, cells), seen + rest)
        if style == "full":
            return respond(_scan(problem), problem.count)
        if style == "check":
            return respond(f"{_scan(problem)} check{_scan(problem)}", problem.count)
        return _broken(problem, rng)

    def tokenizer_texts(self) -> list[str]:
        """Return texts on which a tokenizer learns every word of the task and the prompt as a single token.

        The task's words are repeated, so that they come first where the vocabulary is too small for all.
        """
        questions = [phrasing.format(colour) for phrasing in PHRASINGS for colour in COLOURS]
        scan_words = [*CELLS, *COLOURS, *map(str, range(MAX_COUNT + 2)), "check", "guess"]
        task = [*questions, *(f" {word}" for word in scan_words)]
        return [*task * 20, *chat_texts()]


SQUARES = CountingSquares()


def is_held_out(cells: Sequence[str], target: str) -> bool:
    """Tell whether this arrangement is in the quarter that only the held-out split may show."""
    return hashlib.blake2b(" ".join([target, *cells]).encode(), digest_size=1).digest()[0] % 4 == 0


def _make_problem(rng: np.random.Generator, problem_id: str, *, held_out: bool) -> SquaresProblem:
    names = list(COLOURS)
    target = names[rng.integers(len(names))]
    others = [name for name in names if name != target]
    count = int(rng.integers(MAX_COUNT + 1))
    phrasing = PHRASINGS[rng.integers(len(PHRASINGS))]
    while True:
        cells = [others[i] for i in rng.integers(len(others), size=len(CELLS))]
        for place in rng.choice(len(CELLS), size=count, replace=False):
            cells[place] = target
        if is_held_out(cells, target) == held_out:
            return SquaresProblem(problem_id, tuple(cells), target, f"<image>\n{phrasing.format(target)}")


def _scan(problem: SquaresProblem, cells: int = len(CELLS)) -> str:
    """Return ` a1 red 1 a2 blue 1 ...`: each cell, its colour, and how many of the target colour so far."""
    parts = []
    for index in range(cells):
        running = problem.cells[: index + 1].count(problem.target)
        parts.append(f" {CELLS[index]} {problem.cells[index]} {running}")
    return "".join(parts)


def _guess(rng: np.random.Generator) -> int:
    return int(rng.integers(MAX_COUNT + 1))


def _broken(problem: SquaresProblem, rng: np.random.Generator) -> str:
    """Return one of four ways to miss the format, the first two after an honest scan."""
    scan, count, guess = _scan(problem), problem.count, _guess(rng)
    return (
        rf"<think>{scan}</think>\boxed{{{count}}}",  # no <answer>
        f"<think>{scan}</think><answer>{count}</answer>",  # no box
        rf"<answer>\boxed{{{guess}}}</answer>",  # no reasoning block
        rf"<think>\boxed{{{guess}}}",  # a block that never closes
    )[rng.integers(4)]
