"""Run a study and write its report: `vlm-rl compare STUDY.yaml`.

Each run is a process of its own, `jobs` at a time, with its output in a log beside its folder. What is
finished is left alone, what was begun goes on from its checkpoint, and a stop lets the runs save first,
so the same command again always brings the study further.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from vlm_rl.config import MUTABLE_KEYS, changed_keys, save_config
from vlm_rl.data.model_folder import check_model_folder
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.run.checkpoint import CheckpointError, verify
from vlm_rl.run.directory import RunDirectory, write_atomically
from vlm_rl.run.terminal import clock, make_console, visible
from vlm_rl.study.findings import words
from vlm_rl.study.page import write_comparison_page
from vlm_rl.study.plan import Planned, Study, load_study
from vlm_rl.study.results import as_csv, as_json, collect, missing_reason

_POLL_SECONDS = 0.1
_TAIL_LINES = 15
_TAIL_BYTES = 16_384


def compare(path: Path, out: Path, *, jobs: int = 1, report_only: bool = False) -> int:
    """Run what is missing of the study, `jobs` runs at a time, then write its report; returns the exit code.

    1: at least one run failed. Raises UserError before anything is started for a mistake in the study, in
    a start's folder, or where `out` holds runs of another study; StoppedError or KeyboardInterrupt after
    SIGTERM or Ctrl-C, once the runs have saved.
    """
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}: at least one run at a time")
    study = load_study(path)
    planned = study.runs(out)
    for one in planned:
        _refuse_another_run(one)
    failed = [] if report_only else run_all(study, planned, out, jobs=jobs)
    write_results(study, planned, out)
    return 1 if failed else 0


def run_all(study: Study, planned: Sequence[Planned], out: Path, *, jobs: int) -> list[Planned]:
    """Run all that is not finished; returns those that failed."""
    for name, folder in study.starts.items():
        try:
            check_model_folder(folder)
        except UserError as error:
            raise UserError(f"starts.{name}: {error}") from None
    with _only_one(out) as lock:
        waiting = [one for one in planned if not is_finished(one)]
        for one in waiting:
            _settled_config(one)
        crew = Crew(waiting, num_done=len(planned) - len(waiting), jobs=jobs, lock=lock)
        crew.note(f"{len(planned)} runs, {len(waiting)} to do, {jobs} at a time, in {out}")
        crew.work()
    return crew.failed


def write_results(study: Study, planned: Sequence[Planned], out: Path) -> None:
    """Write comparison.html, comparison.json and curves.csv about the finished runs."""
    comparison = collect(study, planned)
    sentences = words(comparison)
    page = write_comparison_page(comparison, study, sentences, out / "comparison.html")
    tree = json.dumps(as_json(comparison, sentences), indent=1, allow_nan=False) + "\n"
    write_atomically(out / "comparison.json", lambda place: place.write_text(tree, encoding="utf-8"))
    write_atomically(out / "curves.csv", lambda place: place.write_text(as_csv(comparison), encoding="utf-8"))
    console = make_console()
    for one in comparison.missing:
        console.print(Text(visible(f"missing: {one.rule} seed {one.seed}, {one.reason}")), soft_wrap=True)
    num = len(comparison.missing)
    note = f"   ({num} of {len(planned)} runs are missing)" if num else ""
    console.print(Text(f"report: {page}{note}"), soft_wrap=True)


# -- what is there already -----------------------------------------------------------------------


def is_finished(planned: Planned) -> bool:
    """Whether all numbers of a run are recorded and the checkpoint of its last step verifies."""
    if missing_reason(planned):
        return False
    step = planned.config.train.steps
    folder = dict(RunDirectory(planned.out).checkpoints()).get(step)
    try:
        return folder is not None and verify(folder).step == step
    except CheckpointError:
        return False


def _begun(planned: Planned) -> bool:
    return (planned.out / "config.yaml").is_file()


def _refuse_another_run(planned: Planned) -> None:
    """Raise UserError if the folder holds a run that the study, as it now reads, would not make."""
    if not _begun(planned):
        return
    run = RunDirectory(planned.out)
    there, wanted = run.config(), planned.config
    trees = there.model_dump(exclude={"out"}), wanted.model_dump(exclude={"out"})
    changed = [key for key in changed_keys(*trees) if not key.startswith(MUTABLE_KEYS)]
    if changed:
        raise UserError(
            f"{planned.out} is a run with another {changed[0]} than the study has now: give another --out, "
            "take the study's old value back, or remove the folder"
        )
    trained = max((step for step, _ in run.checkpoints()), default=0)
    if trained > wanted.train.steps:
        raise UserError(
            f"{planned.out} has trained {trained} steps, but the study's train.steps is {wanted.train.steps}: "
            "give another --out, or take the old value back"
        )


def _settled_config(planned: Planned) -> Planned:
    """The run with the spelling of `out` that it was begun with, which a resume insists on."""
    if not _begun(planned):
        return planned
    there = RunDirectory(planned.out).config().out
    if Path(there).resolve() != planned.out.resolve():
        raise UserError(
            f"{planned.out} was begun as {there} and cannot go on from another place: move it back, start the "
            "command from the folder that it was started from, or remove the run"
        )
    return Planned(planned.rule, planned.seed, planned.start, planned.config.model_copy(update={"out": there}))


@contextmanager
def _only_one(out: Path) -> Iterator[int]:
    """Hold the lock of a study's folder; yields its descriptor.

    Runs inherit it, so that the lock also holds while one outlives a compare that was killed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror or error}; choose another --out") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError:
        raise UserError(f"another comparison, or a run that it left behind, is at work in {out}") from None
    finally:
        os.close(lock)


