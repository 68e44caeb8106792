"""A visual counting task that a tiny model learns on a CPU, written in ViRL39K's own layout.

    write_toy(Path("out/toy"), seed=0)

An 84 x 84 image of 3 x 3 cells, a coloured square in each; "Count the red squares." Each cell is one
merged visual token of Qwen2.5-VL, and the careful answer names the cells one by one with a running
count, so length and correctness are tied and reinforcement has something to find.

    out/toy/train/39Krelease.parquet + images/      problems for reinforcement
    out/toy/heldout/...                             problems never trained on
    out/toy/warm/... + traces.jsonl                 problems with reasoning traces for the warm start
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from PIL import Image

from vlm_rl.data.images import encode_png
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 45, 45),
    "blue": (45, 85, 215),
    "green": (45, 165, 75),
    "yellow": (225, 200, 50),
}
CELLS = ("a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2", "c3")  # row by row
CELL_SIDE = 28  # pixels: one merged visual token
MAX_COUNT = 8  # counts are uniform on 0..8, so a constant guess is right in one case of nine
PHRASINGS = (
    "Count the {} squares.",
    "How many {} squares are there?",
    "Find the number of {} squares.",
)

Style = Literal["guess", "partial", "full", "check", "broken"]
MIXTURE: dict[Style, float] = {"guess": 0.62, "partial": 0.1, "full": 0.1, "check": 0.1, "broken": 0.08}
"""The warm start's second phase: mostly guesses, with every careful style in reach."""

FORCED_SCAN = "<think> a1"
"""The first words of every scan. Given as the start of a response they force the careful style: the
accuracy that this gives before any reinforcement is what the model can see already."""


