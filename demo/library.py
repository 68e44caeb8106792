"""What the demo can show: the runs under some folders and their stored evaluations.

Opening reads configurations and summaries only; an evaluation's columns are read when it is first
shown, and kept. A run that cannot be read is left out and named in `faults`; the page says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import yaml

from vlm_rl.demo.responses import Responses, read_responses
from vlm_rl.demo.tokens import TokenCounter, find_counter
from vlm_rl.errors import UserError
from vlm_rl.report.run_curves import RunCurves
from vlm_rl.run.directory import EvalResult, RunDirectory, distinct_names
from vlm_rl.templates import TEMPLATES

_DEPTH = 3  # a folder of `vlm-rl compare` holds RULE/seed-N
_ALIVE_SECONDS = 600  # a run that wrote nothing for so long has ended or hangs


Drawn: TypeAlias = tuple[np.ndarray, np.ndarray]  # tokens of some responses, and which were cut


def drawn_of(table: pa.Table) -> Drawn:
    """From the columns length and stop_reason."""
    return table["length"].to_numpy(), table["stop_reason"].to_numpy() == "length"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One evaluated policy."""

    key: str  # RUN@STEP, unique within its benchmark; FOLDER/*@STEP for the seeds of a comparison together
    label: str
    step: int
    runs: tuple[str, ...]  # names; several where seeds are pooled
    results: tuple[EvalResult, ...]  # one per run
    folder: Path  # of the first run
    model: str  # the start's folder, for its tokenizer
    sets: tuple[str, ...]  # the prepared sets that the run evaluates on, for images

    @property
    def counter(self) -> TokenCounter | None:
        """Counts tokens as the model does; None where no tokenizer is at hand."""
        return find_counter(self.folder, self.step, self.model)

    @property
    def prefill(self) -> str:
        """Text at the beginning of every response that was given, not generated."""
        template = TEMPLATES.get(str(self.results[0].summary.get("template", "")))
        return template.prefill if template else ""

    @cached_property
    def responses(self) -> Responses:
        """Its records as columns. Raises UserError where the file cannot be read."""
        try:
            return read_responses(self.results)
        except (OSError, KeyError, pa.ArrowException) as error:
            places = ", ".join(str(one.path) for one in self.results)
            raise UserError(
                f"{places} cannot be read ({type(error).__name__}: {str(error)[:120]}); "
                "delete it, or evaluate again, or choose another checkpoint"
            ) from None


