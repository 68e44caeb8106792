"""`vlm-rl paper NAME`: print the commands that make a paper's table, or run them in order and resume.

    make_paper("luspo-vl", stages=["train", "eval", "table"], setup=Setup(...))

What is done is left alone, and what was stopped continues: sets by their manifest, runs by their last checkpoint,
evaluations by their results and their journal.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.text import Text

from vlm_rl.config import Config
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.papers.catalog import PAPERS, Paper
from vlm_rl.papers.downloads import Download
from vlm_rl.papers.steps import (
    RANKS_OF_A_NODE,
    PlannedRun,
    Step,
    downloads,
    eval_steps,
    plan_runs,
    prepare_steps,
    table_rows,
)
from vlm_rl.papers.table import make_table, write_table
from vlm_rl.run.terminal import make_console, visible
from vlm_rl.study.launch import Launch
from vlm_rl.study.run import is_finished, train_missing

Stage = Literal["prepare", "train", "eval", "table"]
STAGES: tuple[Stage, ...] = ("prepare", "train", "eval", "table")


@dataclass(frozen=True, slots=True)
class Setup:
    """Where a paper's table is made, and with what."""

    out: Path  # of the table, and of the evaluations of models before training
    configs: Path  # the shipped configurations
    data: Path = Path("data")  # of prepared sets
    ranks: int = RANKS_OF_A_NODE
    jobs: int = 1  # runs that train at the same time
    changes: Callable[[int, Config], Sequence[str]] = lambda *_: ()  # to the configurations: steps.plan_runs
    eval_words: Sequence[str] = ()  # more for vlm-rl eval
    prepare: Callable[[Sequence[str]], None] | None = None  # makes sets with these names, and all else, for a toy
    note: str = ""  # on what this table is not
    options: Sequence[str] = ()  # of vlm-rl paper that ask for this setup

    @property
    def is_toy(self) -> bool:
        """Say whether toy data and a tiny model take the place of downloads."""
        return self.prepare is not None


def paper_of(name: str) -> Paper:
    """Return a paper by its name. Raises UserError for an unknown one."""
    if name not in PAPERS:
        raise UserError(f"paper {name!r} is unknown; known: {', '.join(PAPERS)}")
    return PAPERS[name]


def make_paper(name: str, *, stages: Sequence[Stage], setup: Setup) -> int:
    """Run stages of a paper in their order, or print the plan where there are none. Return the exit code.

    Args:
        name: of the paper, a key of catalog.PAPERS.
        stages: of STAGES.
        setup: where and with what.

    Raises:
        UserError: for what is missing, with the command that makes it.
        StoppedError, KeyboardInterrupt: after a signal; the same command continues.
    """
    paper = paper_of(name)
    if setup.is_toy:  # a tiny model needs one machine
        paper = replace(paper, runs=[replace(run, num_nodes=1) for run in paper.runs])
    runs = plan_runs(paper, setup.configs, setup.changes)
    if not stages:
        print_plan(paper, runs, setup)
        return 0
    for stage in STAGES:
        if stage in stages and (code := _DO[stage](paper, runs, setup)):
            return code
    return 0


def print_plan(paper: Paper, runs: Sequence[PlannedRun], setup: Setup) -> None:
    """Print what is missing, then every command in order with whether it is done."""
    _note(f"{paper.title} (arXiv {paper.arxiv}): {len(runs)} runs, {len(paper.columns)} benchmarks")
    if setup.note:
        _note(setup.note)
    if not setup.is_toy and (missing := [download for download in downloads(paper) if not download.is_there()]):
        _note("missing downloads:")
        for line in download_lines(missing):
            _note(line)
    again = shlex.join(["vlm-rl", "paper", paper.key, *setup.options])
    if setup.is_toy:
        _note(f"toy data and a tiny model: {again} --prepare")
    else:
        for step in prepare_steps(paper, setup.data):
            _note(f"{_mark(step.done)} {step.shown(1)}")
    for paper_run in runs:
        _note(f"{_mark(is_finished(paper_run.planned))} {paper_run.command(setup.ranks)}")
    steps = _eval_steps(paper, runs, setup)
    for step in steps:
        _note(f"{_mark(step.done)} {step.shown(setup.ranks)}")
    has_table = (setup.out / "table.md").is_file() and all(step.done for step in steps)
    _note(f"{_mark(has_table)} {again} --table")
    _note(f"all of them in order, from where they are: {again} --prepare --train --eval --table")


