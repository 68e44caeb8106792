"""The task of `quickstart --tools`: a board that cannot be read before a tool has shown it larger.

An image of 588 x 588 pixels has 3 x 3 cells: squares of plain colours, nothing, and in one cell a small board of
3 x 3 patterns. The prompt shows the image at 84 x 84, where the board is a grey spot that says where to look. The
patterns' period of 7 pixels is one pixel of the prompt. So all of them are the same grey there, but for traces at the
edges of a pattern. The crop of the board shows each pattern on 28 x 28 pixels, a merged visual token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vlm_rl.environments.calls import written
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_task import MAX_COUNT, chat_texts, keyed_rng

SIDE, SHOWN, BOARD = 588, 84, 84  # pixels of the image, of what the prompt shows, and of the board in the image
PERIOD = SIDE // SHOWN
TOOL, FORM = "zoom", "tool_call"
CELLS = ("a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2", "c3")  # row by row
PATTERNS = ("rows", "columns", "rising", "plain")
COLOURS = {"red": (215, 45, 45), "blue": (45, 85, 215), "green": (45, 165, 75), "yellow": (225, 200, 50)}
INSTRUCTIONS = "You may zoom into a box of the picture before you answer."
STYLE_SHARES: Mapping[str, float] = {"guess": 0.55, "zoom": 0.2, "stray": 0.17, "broken": 0.08}
"""How the warm start answers: a guess without a look, a look at the board, a look elsewhere and a guess, a call or an
answer that cannot be read."""


@dataclass(frozen=True, slots=True)
class BoardProblem:
    """An image and its question, before the image is drawn."""

    id: str
    cells: tuple[str, ...]  # of the image, row by row: a colour, "empty" or "board"
    board: tuple[str, ...]  # nine patterns, row by row
    target: str  # the pattern asked for
    seed: tuple[Any, ...]  # of the drawing

    @property
    def question(self) -> str:
        return f"<image>\nHow many {self.target} are on the small board?"

    @property
    def count(self) -> int:
        """Return the right answer."""
        return self.board.count(self.target)


def make_problems(count: int, *, seed: int, split: str) -> list[BoardProblem]:
    """Return `count` problems, a function of (seed, split), with answers uniform on 0..8."""
    return [_make_problem(number, seed, split) for number in range(count)]


def _make_problem(number: int, seed: int, split: str) -> BoardProblem:
    rng = keyed_rng(seed, split, number)
    target = PATTERNS[rng.integers(len(PATTERNS))]
    others = [pattern for pattern in PATTERNS if pattern != target]
    board = [others[i] for i in rng.integers(len(others), size=len(CELLS))]
    for place in rng.choice(len(CELLS), size=int(rng.integers(MAX_COUNT + 1)), replace=False):
        board[place] = target
    kinds = [*COLOURS, "empty"]
    cells = [kinds[i] for i in rng.integers(len(kinds), size=len(CELLS))]
    cells[rng.integers(len(CELLS))] = "board"
    return BoardProblem(f"Board-{split}-{number}", tuple(cells), tuple(board), target, (seed, split, number, "draw"))


def draw(problem: BoardProblem) -> Image.Image:
    """Return the image, RGB."""
    rng = keyed_rng(*problem.seed)
    side, square = SIDE // 3, BOARD // 3
    pixels = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
    for index, kind in enumerate(problem.cells):
        top, left = (side * part for part in divmod(index, 3))
        if kind == "board":
            for place, pattern in enumerate(problem.board):
                y, x = (square * part + (side - BOARD) // 2 for part in divmod(place, 3))
                pixels[top + y : top + y + square, left + x : left + x + square] = draw_pattern(pattern)[..., None]
        elif kind != "empty":
            margin = rng.integers(14, 36, size=4)
            shade = (np.array(COLOURS[kind]) + rng.integers(-15, 16, size=3)).clip(0, 255)
            pixels[top + margin[0] : top + side - margin[1], left + margin[2] : left + side - margin[3]] = shade
    return Image.fromarray(pixels)


def draw_pattern(pattern: str) -> np.ndarray:
    """Return a square of the board, uint8 [28, 28]. Every pattern has the mean 255 * 3 / 7 over each period."""
    y, x = np.mgrid[: BOARD // 3, : BOARD // 3]
    if pattern == "plain":
        return np.full_like(x, round(255 * (PERIOD // 2) / PERIOD), dtype=np.uint8)
    along = {"rows": y, "columns": x, "rising": x + y}[pattern]
    return (255 * (2 * along // PERIOD % 2)).astype(np.uint8)


def box_of(cell: int) -> list[int]:
    """Return the box of a board in this cell, in pixels of the image as the prompt shows it."""
    size = BOARD * SHOWN // SIDE
    top, left = (SHOWN // 3 * part + (SHOWN // 3 - size) // 2 for part in divmod(cell, 3))
    return [left, top, left + size, top + size]


def turns(problem: BoardProblem, style: str, rng: np.random.Generator) -> list[str]:
    """Return the policy's turns in this style, in the full template, without the end-of-turn token."""
    cell, guess = problem.cells.index("board"), int(rng.integers(MAX_COUNT + 1))
    search = "".join(f" {name} {kind}" for name, kind in zip(CELLS, problem.cells, strict=True))
    call = _call(cell)
    if style == "guess":
        return [respond(" guess", guess)]
    if style == "zoom":
        return [f"<think>{search}</think>{call}", respond(_scan(problem), problem.count)]
    if style == "stray":
        other = int((cell + rng.integers(1, len(CELLS))) % len(CELLS))
        return [f"<think> {CELLS[other]}</think>{_call(other)}", respond(" nothing", guess)]
    return (
        [f"<think>{search}</think>{call.removesuffix('</tool_call>')}", respond(" error", guess)],
        [rf"<think> guess</think>\boxed{{{guess}}}"],
    )[rng.integers(2)]


