"""What the demo can show: the runs under some folders and their stored evaluations.

Opening reads configurations and summaries only; an evaluation's columns are read when it is first
shown, and kept. A run that cannot be read is left out and named in `faults`; the page says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import yaml

from demo.responses import Responses, read_responses
from demo.tokens import TokenCounter, find_counter
from vlm_rl.curves import RunCurves
from vlm_rl.errors import UserError
from vlm_rl.runs import EvalResult, RunDirectory, distinct_names
from vlm_rl.templates import TEMPLATES

_DEPTH = 3  # a folder of `vlm-rl compare` holds RULE/seed-N
_ALIVE_SECONDS = 600  # a run that wrote nothing for so long has ended or hangs


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One evaluated policy."""

    key: str  # RUN@STEP, unique within its benchmark
    label: str
    run: str
    result: EvalResult
    folder: Path  # of the run
    model: str  # the start's folder, for its tokenizer
    sets: tuple[str, ...]  # the prepared sets that the run evaluates on, for images

    @property
    def counter(self) -> TokenCounter | None:
        """Counts tokens as the model does; None where no tokenizer is at hand."""
        return find_counter(self.folder, self.result.step, self.model)

    @property
    def prefill(self) -> str:
        """Text at the beginning of every response that was given, not generated."""
        template = TEMPLATES.get(str(self.result.summary.get("template", "")))
        return template.prefill if template else ""

    @cached_property
    def responses(self) -> Responses:
        """Its records as columns. Raises UserError where the file cannot be read."""
        try:
            return read_responses(self.result)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise UserError(
                f"{self.result.path} cannot be read ({type(error).__name__}: {str(error)[:120]}); "
                "delete it, or evaluate again"
            ) from None


@dataclass(frozen=True, eq=False)
class OpenRun:
    """A run directory under the name that the page gives it."""

    name: str
    directory: RunDirectory
    algorithm: str
    num_steps: int  # planned
    contaminated: tuple[str, ...]
    cache: dict[str, RunCurves] = field(default_factory=dict)

    def curves(self) -> RunCurves:
        """Its numbers over time; read again when the run has written more."""
        stamp = str(self.stamp())
        if stamp not in self.cache:
            fresh = RunCurves(self.directory, self.name)
            self.cache.clear()
            self.cache[stamp] = fresh
        return self.cache[stamp]

    def stamp(self) -> int:
        """Changes with every line that the run logs, nanoseconds."""
        path = self.directory.path / "metrics.jsonl"
        return path.stat().st_mtime_ns if path.exists() else 0

    def alive(self) -> bool:
        """Whether it may still be training: it wrote lately, and its last step is not done."""
        if time.time() - self.stamp() / 1e9 > _ALIVE_SECONDS:
            return False
        metrics = self.curves().metrics
        return not metrics or metrics[-1]["step"] < self.num_steps


class Library:
    """The runs under some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises UserError where a folder holds no run, or none of them an evaluation that can be read."""
        directories = list(dict.fromkeys(path for folder in folders for path in find_runs(folder)))
        names = distinct_names([RunDirectory(path) for path in directories])
        self.faults: list[str] = []
        self.runs: dict[str, OpenRun] = {}
        self.checkpoints: dict[str, dict[str, Checkpoint]] = {}  # benchmark -> key -> checkpoint
        for name, path in zip(names, directories, strict=True):
            self._add(name, RunDirectory(path), alone=len(directories) == 1)
        if not self.checkpoints:
            places = ", ".join(str(path) for path in folders) or "no run at all"
            why = "".join(f"\n  {fault}" for fault in self.faults)
            raise UserError(f"nothing to show: no evaluation in {places}; `vlm-rl eval` or eval.every makes one{why}")

    def _add(self, name: str, run: RunDirectory, *, alone: bool) -> None:
        try:
            config, results = run.config(), run.evals()
            opened = OpenRun(name, run, config.algorithm.name.upper(), config.train.steps, run.contaminated())
        except (UserError, OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            self.faults.append(f"{name} was left out: {str(error)[:200]}")
            return
        self.runs[name] = opened
        for result in results:
            label = f"step {result.step}" if alone else f"{name} · step {result.step}"
            key = f"{name}@{result.step}"
            self.checkpoints.setdefault(result.benchmark, {})[key] = Checkpoint(
                key, label, name, result, run.path, config.model.path, tuple(config.data.eval)
            )

    @property
    def benchmarks(self) -> list[str]:
        return list(self.checkpoints)

    def labels(self, benchmark: str) -> dict[str, str]:
        """key -> label of the checkpoints evaluated on a benchmark, by run and step."""
        return {key: one.label for key, one in self.checkpoints[benchmark].items()}

    def first_choice(self, benchmark: str) -> tuple[str, ...]:
        """The checkpoints to begin with: of one run its first and last; of several the first's first, and the last of each.

        At most four, so that the columns stay wide.
        """
        by_run: dict[str, list[str]] = {}
        for key, one in self.checkpoints[benchmark].items():
            by_run.setdefault(one.run, []).append(key)
        first = next(iter(by_run.values()))[0]
        last = [keys[-1] for keys in _spread(by_run)]
        return tuple(dict.fromkeys([first, *last]))[:4]

    def base_keys(self, benchmark: str) -> list[str]:
        """The checkpoints whose pass rate is a problem's difficulty: those before training (step 0).

        Where none is stored, the first run's earliest one.
        """
        found = self.checkpoints[benchmark]
        before = [key for key, one in found.items() if one.result.step == 0]
        return before or [next(iter(found))]


def find_runs(folder: Path) -> list[Path]:
    """The run directories at a folder or up to three levels below it. Raises UserError if there is none."""
    if not folder.is_dir():
        raise UserError(f"no run directory at {folder}; `vlm-rl train` or `vlm-rl quickstart` makes one")
    found = list(_runs_below(folder, _DEPTH))
    if not found:
        raise UserError(f"{folder} is not a run directory, and holds none: there is no config.yaml")
    return found


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "config.yaml").is_file():
        yield folder
    elif depth:
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _runs_below(child, depth - 1)


def _spread(by_run: dict[str, list[str]]) -> list[list[str]]:
    """One run of each parent folder first (of a comparison: one seed of each rule), then the others."""
    seen: set[str] = set()
    first, rest = [], []
    for name, keys in by_run.items():
        parent = name.rpartition("/")[0]
        (rest if parent and parent in seen else first).append(keys)
        seen.add(parent)
    return first + rest
