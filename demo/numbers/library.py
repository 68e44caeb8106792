"""Find what the demo can show: the runs under some folders and their stored evaluations.

Opening reads configurations and summaries only. An evaluation's columns are read when it is first shown, and kept. A
run that cannot be read is left out and named in `faults`; the page says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from vlm_rl.demo.numbers.responses import Responses, read_responses
from vlm_rl.demo.numbers.token_counts import TokenCounter, find_counter
from vlm_rl.errors import UserError
from vlm_rl.report.run_curves import RunCurves, holds_training
from vlm_rl.run.best import best_of
from vlm_rl.run.directory import EvalResult, RunDirectory, distinct_names
from vlm_rl.run.lock import OLD_SECONDS, lease_of
from vlm_rl.untrusted.json_object import read_object
from vlm_rl.untrusted.plain_files import check_plain_tree

_FIRST = 4  # checkpoints at most that the page begins with
_DEPTH = 3  # levels below a folder; one of `vlm-rl study` holds RULE/seed-N

ResponseLengths: TypeAlias = tuple[np.ndarray, np.ndarray]  # tokens of some responses, and which were cut


def response_lengths(table: pa.Table) -> ResponseLengths:
    """Return the lengths in a table with the columns length and stop_reason."""
    return table["length"].to_numpy(), table["stop_reason"].to_numpy() == "length"


@dataclass(frozen=True, eq=False)
class EvaluatedCheckpoint:
    """One evaluated policy."""

    key: str  # RUN@STEP, unique within its benchmark; FOLDER/*@STEP for the seeds of a study together
    label: str
    step: int
    runs: tuple[str, ...]  # names; several where seeds are pooled
    results: tuple[EvalResult, ...]  # one per run
    folder: Path  # of the first run
    model: str  # the start's folder, for its tokenizer
    sets: tuple[str, ...]  # the prepared sets that the run evaluates on, for images

    @property
    def accuracy(self) -> float:
        """Return the accuracy that its summaries say, the mean of several runs; NaN where one does not say it."""
        try:
            return sum(result.accuracy for result in self.results) / len(self.results)
        except UserError:
            return math.nan

    @property
    def counter(self) -> TokenCounter | None:
        """Return the counter of the model's tokens; None if no tokenizer is at hand."""
        return find_counter(self.folder, self.step, self.model)

    @property
    def prefill(self) -> str:
        """Return the text at the beginning of every response that was given, not generated."""
        template = self.results[0].template
        return template.prefill if template else ""

    @cached_property
    def responses(self) -> Responses:
        """Read its records as columns. Raises UserError if the file cannot be read."""
        try:
            return read_responses(self.results)
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
            files = ", ".join(str(result.path) for result in self.results)
            raise UserError(
                f"{files} cannot be read ({type(error).__name__}: {str(error)[:120]}); "
                "delete it, evaluate again, or choose a different checkpoint"
            ) from None

    @cached_property
    def fault(self) -> str:
        """Say why its records cannot be read, which it tries; empty if they can."""
        try:
            _ = self.responses
        except UserError as error:
            return f"{self.label} was left out: {error}"
        return ""


@dataclass(frozen=True, eq=False)
class OpenRun:
    """A run directory under the name that the page gives it."""

    name: str
    directory: RunDirectory
    algorithm: str  # "" for evaluations of a model that was not trained here
    num_steps: int  # planned
    contaminated: tuple[str, ...]
    _curves: dict[int, RunCurves] = field(default_factory=dict)  # of the last stamp
    _renewed: dict[bytes, float] = field(default_factory=dict)  # the last lease, and when it was first seen
    _best: dict[str, str] = field(default_factory=dict)  # by benchmark
    _lengths: dict[int, ResponseLengths] = field(default_factory=dict)  # by step, whose file never changes

    @property
    def title(self) -> str:
        """Return its name, and the rule that it was trained by."""
        return f"{self.name} ({self.algorithm})" if self.algorithm else self.name

    def curves(self) -> RunCurves:
        """Return its numbers over time; they are read again when the run has written more."""
        stamp = self.stamp()
        if stamp not in self._curves:
            fresh = RunCurves(self.directory, self.name)
            self._curves.clear()
            self._curves[stamp] = fresh
        return self._curves[stamp]

    def rollout_lengths(self) -> dict[int, ResponseLengths]:
        """Return the tokens of each training response, and whether it was cut, by step."""
        for step in self.directory.rollout_steps():
            if step not in self._lengths:
                self._lengths[step] = response_lengths(self.directory.rollouts(step, ["length", "stop_reason"]))
        return dict(sorted(self._lengths.items()))

    def best(self, benchmark: str) -> str:
        """Say which step is the best on a benchmark and how much lower the last one is; empty if that is the best.

        Raises UserError, KeyError, OSError or ArrowException for an evaluation that cannot be read.
        """
        if benchmark not in self._best:
            best = best_of(self.directory.evals(benchmark), dict(self.directory.checkpoints()))
            self._best[benchmark] = best.sentence() if best is not None and best.last is not None else ""
        return self._best[benchmark]

    def stamp(self) -> int:
        """Return a number that changes with every line that the run logs (nanoseconds)."""
        path = self.directory.path / "metrics.jsonl"
        return path.stat().st_mtime_ns if path.exists() else 0

    def is_alive(self) -> bool:
        """Say whether it is training: its last step is not done, and its trainer renews the lease of the folder.

        The file's time counts at the first look only, since another machine's clock may differ: a trainer there is
        noticed at the second.
        """
        lease, now = lease_of(self.directory.path), time.monotonic()
        if lease not in self._renewed:
            is_first = not self._renewed
            is_recent = abs(time.time() - self.stamp() / 1e9) < OLD_SECONDS
            self._renewed.clear()
            self._renewed[lease] = now if is_recent or not is_first else -math.inf
        if not lease or now - self._renewed[lease] > OLD_SECONDS:
            return False
        metrics = self.curves().metrics
        return not metrics or metrics[-1]["step"] < self.num_steps