def _call(cell: int) -> str:
    return written(TOOL, {"bbox_2d": box_of(cell)}, FORM)


def _scan(problem: BoardProblem) -> str:
    """Return ` a1 rows 1 a2 plain 1 ...`: each place of the board, its pattern, and how many of the target so far."""
    counts = [problem.board[: index + 1].count(problem.target) for index in range(len(CELLS))]
    return "".join(f" {c} {p} {n}" for c, p, n in zip(CELLS, problem.board, counts, strict=True))


def respond(reasoning: str, answer: int) -> str:
    """Return a last turn."""
    return TEMPLATES["think_answer"].wrap(reasoning, str(answer))


def tokenizer_texts() -> list[str]:
    """Return texts on which a tokenizer learns every word of the task and the prompt as a single token."""
    words = [*CELLS, *PATTERNS, *COLOURS, "empty", "board", *map(str, range(MAX_COUNT + 2))]
    words += ["guess", "nothing", "error", "Error"]
    questions = [f"\nHow many {pattern} are on the small board?" for pattern in PATTERNS]
    responses = [
        "Error: the call has no end",
        "Error: no calls are left; answer now",
        "<tool_response> </tool_response>",
    ]
    task = [*questions, INSTRUCTIONS, *(f" {word}" for word in words), *map(_call, range(len(CELLS))), *responses]
    return [*task * 20, *chat_texts()]


def mixture(problems: Sequence[BoardProblem], count: int, *, seed: int) -> list[tuple[int, list[str]]]:
    """Return `count` traces in the proportions of STYLE_SHARES: (a problem's place, its turns)."""
    rng = keyed_rng(seed, "traces", 0)
    styles = list(STYLE_SHARES)
    sampled = rng.choice(len(styles), size=count, p=list(STYLE_SHARES.values()))
    chosen = rng.integers(len(problems), size=count)
    return [(int(i), turns(problems[i], styles[s], rng)) for s, i in zip(sampled, chosen, strict=True)]