# -- running -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A run at work."""

    planned: Planned
    process: subprocess.Popen[bytes]
    begun: float  # of time.monotonic


class Crew:
    """Works off a list of runs, so many at a time, and stops them when it is told to."""

    def __init__(self, waiting: Sequence[Planned], *, num_done: int, jobs: int, lock: int) -> None:
        self.waiting = list(waiting)
        self.working: list[Job] = []
        self.failed: list[Planned] = []
        self.num_done = num_done
        self.num_all = num_done + len(waiting)
        self.jobs = jobs
        self.lock = lock
        self.signals: list[int] = []  # arrived so far
        self.num_obeyed = 0
        self.console = make_console()

    def note(self, text: str) -> None:
        self.console.print(Text(visible(text)), soft_wrap=True)

    def work(self) -> None:
        """Until every run has ended. Raises StoppedError or KeyboardInterrupt if told to stop."""
        kinds = (signal.SIGTERM, signal.SIGINT)
        before = {kind: signal.signal(kind, lambda number, _: self.signals.append(number)) for kind in kinds}
        try:
            while self.working or (self.waiting and not self.signals):
                while self.waiting and len(self.working) < self.jobs and not self.signals:
                    self._start(self.waiting.pop(0))
                time.sleep(_POLL_SECONDS)
                self._pass_on_signals()
                for job in [job for job in self.working if job.process.poll() is not None]:
                    self._end(job)
        finally:
            for job in self.working:  # only after an error of our own
                job.process.terminate()
            for kind, handler in before.items():
                signal.signal(kind, handler)
        if self.signals:
            raise KeyboardInterrupt if self.signals[0] == signal.SIGINT else StoppedError

    def _start(self, planned: Planned) -> None:
        resume = ["--resume"] if _begun(planned) else []
        settled = _settled_config(planned)
        planned.config_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(planned.config_file, lambda place: save_config(settled.config, place))
        with planned.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "vlm_rl.cli", "train", str(planned.config_file), *resume],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(max(1, _num_cores() // self.jobs))},
                start_new_session=True,  # Ctrl-C reaches us alone; the runs get a SIGTERM, on which they save
                pass_fds=(self.lock,),
            )
        self.working.append(Job(planned, process, time.monotonic()))
        self.note(
            f"{planned.title} from start {planned.start}: {'goes on' if resume else 'begins'}, log {planned.log}"
        )

    def _end(self, job: Job) -> None:
        self.working.remove(job)
        code, seconds = job.process.returncode, clock(time.monotonic() - job.begun)
        if code == 0:
            self.num_done += 1
            self.note(f"{self.num_done}/{self.num_all}  {job.planned.title}: done in {seconds}")
        elif self.signals:
            self.note(f"{job.planned.title}: stopped after {seconds}")
        else:
            self.failed.append(job.planned)
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            self.note(f"{job.planned.title}: FAILED after {seconds} with {how}; the end of {job.planned.log}:")
            for line in log_tail(job.planned.log):
                self.note(f"    {line}")

    def _pass_on_signals(self) -> None:
        """The first asks the runs to save and end, the second ends them."""
        if len(self.signals) == self.num_obeyed:
            return
        self.num_obeyed = len(self.signals)
        if self.num_obeyed == 1:
            self.note(f"stopping: {len(self.working)} at work save and end; the same signal again kills them")
        for job in self.working:
            if self.num_obeyed == 1:
                job.process.terminate()
            elif job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)


def log_tail(path: Path) -> list[str]:
    """The last lines of a log."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-_TAIL_LINES:]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
