"""What the demo can show: the stored evaluations of some runs, by benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlm_rl.cards import Example, side_by_side
from vlm_rl.errors import UserError
from vlm_rl.runs import EvalResult, RunDirectory, distinct_names

KINDS = ("all", "became right", "became wrong", "right before and after", "wrong before and after")
_KIND_OF = {
    (False, True): "became right",
    (True, False): "became wrong",
    (True, True): "right before and after",
    (False, False): "wrong before and after",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One evaluated policy."""

    label: str  # unique within its benchmark
    run: str
    result: EvalResult


class Library:
    """The evaluations of several runs, opened once; records are read when they are asked for."""

    def __init__(self, runs: Sequence[Path]) -> None:
        """Raises UserError where a path is no run, or none of them holds an evaluation."""
        opened = [RunDirectory(path).open() for path in runs]
        names = distinct_names(opened)
        self.runs = list(zip(names, opened, strict=True))
        self.checkpoints: dict[str, list[Checkpoint]] = {}
        for name, run in self.runs:
            for result in run.evals():
                label = f"step {result.step}" if len(opened) == 1 else f"{name} · step {result.step}"
                self.checkpoints.setdefault(result.benchmark, []).append(Checkpoint(label, name, result))
        if not self.checkpoints:
            places = ", ".join(str(path) for path in runs) or "no run at all"
            raise UserError(f"nothing to show: no evaluation in {places}; `vlm-rl eval` or eval.every makes one")
        self._examples: dict[tuple[str, tuple[str, ...]], list[Example]] = {}

    def labels(self, benchmark: str) -> list[str]:
        """The checkpoints evaluated on a benchmark, by run and step."""
        return [checkpoint.label for checkpoint in self.checkpoints[benchmark]]

    def first_choice(self, benchmark: str) -> list[str]:
        """Two checkpoints to begin with: the first, and the last."""
        labels = self.labels(benchmark)
        return labels if len(labels) < 2 else [labels[0], labels[-1]]

    def examples(self, benchmark: str, labels: Sequence[str], kind: str = "all") -> list[Example]:
        """The problems that these checkpoints share, of one kind (from the first to the last checkpoint)."""
        key = (benchmark, tuple(labels))
        if key not in self._examples:
            if len(self._examples) >= 16:  # images are kept in memory
                self._examples.pop(next(iter(self._examples)))
            self._examples[key] = side_by_side([self._find(benchmark, label).result for label in labels])
        found = self._examples[key]
        return found if kind == "all" else [example for example in found if kind_of(example) == kind]

    def lengths(self, benchmark: str, label: str) -> np.ndarray:
        """Every stored response's tokens, ascending, int64."""
        return np.sort(self._find(benchmark, label).result.rows(["length"])["length"].to_numpy().astype(np.int64))

    def _find(self, benchmark: str, label: str) -> Checkpoint:
        return next(one for one in self.checkpoints[benchmark] if one.label == label)


def kind_of(example: Example) -> str:
    """How the verdict moved from the first to the last sample."""
    return _KIND_OF[example.samples[0].correct, example.samples[-1].correct]