class Question(Protocol):
    """What the files of a split need to know of a problem."""

    @property
    def id(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def count(self) -> int: ...


P = TypeVar("P", bound=Question)


@dataclass(frozen=True, slots=True)
class ToyProblem:
    """One picture and its question, before it is drawn."""

    id: str
    cells: tuple[str, ...]  # nine colour names, row by row
    target: str  # the colour asked for
    question: str

    @property
    def count(self) -> int:
        return self.cells.count(self.target)


def make_problems(count: int, *, seed: int, split: str) -> list[ToyProblem]:
    """`count` problems, a function of (seed, split), with counts uniform on 0..8.

    An arrangement belongs either to the split "heldout" or to all others, by its hash: whatever the
    seeds and sizes, nothing held out is ever trained on.
    """
    return [
        _draw_problem(keyed_rng(seed, split, index), problem_id=f"Toy-{split}-{index}", held_out=split == "heldout")
        for index in range(count)
    ]


def is_held_out(cells: Sequence[str], target: str) -> bool:
    """Whether this arrangement is in the quarter that only the held-out split may show."""
    return hashlib.blake2b(" ".join([target, *cells]).encode(), digest_size=1).digest()[0] % 4 == 0


def render(problem: ToyProblem, *, seed: int) -> Image.Image:
    """Draw the 84 x 84 RGB picture: per square a margin of 2-5 px on each side and a jitter of +-15 in colour."""
    rng = keyed_rng(seed, problem.id, 0)
    pixels = np.full((3 * CELL_SIDE, 3 * CELL_SIDE, 3), 255, dtype=np.uint8)
    for index, colour in enumerate(problem.cells):
        top, left = (CELL_SIDE * part for part in divmod(index, 3))
        up, down, before, after = rng.integers(2, 6, size=4)
        shade = np.array(COLOURS[colour]) + rng.integers(-15, 16, size=3)
        pixels[top + up : top + CELL_SIDE - down, left + before : left + CELL_SIDE - after] = shade
    return Image.fromarray(pixels)


def trace(problem: ToyProblem, style: Style, rng: np.random.Generator) -> str:
    """A response in the full template, without the end-of-sequence token.

    guess: one word of reasoning and a uniform guess; partial: a scan that stops early and guesses the rest;
    full: all nine cells; check: a second pass over them; broken: a scan or a guess in a wrong format.
    """
    if style == "guess":
        return _wrap(" guess", _guess(rng))
    if style == "partial":
        cells = int(rng.integers(3, 7))
        seen = problem.cells[:cells].count(problem.target)
        rest = int(rng.integers(0, min(MAX_COUNT - seen, len(CELLS) - cells) + 1))
        return _wrap(_scan(problem, cells), seen + rest)
    if style == "full":
        return _wrap(_scan(problem), problem.count)
    if style == "check":
        return _wrap(f"{_scan(problem)} check{_scan(problem)}", problem.count)
    return _broken(problem, rng)


def tokenizer_texts(*, repeats: int = 20) -> list[str]:
    """Texts on which a tokenizer learns every word of the task and of the prompt as one token.

    The task's words are repeated, so that they come first where the vocabulary is too small for all.
    """
    questions = [phrasing.format(colour) for phrasing in PHRASINGS for colour in COLOURS]
    scan_words = [*CELLS, *COLOURS, *map(str, range(MAX_COUNT + 2)), "check", "guess"]
    task = [*questions, *(f" {word}" for word in scan_words)]
    chat = ["system", "user", "assistant", "You are a helpful assistant."]
    return [*task * repeats, *chat, *(template.system for template in TEMPLATES.values())]


def write_toy(
    out: Path, *, seed: int, train: int = 2048, heldout: int = 256, warm: int = 4096, mixture: int = 2560
) -> Path:
    """Write the three splits and the traces below `out`, which must not exist yet."""
    counts = {"train": train, "heldout": heldout, "warm": warm}
    splits = {split: make_problems(count, seed=seed, split=split) for split, count in counts.items()}
    lines = trace_lines(splits["warm"], trace, MIXTURE, clean="full", seed=seed, mixture=mixture)
    return write_splits(out, splits, lines, render, seed=seed)


def write_splits(
    out: Path,
    splits: Mapping[str, Sequence[P]],
    lines: Sequence[Mapping[str, str]],
    draw: Callable[..., Image.Image],
    *,
    seed: int,
) -> Path:
    """Write each split in ViRL39K's layout, and `lines` as warm/traces.jsonl; whole or not at all."""
    out = Path(out)
    if out.exists():
        raise UserError(f"{out}: already exists; choose another folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        work = Path(name) / "toy"
        for split, problems in splits.items():
            _write_split(work / split, problems, draw, seed=seed)
        text = "\n".join(json.dumps(line) for line in lines) + "\n"
        (work / "warm" / "traces.jsonl").write_text(text, encoding="utf-8")
        work.rename(out)
    return out


def trace_lines(
    problems: Sequence[P],
    write: Callable[[P, Any, np.random.Generator], str],
    styles: Mapping[Any, float],
    *,
    clean: str,
    seed: int,
    mixture: int,
) -> list[dict[str, str]]:
    """The rows of traces.jsonl, {"id", "phase", "style", "response"}.

    Phase "clean": one trace of the style `clean` for each problem. Phase "mixture": `mixture` traces of
    problems drawn at random, their styles in the proportions of `styles`.
    """
    rng = keyed_rng(seed, "traces", 0)
    lines = [{"id": p.id, "phase": "clean", "style": clean, "response": write(p, clean, rng)} for p in problems]
    drawn = rng.choice(len(styles), size=mixture, p=list(styles.values()))
    chosen = rng.integers(0, len(problems), size=mixture)
    names = list(styles)
    for style, index in zip(drawn, chosen, strict=True):
        problem, name = problems[index], names[style]
        text = write(problem, name, rng)
        lines.append({"id": problem.id, "phase": "mixture", "style": name, "response": text})
    return lines


def _draw_problem(rng: np.random.Generator, *, problem_id: str, held_out: bool) -> ToyProblem:
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
            return ToyProblem(problem_id, tuple(cells), target, f"<image>\n{phrasing.format(target)}")


def _scan(problem: ToyProblem, cells: int = len(CELLS)) -> str:
    """` a1 red 1 a2 blue 1 ...`: each cell, its colour, and how many of the target colour so far."""
    parts = []
    for index in range(cells):
        running = problem.cells[: index + 1].count(problem.target)
        parts.append(f" {CELLS[index]} {problem.cells[index]} {running}")
    return "".join(parts)


def _wrap(reasoning: str, answer: int) -> str:
    return TEMPLATES["think_answer"].wrap(reasoning, str(answer))


def _guess(rng: np.random.Generator) -> int:
    return int(rng.integers(MAX_COUNT + 1))


def _broken(problem: ToyProblem, rng: np.random.Generator) -> str:
    """One of four ways to miss the format, the first two after an honest scan."""
    scan, count, guess = _scan(problem), problem.count, _guess(rng)
    return (
        rf"<think>{scan}</think>\boxed{{{count}}}",  # no <answer>
        f"<think>{scan}</think><answer>{count}</answer>",  # no box
        rf"<answer>\boxed{{{guess}}}</answer>",  # no reasoning block
        rf"<think>\boxed{{{guess}}}",  # a block that never closes
    )[rng.integers(4)]


def _write_split(folder: Path, problems: Sequence[Question], draw: Callable[..., Image.Image], *, seed: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "images").mkdir(parents=True)
    rows = []
    for problem in problems:
        name = f"images/{problem.id}-0.png"
        (folder / name).write_bytes(encode_png(draw(problem, seed=seed)))
        rows.append(
            {
                "question": problem.question,
                "answer": rf"\boxed{{{problem.count}}}",
                "PassRate_32BTrained": -1.0,  # not measured
                "PassRate_7BBase": -1.0,
                "category": "Spatial Reasoning",
                "source": "Toy",
                "qid": problem.id,
                "image": [name],
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), folder / "39Krelease.parquet")


def keyed_rng(seed: int, *key: str | int) -> np.random.Generator:
    """A generator of its own for every (seed, key): splits cannot share noise."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