@dataclass(frozen=True, eq=False)
class OpenRun:
    """A run directory under the name that the page gives it."""

    name: str
    directory: RunDirectory
    algorithm: str  # "" for evaluations of a model that was not trained here
    num_steps: int  # planned
    contaminated: tuple[str, ...]
    cache: dict[int, RunCurves] = field(default_factory=dict)  # of the last stamp
    drawn: dict[int, Drawn] = field(default_factory=dict)  # by step; a step's file never changes once it is whole

    @property
    def title(self) -> str:
        """Its name, and by which rule it was trained."""
        return f"{self.name} ({self.algorithm})" if self.algorithm else self.name

    def curves(self) -> RunCurves:
        """Its numbers over time; read again when the run has written more."""
        stamp = self.stamp()
        if stamp not in self.cache:
            fresh = RunCurves(self.directory, self.name)
            self.cache.clear()
            self.cache[stamp] = fresh
        return self.cache[stamp]

    def rollout_lengths(self) -> dict[int, Drawn]:
        """step -> tokens of each training response, and whether it was cut."""
        for step in self.directory.rollout_steps():
            if step not in self.drawn:
                self.drawn[step] = drawn_of(self.directory.rollouts(step, ["length", "stop_reason"]))
        return dict(sorted(self.drawn.items()))

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
        """Raises UserError where a folder holds no run, or none of them an evaluation or a log that can be read."""
        directories = list(dict.fromkeys(path for folder in folders for path in find_runs(folder)))
        names = distinct_names([RunDirectory(path) for path in directories])
        self.faults: list[str] = []
        self.runs: dict[str, OpenRun] = {}
        self.checkpoints: dict[str, dict[str, Checkpoint]] = {}  # benchmark -> key -> checkpoint
        self._is_alone = len(directories) == 1
        for name, path in zip(names, directories, strict=True):
            self._add(name, RunDirectory(path))
        for benchmark, found in self.checkpoints.items():
            self.checkpoints[benchmark] = pooled(found) | found
        if not self.checkpoints and not any(run.algorithm for run in self.runs.values()):
            places = ", ".join(str(path) for path in folders) or "no run at all"
            why = "".join(f"\n  {fault}" for fault in self.faults)
            raise UserError(
                f"nothing to show: no evaluation and no log in {places}; `vlm-rl eval` or eval.every makes one{why}"
            )

    def _add(self, name: str, run: RunDirectory) -> None:
        try:
            config, results = run.config(), run.evals()
            trained = (run.path / "metrics.jsonl").exists()
            algorithm = config.algorithm.name.upper() if trained else ""
            opened = OpenRun(name, run, algorithm, config.train.steps, run.contaminated())
        except (UserError, OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            self.faults.append(f"{name} was left out: {str(error)[:200]}")
            return
        self.runs[name] = opened
        for result in results:
            label, key = self.label(name, result.step), key_of(name, result.step)
            self.checkpoints.setdefault(result.benchmark, {})[key] = Checkpoint(
                key, label, result.step, (name,), (result,), run.path, config.model.path, tuple(config.data.eval)
            )

    @property
    def benchmarks(self) -> list[str]:
        return list(self.checkpoints)

    def label(self, run: str, step: int) -> str:
        """What the page calls a checkpoint, evaluated or not."""
        return f"step {step}" if self._is_alone else f"{run} · step {step}"

    def labels(self, benchmark: str) -> dict[str, str]:
        """key -> label of the checkpoints evaluated on a benchmark, by run and step."""
        return {key: one.label for key, one in self.checkpoints[benchmark].items()}

    def first_choice(self, benchmark: str) -> tuple[str, ...]:
        """The checkpoints to begin with: a run's first and last; of several the first's first, then each one's last.

        Of a comparison the pooled ones. At most four, so that the columns stay wide.
        """
        return self._main(benchmark)[:4]

    def color_order(self, benchmark: str) -> list[str]:
        """All checkpoints, those that people compare first: they get colours that no other wants."""
        if benchmark not in self.checkpoints:
            return []
        return list(dict.fromkeys([*self._main(benchmark), *self.checkpoints[benchmark]]))

    def _main(self, benchmark: str) -> tuple[str, ...]:
        found = self.checkpoints[benchmark]
        several = {key: one for key, one in found.items() if len(one.runs) > 1} or found
        by_run: dict[tuple[str, ...], list[str]] = {}
        for key, one in several.items():
            by_run.setdefault(one.runs, []).append(key)
        first = next(iter(by_run.values()))[0]
        return tuple(dict.fromkeys([first, *(keys[-1] for keys in by_run.values())]))

    def base_keys(self, benchmark: str) -> list[str]:
        """The checkpoints whose pass rate is a problem's difficulty: those before training (step 0).

        Where none is stored, the first run's earliest one.
        """
        single = {key: one for key, one in self.checkpoints[benchmark].items() if len(one.runs) == 1}
        before = [key for key, one in single.items() if one.step == 0]
        return before or [next(iter(single))]


def key_of(run: str, step: int) -> str:
    """What the address calls a checkpoint."""
    return f"{run}@{step}"


def find_runs(folder: Path) -> list[Path]:
    """The run directories at a folder or up to three levels below it; of a comparison its baseline's first.

    Raises UserError if there is none.
    """
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
        rules = _rules(folder)
        children = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
        for child in sorted(children, key=lambda one: (rules.get(one.name, len(rules)), one.name)):
            yield from _runs_below(child, depth - 1)


def _rules(folder: Path) -> dict[str, int]:
    """The place of each rule of a comparison, the baseline's first; empty for another folder."""
    try:
        rules = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["rules"]
        return {str(name): place for place, name in enumerate(rules)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def pooled(found: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """Runs that differ by their seed only, FOLDER/seed-N, taken together: each run's answer is one more sample."""
    groups: dict[tuple[str, int], list[Checkpoint]] = {}
    for one in found.values():
        rule, _, seed = one.runs[0].rpartition("/")
        if rule and seed.startswith("seed-"):
            groups.setdefault((rule, one.step), []).append(one)
    return {
        f"{rule}/*@{step}": replace(
            members[0],
            key=f"{rule}/*@{step}",
            label=f"{rule} · step {step} · {len(members)} seeds",
            runs=tuple(one.runs[0] for one in members),
            results=tuple(one.results[0] for one in members),
        )
        for (rule, step), members in groups.items()
        if len(members) > 1
    }