class Library:
    """The runs under some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raise UserError if a folder holds no run, or no run has an evaluation or a log that can be read."""
        directories = list(dict.fromkeys(path for folder in folders for path in find_runs(folder)))
        names = distinct_names([RunDirectory(path) for path in directories])
        self.faults: list[str] = []
        self.runs: dict[str, OpenRun] = {}
        self.checkpoints: dict[str, dict[str, EvaluatedCheckpoint]] = {}  # benchmark -> key -> checkpoint
        self._is_alone = len(directories) == 1
        for name, path in zip(names, directories, strict=True):
            self._add(name, RunDirectory(path))
        for benchmark, single in self.checkpoints.items():
            self.checkpoints[benchmark] = pool_seeds(single) | single
        if not self.checkpoints and not any(run.algorithm for run in self.runs.values()):
            named = ", ".join(str(path) for path in folders) or "no run at all"
            why = "".join(f"\n  {fault}" for fault in self.faults)
            raise UserError(
                f"nothing to show: no evaluation and no log in {named}; `vlm-rl eval` or eval.every makes one{why}"
            )

    def _add(self, name: str, run: RunDirectory) -> None:
        try:
            check_plain_tree(run.path)
            _check_names(run.path)
            config, results = run.config(), run.evals()
            for result in results:
                if not isinstance(result.summary, dict):
                    raise UserError(f"{result.path.with_suffix('.json')} holds no JSON object: evaluate again")
            algorithm = config.algorithm.name.upper() if holds_training(run) else ""
            opened = OpenRun(name, run, algorithm, config.train.steps, run.contaminated())
        except Exception as error:  # a run that somebody sent must not end the page of all others, whatever it holds
            self.faults.append(_sendable(f"{name} was left out: {str(error)[:200]}"))
            return
        self.runs[name] = opened
        for result in results:
            label, key = self.label(name, result.step), key_of(name, result.step)
            self.checkpoints.setdefault(result.benchmark, {})[key] = EvaluatedCheckpoint(
                key, label, result.step, (name,), (result,), run.path, config.model.path, tuple(config.data.eval)
            )

    @property
    def benchmarks(self) -> list[str]:
        """Return the names of the evaluated sets."""
        return list(self.checkpoints)

    def label(self, run: str, step: int) -> str:
        """Return a checkpoint's name on the page, evaluated or not."""
        return f"step {step}" if self._is_alone else f"{run} · step {step}"

    def labels(self, benchmark: str) -> dict[str, str]:
        """Return the label of each checkpoint evaluated on a benchmark, by its key; the best of a run is named so."""
        best = set(self.best(benchmark).values())
        return {
            key: f"{checkpoint.label} · best" if key in best else checkpoint.label
            for key, checkpoint in self.checkpoints[benchmark].items()
        }

    def best(self, benchmark: str) -> dict[tuple[str, ...], str]:
        """Return the key of the best checkpoint of each run, or pool of seeds, that has several.

        It has the highest accuracy on this very benchmark, which flatters it; of equals it is the earliest.
        """
        by_runs: dict[tuple[str, ...], list[EvaluatedCheckpoint]] = {}
        for checkpoint in self.checkpoints[benchmark].values():
            if not math.isnan(checkpoint.accuracy):
                by_runs.setdefault(checkpoint.runs, []).append(checkpoint)
        return {
            runs: max(several, key=lambda one: (one.accuracy, -one.step)).key
            for runs, several in by_runs.items()
            if len(several) > 1
        }

    def first_benchmark(self) -> str:
        """Return the first benchmark of which an evaluation can be read; where none can, the first."""
        names = (name for name, known in self.checkpoints.items() if any(not one.fault for one in known.values()))
        return next(names, self.benchmarks[0])

    def opening(self, benchmark: str) -> tuple[tuple[str, ...], list[str]]:
        """Return the checkpoints to begin with, and why others are not among them that cannot be read.

        Where none can be read, the choice is the one without a look into the files.
        """
        known, faults = self.checkpoints[benchmark], dict[str, str]()
        while len(faults) < len(known):
            chosen = self.first_choice(benchmark, without=faults)
            broken = {key: known[key].fault for key in chosen if known[key].fault}
            if not broken:
                return chosen, list(dict.fromkeys(faults.values()))
            faults |= broken
        return self.first_choice(benchmark), []

    def first_choice(self, benchmark: str, *, without: Container[str] = ()) -> tuple[str, ...]:
        """Return the checkpoints to begin with: the first run's first, then each run's best and last.

        Of a study the pooled seeds are taken. At most four, so that the columns stay wide; where there are more, the
        best ones are left out. `without` are keys that are not to be taken; there must be others.
        """
        main = self._main(benchmark, without)
        known = self.checkpoints[benchmark]
        chosen = [main[0]]
        for last in main[1:]:
            best = self.best(benchmark).get(known[last].runs, last)
            best = last if best in without else best
            chosen += [best, last] if known[best].step else [last]  # step 0 is the model that training began with
        with_best = tuple(dict.fromkeys(chosen))
        return with_best if len(with_best) <= _FIRST else main[:_FIRST]

    def color_order(self, benchmark: str) -> list[str]:
        """Return all checkpoints; those that people compare come first and get colours that no other wants."""
        if benchmark not in self.checkpoints:
            return []
        main, best = self._main(benchmark), self.best(benchmark).values()
        return list(dict.fromkeys([*main, *best, *self.checkpoints[benchmark]]))

    def _main(self, benchmark: str, without: Container[str] = ()) -> tuple[str, ...]:
        known = {key: one for key, one in self.checkpoints[benchmark].items() if key not in without}
        several = {key: checkpoint for key, checkpoint in known.items() if len(checkpoint.runs) > 1} or known
        by_run: dict[tuple[str, ...], list[str]] = {}
        for key, checkpoint in several.items():
            by_run.setdefault(checkpoint.runs, []).append(key)
        first = next(iter(by_run.values()))[0]
        return tuple(dict.fromkeys([first, *(keys[-1] for keys in by_run.values())]))

    def base_keys(self, benchmark: str) -> list[str]:
        """Return the checkpoints whose pass rate is a problem's difficulty: those before training (step 0).

        Where none is stored, it is the first run's earliest one.
        """
        single = {key: known for key, known in self.checkpoints[benchmark].items() if len(known.runs) == 1}
        before = [key for key, known in single.items() if known.step == 0]
        return before or [next(iter(single))]


