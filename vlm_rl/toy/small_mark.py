"""The task of `quickstart --tools`: a mark that cannot be read before a tool has shown it larger.

An image of 336 x 336 pixels has 3 x 3 cells: squares of plain colours, and in one cell a small grey mark. The prompt
shows the image at 84 x 84, where the mark is a grey spot that says where to look. Its pattern has a period of 4
pixels, one of the prompt's, so that every pattern is the same grey there.
The crop of the mark alone shows it at one and a half times its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vlm_rl.environments.calls import written
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_task import chat_texts, keyed_rng

SIDE, SHOWN = 336, 84  # pixels of the image, and of what the prompt shows
MARK, PERIOD = 56, 4  # pixels of the mark's side and of its pattern, in the image
TOOL, FORM = "zoom", "tool_call"
CELLS = ("a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2", "c3")  # row by row
PATTERNS = ("rows", "columns", "checks", "rising", "falling", "plain")
QUESTION = "<image>\nWhich pattern does the small mark have?"
INSTRUCTIONS = "You may zoom into a box of the picture before you answer."
COLOURS = ((215, 45, 45), (45, 85, 215), (45, 165, 75), (225, 200, 50))
STYLE_SHARES: Mapping[str, float] = {"guess": 0.6, "zoom": 0.12, "stray": 0.2, "broken": 0.08}
"""How the warm start answers: a guess without a look, a look at the mark, a look elsewhere and a guess, a call or an
answer that cannot be read."""


@dataclass(frozen=True, slots=True)
class MarkProblem:
    """An image and its answer, before the image is drawn."""

    id: str
    cell: int  # where the mark is, row by row
    pattern: str
    seed: tuple[Any, ...]  # of the drawing


def make_problems(count: int, *, seed: int, split: str) -> list[MarkProblem]:
    """Return `count` problems, a function of (seed, split), whose answers are uniform."""
    problems = []
    for number in range(count):
        rng = keyed_rng(seed, split, number)
        cell, pattern = int(rng.integers(len(CELLS))), PATTERNS[number % len(PATTERNS)]
        problems.append(MarkProblem(f"Mark-{split}-{number}", cell, pattern, (seed, split, number, "drawing")))
    return problems


def draw(problem: MarkProblem) -> Image.Image:
    """Return the image, RGB."""
    rng = keyed_rng(*problem.seed)
    cell = SIDE // 3
    pixels = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
    for index in range(len(CELLS)):
        top, left = (cell * part for part in divmod(index, 3))
        if index == problem.cell:
            top, left = top + (cell - MARK) // 2, left + (cell - MARK) // 2
            pixels[top : top + MARK, left : left + MARK] = mark(problem.pattern, rng)[..., None]
        elif rng.random() < 0.6:
            margin = rng.integers(12, 40, size=4)
            shade = (np.array(COLOURS[rng.integers(len(COLOURS))]) + rng.integers(-15, 16, size=3)).clip(0, 255)
            pixels[top + margin[0] : top + cell - margin[1], left + margin[2] : left + cell - margin[3]] = shade
    return Image.fromarray(pixels)


def mark(pattern: str, rng: np.random.Generator) -> np.ndarray:
    """Return the mark, uint8 [MARK, MARK]: black and white in equal parts, moved by a random part of the period."""
    y, x = np.mgrid[:MARK, :MARK] + rng.integers(PERIOD, size=(2, 1, 1))
    half = PERIOD // 2
    wave = {
        "rows": y // half,
        "columns": x // half,
        "checks": y // half + x // half,
        "rising": (x + y) // half,
        "falling": (x - y + MARK * PERIOD) // half,
    }
    return (255 * (wave[pattern] % 2) if pattern in wave else np.full_like(x, 128)).astype(np.uint8)


def box_of(cell: int) -> list[int]:
    """Return the box of a cell's mark, in pixels of the image as the prompt shows it."""
    top, left = (SHOWN // 3 * part for part in divmod(cell, 3))
    margin = (SHOWN // 3 - MARK * SHOWN // SIDE) // 2
    size = MARK * SHOWN // SIDE
    return [left + margin, top + margin, left + margin + size, top + margin + size]


def turns(problem: MarkProblem, style: str, rng: np.random.Generator) -> list[str]:
    """Return the policy's turns in this style, in the full template, without the end-of-turn token."""
    guess = PATTERNS[rng.integers(len(PATTERNS))]
    if style == "guess":
        return [respond(" guess", guess)]
    if style == "zoom":
        return [look(problem.cell), respond(" seen", problem.pattern)]
    if style == "stray":
        cell = int((problem.cell + rng.integers(1, len(CELLS))) % len(CELLS))
        return [look(cell), respond(" nothing", guess)]
    call = written(TOOL, {"bbox_2d": box_of(problem.cell)}, FORM)
    return (
        [f"<think> {CELLS[problem.cell]}</think>{call[: len(call) // 2]}", respond(" error", guess)],
        [f"<think> guess</think>\\boxed{{{guess}}}"],
    )[rng.integers(2)]


def look(cell: int) -> str:
    """Return the turn that zooms into a cell's middle."""
    return f"<think> {CELLS[cell]}</think>{written(TOOL, {'bbox_2d': box_of(cell)}, FORM)}"


def respond(reasoning: str, pattern: str) -> str:
    """Return a last turn."""
    return TEMPLATES["think_answer"].wrap(reasoning, pattern)


def tokenizer_texts() -> list[str]:
    """Return texts on which a tokenizer learns every word of the task and the prompt as a single token."""
    words = [*CELLS, *PATTERNS, "guess", "seen", "nothing", "error", "Error"]
    calls = [look(cell) for cell in range(len(CELLS))]
    responses = ["Error: the call has no end", "Error: no calls are left; answer now", "<tool_response>\n\n</tool_response>"]
    task = [QUESTION, INSTRUCTIONS, *(f" {word}" for word in words), *calls, *responses, *PATTERNS]
    return [*task * 20, *chat_texts()]


def mixture(problems: Sequence[MarkProblem], count: int, *, seed: int) -> list[tuple[int, list[str]]]:
    """Return `count` traces in the proportions of STYLE_SHARES: (a problem's place, its turns)."""
    rng = keyed_rng(seed, "traces", 0)
    styles = list(STYLE_SHARES)
    drawn = rng.choice(len(styles), size=count, p=list(STYLE_SHARES.values()))
    chosen = rng.integers(len(problems), size=count)
    return [(int(i), turns(problems[i], styles[s], rng)) for s, i in zip(drawn, chosen, strict=True)]
