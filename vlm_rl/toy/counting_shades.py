"""The study's task: a 112 x 112 image of 4 x 4 squares, and "Count the dark red squares in rows b to d."

Each square has one of four colours in a light or a dark shade. Only the rows asked for matter, so the useful
length of a scan varies from 4 cells to 16. It is harder than the quickstart's task and not solved in twenty
steps. The warm start mixes guesses, hasty scans that misread cells, careful ones, scans of the whole image and
second passes: there is a shorter way that is right less often, and there are longer ones that gain nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from vlm_rl.toy.counting_task import MAX_COUNT, CountingTask, chat_texts, draw_cells, keyed_rng, respond

SIDE = 4
ROWS = "abcd"
SHADES: dict[str, float] = {"light": 1.0, "dark": 0.45}  # times the colour
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (235, 70, 70),
    "blue": (80, 120, 240),
    "green": (70, 200, 95),
    "yellow": (240, 220, 70),
}
PAINTS = tuple((shade, colour) for shade in SHADES for colour in COLOURS)
MISREAD = 0.12
"""Share of cells that a hasty scan gets wrong."""

Paint = tuple[str, str]  # shade, colour


@dataclass(frozen=True, slots=True)
class ShadesProblem:
    """An image and its question, before the image is drawn."""

    id: str
    cells: tuple[Paint, ...]  # sixteen, row by row
    target: Paint
    first: int  # rows asked for, both ends included
    last: int
    question: str

    @property
    def asked(self) -> range:
        """Return the indices of the cells that count."""
        return range(self.first * SIDE, (self.last + 1) * SIDE)

    @property
    def count(self) -> int:
        """Return the right answer."""
        return sum(self.cells[index] == self.target for index in self.asked)


class CountingShades(CountingTask[ShadesProblem]):
    """Count the squares of a colour and shade in some rows.

    Styles of traces: guess, a word and a uniform guess; careful, the rows asked for; hasty, the same with cells
    misread; whole, the rows nobody asked for and then a careful scan; check, a hasty scan and then a careful one;
    broken, a careful scan without a box.
    """

    style_shares: ClassVar[Mapping[str, float]] = {
        "guess": 0.4,
        "hasty": 0.05,
        "careful": 0.2,
        "whole": 0.15,
        "check": 0.15,
        "broken": 0.05,
    }
    clean_style = "careful"

    def make_problems(self, count: int, *, seed: int, split: str) -> list[ShadesProblem]:
        """Return `count` problems, a function of (seed, split), with answers uniform from 0 to at most 8."""
        rngs = [keyed_rng(seed, "shades", split, number) for number in range(count)]
        held_out = split == "heldout"
        return [_make_problem(rng, f"Shades-{split}-{n}", held_out=held_out) for n, rng in enumerate(rngs)]

    def draw(self, problem: ShadesProblem, *, seed: int) -> Image.Image:
        """Return the 112 x 112 RGB image of a problem."""
        colours = [np.array(COLOURS[colour]) * SHADES[shade] for shade, colour in problem.cells]
        return draw_cells(colours, jitter=12, rng=keyed_rng(seed, problem.id, "picture"))

    def trace(self, problem: ShadesProblem, style: str, rng: np.random.Generator) -> str:
        """Return a response of this style in the full template, without the end-of-sequence token."""
        if style == "guess":
            return respond(" guess", int(rng.integers(MAX_COUNT + 1)))
        if style == "careful":
            return respond(_scan(problem, problem.asked), problem.count)
        if style == "hasty":
            scan, count = _hasty(problem, rng)
            return respond(scan, count)
        if style == "whole":
            aside = [index for index in range(SIDE**2) if index not in problem.asked]
            return respond(f"{_list(problem, aside)} now{_scan(problem, problem.asked)}", problem.count)
        if style == "check":
            scan, _ = _hasty(problem, rng)
            return respond(f"{scan} check{_scan(problem, problem.asked)}", problem.count)
        return f"<think>{_scan(problem, problem.asked)}</think><answer>{problem.count}</answer>"

    def tokenizer_texts(self) -> list[str]:
        """Return texts on which a tokenizer learns every word of the task and the prompt as a single token."""
        names = [_name(index) for index in range(SIDE**2)]
        words = [*names, *SHADES, *COLOURS, *map(str, range(SIDE**2 + 1)), "check", "guess", "now"]
        regions = [f"row {a}." for a in ROWS] + [f"rows {a} to {b}." for a in ROWS for b in ROWS if a < b]
        questions = [f"Count the {' '.join(paint)} squares in {region}" for paint in PAINTS for region in regions]
        return [*(f" {word}" for word in words * 20), *questions, *chat_texts()]


SHADED_SQUARES = CountingShades()


def _make_problem(rng: np.random.Generator, problem_id: str, *, held_out: bool) -> ShadesProblem:
    target = PAINTS[rng.integers(len(PAINTS))]
    others = [paint for paint in PAINTS if paint != target]
    num_rows = int(rng.integers(1, SIDE + 1))
    first = int(rng.integers(SIDE - num_rows + 1))
    asked = np.arange(first * SIDE, (first + num_rows) * SIDE)
    count = int(rng.integers(min(MAX_COUNT, len(asked)) + 1))
    where = f"row {ROWS[first]}" if num_rows == 1 else f"rows {ROWS[first]} to {ROWS[first + num_rows - 1]}"
    question = f"<image>\nCount the {' '.join(target)} squares in {where}."
    while True:
        cells = [others[i] for i in rng.integers(len(others), size=SIDE**2)]
        outside = np.setdiff1d(np.arange(SIDE**2), asked)
        for place in rng.choice(asked, size=count, replace=False):
            cells[place] = target
        for place in outside[rng.random(len(outside)) < 0.25]:  # squares that must not be counted
            cells[place] = target
        problem = ShadesProblem(problem_id, tuple(cells), target, first, first + num_rows - 1, question)
        if (keyed_rng(0, repr(problem.cells)).integers(4) == 0) == held_out:  # a quarter is never trained on
            return problem


def _scan(problem: ShadesProblem, cells: Sequence[int], seen: Sequence[Paint] | None = None) -> str:
    """Return ` a1 dark red 1 a2 light blue 1 ...`: each cell, its paint, and how many of the target so far."""
    seen = [problem.cells[index] for index in cells] if seen is None else seen
    parts, running = [], 0
    for index, (shade, colour) in zip(cells, seen, strict=True):
        running += (shade, colour) == problem.target
        parts.append(f" {_name(index)} {shade} {colour} {running}")
    return "".join(parts)


def _hasty(problem: ShadesProblem, rng: np.random.Generator) -> tuple[str, int]:
    """Return a scan in which a cell is misread now and then, and the count that it leads to."""
    seen = [
        PAINTS[rng.integers(len(PAINTS))] if rng.random() < MISREAD else problem.cells[index]
        for index in problem.asked
    ]
    return _scan(problem, problem.asked, seen), sum(paint == problem.target for paint in seen)


def _list(problem: ShadesProblem, cells: Sequence[int]) -> str:
    return "".join(f" {_name(index)} {' '.join(problem.cells[index])}" for index in cells)


def _name(index: int) -> str:
    return f"{ROWS[index // SIDE]}{index % SIDE + 1}"