def _check_names(run: Path) -> None:
    """Raise UserError if the folder of a run, or of an evaluated set in it, has a name that no page can hold."""
    for name in (run.resolve(), *run.glob("eval/*")):
        if _sendable(str(name)) != str(name):
            raise UserError(f"{str(name)!r} is not UTF-8: rename it")


def _sendable(text: str) -> str:
    """Return a text that UTF-8 can hold: a name on disk may be any bytes."""
    return text.encode(errors="backslashreplace").decode()


def key_of(run: str, step: int) -> str:
    """Return a checkpoint's name in the address."""
    return f"{run}@{step}"


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories at a folder or up to three levels below it; of a study the baseline's first.

    Raises UserError if there is none.
    """
    if not folder.is_dir():
        raise UserError(f"no run directory at {folder}; `vlm-rl train` or `vlm-rl quickstart` makes one")
    runs = list(_runs_below(folder, _DEPTH))
    if not runs:
        raise UserError(f"{folder} is not a run directory, and holds none: there is no config.yaml")
    return runs


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "config.yaml").exists():
        yield folder
    elif depth:
        rules = _rules(folder)
        children = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
        for child in sorted(children, key=lambda child: (rules.get(child.name, len(rules)), child.name)):
            yield from _runs_below(child, depth - 1)


def _rules(folder: Path) -> dict[str, int]:
    """Return the place of each rule of a study, the baseline first; empty if the folder is not a study."""
    try:
        rules = read_object((folder / "comparison.json").read_bytes())["rules"]
        return {str(name): place for place, name in enumerate(rules)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def pool_seeds(single: Mapping[str, EvaluatedCheckpoint]) -> dict[str, EvaluatedCheckpoint]:
    """Put runs together that differ by their seed only, FOLDER/seed-N: each run's answer is one more sample."""
    groups: dict[tuple[str, int], list[EvaluatedCheckpoint]] = {}
    for checkpoint in single.values():
        rule, _, seed = checkpoint.runs[0].rpartition("/")
        if rule and seed.startswith("seed-"):
            groups.setdefault((rule, checkpoint.step), []).append(checkpoint)
    return {
        f"{rule}/*@{step}": replace(
            members[0],
            key=f"{rule}/*@{step}",
            label=f"{rule} · step {step} · {len(members)} seeds",
            runs=tuple(member.runs[0] for member in members),
            results=tuple(member.results[0] for member in members),
        )
        for (rule, step), members in groups.items()
        if len(members) > 1
    }