def download_lines(missing: Sequence[Download]) -> list[str]:
    """Return a line for each download: hub id, size, licence, revision, command."""
    return [
        f"  {download.hub}: size {download.size}, licence {download.license}, revision {download.revision}\n"
        f"    {download.command}"
        for download in dict.fromkeys(missing)
    ]


def _mark(done: bool) -> str:
    return "[done] " if done else "[to do]"


def _note(text: str) -> None:
    make_console().print(Text("\n".join(map(visible, text.split("\n")))), soft_wrap=True)


def _prepare(paper: Paper, _runs: Sequence[PlannedRun], setup: Setup) -> int:
    if setup.prepare is not None:  # a toy
        setup.prepare([column.folder for column in paper.columns])
        return 0
    missing = [download for download in downloads(paper) if not download.is_there()]
    if missing:
        lines = "\n".join(download_lines(missing))
        raise UserError(f"{len(missing)} downloads are missing; make them, then run the same command:\n{lines}")
    return _run_steps(prepare_steps(paper, setup.data), ranks=1)


def _train(paper: Paper, runs: Sequence[PlannedRun], setup: Setup) -> int:
    """Train what is missing on this machine; runs on several nodes are left to their own command."""
    here = [paper_run for paper_run in runs if paper_run.run.num_nodes == 1]
    for paper_run in here:
        needed = (paper_run.planned.config.model.path, *paper_run.planned.config.data.train)
        if absent := [place for place in needed if not Path(place).is_dir()]:
            raise UserError(
                f"{absent[0]} is not there, which {paper_run.file} needs: vlm-rl paper {paper.key} says how to get it"
            )
    launch = Launch(jobs=setup.jobs, ranks=setup.ranks)
    failed = train_missing([paper_run.planned for paper_run in here], setup.out, launch=launch)
    for paper_run in runs:
        if paper_run not in here and not is_finished(paper_run.planned):
            _note(
                f"{paper_run.run.title} takes {paper_run.run.num_nodes} nodes; start it on each: "
                f"{paper_run.command(RANKS_OF_A_NODE)}"
            )
    return 1 if failed else 0


def _evaluate(paper: Paper, runs: Sequence[PlannedRun], setup: Setup) -> int:
    unfinished = {
        paper_run.planned.out: paper_run.run.title for paper_run in runs if not is_finished(paper_run.planned)
    }
    if unfinished:
        _note(f"not trained yet, and not measured: {', '.join(unfinished.values())}")
    return _run_steps(_eval_steps(paper, runs, setup, without=[*unfinished]), ranks=setup.ranks)


def _eval_steps(
    paper: Paper, runs: Sequence[PlannedRun], setup: Setup, *, without: Sequence[Path] = ()
) -> list[Step]:
    rows = table_rows(paper, runs, setup.out)
    measured = [row for row in rows if row.folder not in without]
    return [step for row in measured for step in eval_steps(paper, row, setup.data, setup.eval_words)]


def _run_steps(steps: Sequence[Step], *, ranks: int) -> int:
    """Run the commands that are not done, each in a separate process, up to the first that fails."""
    for step in steps:
        if step.done:
            continue
        _note(step.shown(ranks))
        if code := _run(step.argv(ranks)):
            _note(f"failed with exit code {code}: {step.shown(ranks)}")
            return code if code > 0 else 1
    return 0


def _run(argv: Sequence[str]) -> int:
    """Run a command and return its exit code; a signal ends it first, so that it can keep what it has.

    Raises StoppedError after SIGTERM, KeyboardInterrupt after Ctrl-C, which the terminal sends to both.
    """
    process = subprocess.Popen(argv)
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_stopped:
        raise StoppedError
    return code


def _table(paper: Paper, runs: Sequence[PlannedRun], setup: Setup) -> int:
    table = make_table(paper, table_rows(paper, runs, setup.out), note=setup.note)
    path = write_table(table, setup.out)
    _note(path.read_text(encoding="utf-8"))
    _note(f"table: {path}, {path.with_suffix('.json')}")
    return 0


_DO: dict[Stage, Callable[[Paper, Sequence[PlannedRun], Setup], int]] = {
    "prepare": _prepare,
    "train": _train,
    "eval": _evaluate,
    "table": _table,
}
