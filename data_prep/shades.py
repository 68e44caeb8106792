"""A harder counting task than vlm_rl's quickstart, for comparing algorithms: it is not solved in twenty steps.

    write_shades(Path("out/shades"), seed=0)

A 112 x 112 picture of 4 x 4 squares, each of one of four colours in a light or a dark shade; "Count the
dark red squares in rows b to d." Only the rows asked for matter, so the useful length of a scan goes from
4 cells to 16. The warm start mixes guesses, hasty scans that misread cells, careful ones, scans of the
whole picture and second passes: there is a shorter way that is right less often, and there are longer ones
that gain nothing.

The layout on disk is that of vlm_rl's quickstart (vlm_rl.data_prep.toy), ViRL39K's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from vlm_rl.data_prep.toy import CELL_SIDE, keyed_rng, trace_lines, write_splits
from vlm_rl.templates import TEMPLATES

SIDE = 4
ROWS = "abcd"
MAX_COUNT = 8
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

Style = Literal["guess", "hasty", "careful", "whole", "check", "broken"]
MIXTURE: dict[Style, float] = {
    "guess": 0.4,
    "hasty": 0.05,
    "careful": 0.2,
    "whole": 0.15,
    "check": 0.15,
    "broken": 0.05,
}

Paint = tuple[str, str]  # shade, colour


@dataclass(frozen=True, slots=True)
class ShadesProblem:
    """One picture and its question, before it is drawn."""

    id: str
    cells: tuple[Paint, ...]  # sixteen, row by row
    target: Paint
    first: int  # rows asked for, both ends included
    last: int
    question: str

    @property
    def asked(self) -> range:
        """The indices of the cells that count."""
        return range(self.first * SIDE, (self.last + 1) * SIDE)

    @property
    def count(self) -> int:
        return sum(self.cells[index] == self.target for index in self.asked)


def make_problems(count: int, *, seed: int, split: str) -> list[ShadesProblem]:
    """`count` problems, a function of (seed, split); the asked rows hold 0 to 8 target squares, uniformly."""
    return [
        _draw_problem(keyed_rng(seed, "shades", split, index), f"Shades-{split}-{index}", held_out=split == "heldout")
        for index in range(count)
    ]


def _draw_problem(rng: np.random.Generator, problem_id: str, *, held_out: bool) -> ShadesProblem:
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


def render(problem: ShadesProblem, *, seed: int) -> Image.Image:
    """Draw the 112 x 112 RGB picture: margins of 2-5 px and a jitter of +-12 in colour."""
    rng = keyed_rng(seed, problem.id, "picture")
    pixels = np.full((SIDE * CELL_SIDE, SIDE * CELL_SIDE, 3), 255, dtype=np.uint8)
    for index, (shade, colour) in enumerate(problem.cells):
        top, left = (CELL_SIDE * part for part in divmod(index, SIDE))
        up, down, before, after = rng.integers(2, 6, size=4)
        paint = np.array(COLOURS[colour]) * SHADES[shade] + rng.integers(-12, 13, size=3)
        pixels[top + up : top + CELL_SIDE - down, left + before : left + CELL_SIDE - after] = paint.clip(0, 255)
    return Image.fromarray(pixels)


def trace(problem: ShadesProblem, style: Style, rng: np.random.Generator) -> str:
    """A response in the full template, without the end-of-sequence token.

    guess: a word and a uniform guess; careful: the asked rows; hasty: the same with cells misread; whole: the
    careful scan after the rows nobody asked for; check: a hasty scan, then a careful one; broken: no box.
    """
    if style == "guess":
        return _wrap(" guess", int(rng.integers(MAX_COUNT + 1)))
    if style == "careful":
        return _wrap(_scan(problem, problem.asked), problem.count)
    if style == "hasty":
        scan, count = _hasty(problem, rng)
        return _wrap(scan, count)
    if style == "whole":
        aside = [index for index in range(SIDE**2) if index not in problem.asked]
        return _wrap(f"{_list(problem, aside)} now{_scan(problem, problem.asked)}", problem.count)
    if style == "check":
        scan, _ = _hasty(problem, rng)
        return _wrap(f"{scan} check{_scan(problem, problem.asked)}", problem.count)
    return f"<think>{_scan(problem, problem.asked)}</think><answer>{problem.count}</answer>"


def _scan(problem: ShadesProblem, cells: Sequence[int], seen: Sequence[Paint] | None = None) -> str:
    """` a1 dark red 1 a2 light blue 1 ...`: each cell, its paint, and how many of the target so far."""
    seen = [problem.cells[index] for index in cells] if seen is None else seen
    parts, running = [], 0
    for index, (shade, colour) in zip(cells, seen, strict=True):
        running += (shade, colour) == problem.target
        parts.append(f" {_name(index)} {shade} {colour} {running}")
    return "".join(parts)


def _hasty(problem: ShadesProblem, rng: np.random.Generator) -> tuple[str, int]:
    """A scan in which a cell is misread now and then, and the count that it leads to."""
    seen = [
        PAINTS[rng.integers(len(PAINTS))] if rng.random() < MISREAD else problem.cells[index]
        for index in problem.asked
    ]
    return _scan(problem, problem.asked, seen), sum(paint == problem.target for paint in seen)


def _list(problem: ShadesProblem, cells: Sequence[int]) -> str:
    return "".join(f" {_name(index)} {' '.join(problem.cells[index])}" for index in cells)


def _name(index: int) -> str:
    return f"{ROWS[index // SIDE]}{index % SIDE + 1}"


def _wrap(reasoning: str, answer: int) -> str:
    return TEMPLATES["think_answer"].wrap(reasoning, str(answer))


def tokenizer_texts(*, repeats: int = 20) -> list[str]:
    """Texts on which a tokenizer learns every word of the task as one token."""
    names = [_name(index) for index in range(SIDE**2)]
    words = [*names, *SHADES, *COLOURS, *map(str, range(SIDE**2 + 1)), "check", "guess", "now"]
    regions = [f"row {a}." for a in ROWS] + [f"rows {a} to {b}." for a in ROWS for b in ROWS if a < b]
    questions = [f"Count the {' '.join(paint)} squares in {region}" for paint in PAINTS for region in regions]
    chat = ["system", "user", "assistant", "You are a helpful assistant."]
    return [*(f" {word}" for word in words * repeats), *questions, *chat, *(t.system for t in TEMPLATES.values())]


def write_shades(out: Path, *, seed: int, train: int, heldout: int, warm: int, mixture: int) -> Path:
    """Write the splits train, heldout and warm, with its traces, below `out`, which must not exist yet."""
    counts = {"train": train, "heldout": heldout, "warm": warm}
    splits = {split: make_problems(count, seed=seed, split=split) for split, count in counts.items()}
    lines = trace_lines(splits["warm"], trace, MIXTURE, clean="careful", seed=seed, mixture=mixture)
    return write_splits(out, splits, lines, render, seed=seed)
