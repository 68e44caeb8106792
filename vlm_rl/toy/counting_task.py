"""What the two visual counting tasks share: their interface, and the files they are written to.

A tiny model learns such a task on a CPU. Each cell of an image is a merged visual token of Qwen2.5-VL, and a
careful response names the cells with a running count, so that length and correctness depend on each other and
reinforcement has something to find.

    SQUARES.write(Path("out"), seed=0, train=512, heldout=256, warm=1024, mixture=2800)

    out/train/39Krelease.parquet + images/      problems for reinforcement, in ViRL39K's layout
    out/heldout/...                             problems never trained on
    out/warm/... + traces.jsonl                 problems with reasoning traces for the warm start
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
from PIL import Image

from vlm_rl.data.images import encode_png
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.virl_layout import write_virl

CELL_SIDE = 28  # pixels: one merged visual token
MAX_COUNT = 8  # counts are uniform on 0..8, so a constant guess is right in one case of nine


class CountingProblem(Protocol):
    """An image and its question, before the image is drawn."""

    @property
    def id(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def count(self) -> int:
        """Return the right answer."""
        ...


P = TypeVar("P", bound=CountingProblem)


class CountingTask(ABC, Generic[P]):
    """A counting task: its problems, images, traces and words."""

    style_shares: ClassVar[Mapping[str, float]]
    """Share of each style of trace in the warm start's mixture."""
    clean_style: ClassVar[str]
    """The style that shows every warm problem's right answer once."""

    @abstractmethod
    def make_problems(self, count: int, *, seed: int, split: str) -> list[P]:
        """Return `count` problems, a function of (seed, split).

        What the split "heldout" shows is in no other split, whatever the seeds and sizes.
        """

    @abstractmethod
    def draw(self, problem: P, *, seed: int) -> Image.Image:
        """Return the RGB image of a problem, CELL_SIDE pixels for each side of a cell."""

    @abstractmethod
    def trace(self, problem: P, style: str, rng: np.random.Generator) -> str:
        """Return a response of this style in the full template, without the end-of-sequence token."""

    @abstractmethod
    def tokenizer_texts(self) -> list[str]:
        """Return texts on which a tokenizer learns every word of the task and the prompt as a single token."""

    def traces(self, problems: Sequence[P], *, seed: int, mixture: int) -> list[dict[str, str]]:
        """Return the rows of traces.jsonl, {"id", "phase", "style", "response"}.

        Phase "clean" has a trace of `clean_style` for each problem. Phase "mixture" has `mixture` traces of
        problems chosen at random, their styles in the proportions of `style_shares`.
        """
        rng = keyed_rng(seed, "traces", 0)

        def row(phase: str, style: str, problem: P) -> dict[str, str]:
            response = self.trace(problem, style, rng)
            return {"id": problem.id, "phase": phase, "style": style, "response": response}

        clean = [row("clean", self.clean_style, problem) for problem in problems]
        styles = list(self.style_shares)
        sampled = rng.choice(len(styles), size=mixture, p=list(self.style_shares.values()))
        chosen = rng.integers(0, len(problems), size=mixture)
        return clean + [
            row("mixture", styles[style], problems[index]) for style, index in zip(sampled, chosen, strict=True)
        ]

    def write(self, out: Path, *, seed: int, train: int, heldout: int, warm: int, mixture: int) -> Path:
        """Write the three splits and the traces below the new folder `out`, whole or not at all; returns it.

        Args:
            out: a folder that does not exist yet; UserError otherwise.
            seed: of problems, images and traces.
            train, heldout, warm: problems of each split.
            mixture: traces of the warm start's second phase.
        """
        out = Path(out)
        if out.exists():
            raise UserError(f"{out}: already exists; choose a different folder or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
            work = Path(name) / "task"
            for split, count in {"train": train, "heldout": heldout, "warm": warm}.items():
                problems = self.make_problems(count, seed=seed, split=split)
                self._write_split(work / split, problems, seed=seed)
                if split == "warm":
                    rows = self.traces(problems, seed=seed, mixture=mixture)
                    text = "".join(json.dumps(row) + "\n" for row in rows)
                    (work / split / "traces.jsonl").write_text(text, encoding="utf-8")
            work.rename(out)
        return out

    def _write_split(self, folder: Path, problems: Sequence[P], *, seed: int) -> None:
        images = {f"{problem.id}-0.png": encode_png(self.draw(problem, seed=seed)) for problem in problems}
        rows = [
            {
                "question": problem.question,
                "answer": rf"\boxed{{{problem.count}}}",
                "PassRate_32BTrained": -1.0,  # not measured
                "source": "Toy",
                "qid": problem.id,
                "image": [f"images/{name}"],
            }
            for problem, name in zip(problems, images, strict=True)
        ]
        write_virl(folder, rows, images)


def draw_cells(colours: Sequence[np.ndarray], *, jitter: int, rng: np.random.Generator) -> Image.Image:
    """Draw a square array of cells on white.

    Each square has margins of 2 to 5 px, and its colour varies by up to `jitter` in each channel.
    """
    side = round(len(colours) ** 0.5)
    pixels = np.full((side * CELL_SIDE, side * CELL_SIDE, 3), 255, dtype=np.uint8)
    for index, colour in enumerate(colours):
        top, left = (CELL_SIDE * part for part in divmod(index, side))
        up, down, before, after = rng.integers(2, 6, size=4)
        shade = (colour + rng.integers(-jitter, jitter + 1, size=3)).clip(0, 255)
        pixels[top + up : top + CELL_SIDE - down, left + before : left + CELL_SIDE - after] = shade
    return Image.fromarray(pixels)


def respond(reasoning: str, answer: int | str) -> str:
    """Return a response in the full template."""
    return TEMPLATES["think_answer"].wrap(reasoning, str(answer))


def chat_texts() -> list[str]:
    """Return the words that the chat template and the system prompts add to every task's.

    No toy task asks for a program, and more words would change the vocabulary of every toy model.
    """
    roles = ["system", "user", "assistant", "You are a helpful assistant."]
    return [*roles, *(template.system for template in TEMPLATES.values() if not template.has_program)]


def keyed_rng(seed: int, *key: str | int) -> np.random.Generator:
    """Return a generator of its own for every (seed, key): splits cannot share noise."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
