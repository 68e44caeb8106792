"""Run a study and write its report: `vlm-rl study STUDY.yaml`.

Each run is its own process, as many at a time as there are jobs, with its output in a log beside its folder. Finished
runs are left alone, begun ones resume from their checkpoints, and a stop lets the runs save first. So the same
command always resumes a study.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from vlm_rl.config import changed_keys, save_config
from vlm_rl.errors import StoppedError, UserError, signal_name
from vlm_rl.model_files.model_folder import check_model_folder
from vlm_rl.run.checkpoint import verify
from vlm_rl.run.configurations import fixed_changes
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.manifest import CheckpointError
from vlm_rl.run.run_files import write_atomically
from vlm_rl.run.terminal import clock, make_console, visible
from vlm_rl.study.findings import findings
from vlm_rl.study.launch import Launch
from vlm_rl.study.page import write_study_page
from vlm_rl.study.results import as_csv, as_json, collect, missing_reason
from vlm_rl.study.runs import Study, StudyRun, load_study

_POLL_SECONDS = 0.1
_TAIL_LINES = 15
_TAIL_BYTES = 16_384


def run_study(
    path: Path,
    out: Path,
    *,
    overrides: Sequence[str] = (),
    launch: Launch | None = None,
    report_only: bool = False,
) -> int:
    """Train the runs that are missing from a study, then write its report.

    Returns the exit code: 1 if at least one run failed, else 0.

    Args:
        path: the study file.
        out: the folder of the runs and the report.
        overrides: keys of the study file to change, such as "base.train.steps=40".
        launch: how the runs are started; None: one after the other, here.
        report_only: train nothing, and report on the runs that exist.

    Raises:
        UserError: before anything is started, for a mistake in the study file, a warm start that is not a model
            folder, or an `out` that holds runs of a different study.
        StoppedError, KeyboardInterrupt: after SIGTERM or Ctrl-C, once the runs have saved.
    """
    study = load_study(path, overrides)
    runs = study.runs(out)
    for run in runs if report_only else []:
        _refuse_a_different_run(run)
    failed = [] if report_only else run_all(study, runs, out, launch=launch or Launch())
    write_results(study, runs, out)
    return 1 if failed else 0


def run_all(study: Study, runs: Sequence[StudyRun], out: Path, *, launch: Launch) -> list[StudyRun]:
    """Train all runs that are not finished and return those that failed.

    Args:
        study: names the warm starts.
        runs: of the study.
        out: the folder of the study, which is locked meanwhile.
        launch: how the runs are started.
    """
    for name, folder in study.starts.items():
        try:
            check_model_folder(folder)
        except UserError as error:
            raise UserError(f"starts.{name}: {error}") from None
    return train_missing(runs, out, launch=launch)


def train_missing(runs: Sequence[StudyRun], out: Path, *, launch: Launch) -> list[StudyRun]:
    """Train the runs that are not finished and return those that failed.

    Args:
        runs: of any studies, in their order.
        out: a folder that is locked meanwhile.
        launch: how the runs are started.

    Raises:
        UserError: before anything is started, for a folder that holds a different run.
        StoppedError, KeyboardInterrupt: after SIGTERM or Ctrl-C, once the runs have saved.
    """
    for run in runs:
        _refuse_a_different_run(run)
    with _exclusive(out) as lock:
        waiting = [run for run in runs if not is_finished(run)]
        for run in waiting:
            _resumable(run)  # a mistake is reported before anything starts
        runner = StudyRunner(waiting, num_done=len(runs) - len(waiting), launch=launch, lock=lock)
        runner.note(f"{len(runs)} runs, {len(waiting)} to do, {launch.jobs} at a time, in {out}")
        runner.work()
    return runner.failed


def write_results(study: Study, runs: Sequence[StudyRun], out: Path) -> None:
    """Write comparison.html, comparison.json and curves.csv about the finished runs."""
    results = collect(study, runs)
    sentences = findings(results)
    page = write_study_page(results, study, sentences, out / "comparison.html")
    tree = json.dumps(as_json(results, sentences), indent=1, allow_nan=False) + "\n"
    write_atomically(out / "comparison.json", lambda place: place.write_text(tree, encoding="utf-8"))
    write_atomically(out / "curves.csv", lambda place: place.write_text(as_csv(results), encoding="utf-8"))
    console = make_console()
    for run in results.missing:
        console.print(Text(visible(f"missing: {run.rule} seed {run.seed}, {run.reason}")), soft_wrap=True)
    num = len(results.missing)
    note = f"   ({num} of {len(runs)} runs are missing)" if num else ""
    console.print(Text(f"report: {page}{note}"), soft_wrap=True)


# -- what is there already -----------------------------------------------------------------------


def is_finished(run: StudyRun) -> bool:
    """Return whether all numbers of a run are recorded and the checkpoint of its last step verifies."""
    if missing_reason(run):
        return False
    step = run.config.train.steps
    folder = dict(RunDirectory(run.out).checkpoints()).get(step)
    try:
        return folder is not None and verify(folder).step == step
    except CheckpointError:
        return False


def _begun(run: StudyRun) -> bool:
    return (run.out / "config.yaml").is_file()


def _refuse_a_different_run(entry: StudyRun) -> None:
    """Raise UserError if the folder holds a run that the study file, as it is now, would not make."""
    if not _begun(entry):
        return
    run = RunDirectory(entry.out)
    there, wanted = run.config(), entry.config
    changed = [key for key, _, _ in fixed_changes(there, wanted) if key != "out"]
    if run.evals():  # a resume may measure otherwise, and a comparison may not
        changed += changed_keys(replace(entry, config=there).measurement, entry.measurement, "eval")
    if changed:
        raise UserError(
            f"{entry.out} holds a run with a different {changed[0]} than the study file has now: give a new --out, "
            "restore the old value in the study file, or remove the folder"
        )
    trained = max((step for step, _ in run.checkpoints()), default=0)
    if trained > wanted.train.steps:
        raise UserError(
            f"{entry.out} has trained {trained} steps, but the study's train.steps is {wanted.train.steps}: "
            "give a new --out, or restore the old value"
        )


def _resumable(run: StudyRun) -> StudyRun:
    """Return the run with the spelling of `out` that it was started with, since a resume compares the texts."""
    if not _begun(run):
        return run
    there = RunDirectory(run.out).config().out
    if Path(there).resolve() != run.out.resolve():
        raise UserError(
            f"{run.out} was started as {there} and cannot resume from a different place: move it back, run the "
            "command in the folder where it was first run, or remove the run"
        )
    return StudyRun(run.rule, run.seed, run.start, run.config.model_copy(update={"out": there}))


@contextmanager
def _exclusive(out: Path) -> Iterator[int]:
    """Hold the lock of a study's folder; yield its descriptor.

    Runs inherit it, so that the folder stays locked while a run outlives a study command that was killed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror or error}; choose a different --out") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another study command, or a run that it left behind, is at work in {out}: wait for it, or stop it"
            ) from None
        except OSError:  # this file system has no such locks; the lease of each run keeps a second writer out
            pass
        yield lock
    finally:
        os.close(lock)


# -- running -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RunProcess:
    """A run in training."""

    entry: StudyRun
    process: subprocess.Popen[bytes]
    started: float  # of time.monotonic
    slot: int = 0  # which of the jobs that run at a time


class StudyRunner:
    """Trains a list of runs, launch.jobs at a time, and stops them on a signal."""

    def __init__(self, waiting: Sequence[StudyRun], *, num_done: int, launch: Launch, lock: int) -> None:
        """Start nothing yet.

        Args:
            waiting: the runs to train, in their order.
            num_done: runs of the study that are finished.
            launch: how runs are started, and how many at a time.
            lock: descriptor of the study's lock, which the runs inherit.
        """
        self.waiting = list(waiting)
        self.working: list[RunProcess] = []
        self.failed: list[StudyRun] = []
        self.num_done = num_done
        self.num_all = num_done + len(waiting)
        self.launch = launch
        self.lock = lock
        self.signals: list[int] = []  # arrived so far
        self.num_handled = 0
        self.console = make_console()

    def note(self, text: str) -> None:
        """Print a line, with characters that hide or reorder text made visible."""
        self.console.print(Text(visible(text)), soft_wrap=True)

    def work(self) -> None:
        """Train until every run has ended. Raises StoppedError or KeyboardInterrupt after a signal."""
        kinds = (signal.SIGTERM, signal.SIGINT)
        before = {kind: signal.signal(kind, lambda number, _: self.signals.append(number)) for kind in kinds}
        try:
            while self.working or (self.waiting and not self.signals):
                while self.waiting and len(self.working) < self.launch.jobs and not self.signals:
                    self._start(self.waiting.pop(0))
                time.sleep(_POLL_SECONDS)
                self._pass_on_signals()
                for run in [run for run in self.working if run.process.poll() is not None]:
                    self._end(run)
        finally:
            for run in self.working:  # there are any only after an error of our own
                run.process.terminate()
            for kind, handler in before.items():
                signal.signal(kind, handler)
        if self.signals:
            raise KeyboardInterrupt if self.signals[0] == signal.SIGINT else StoppedError

    def _start(self, entry: StudyRun) -> None:
        slot = min(set(range(self.launch.jobs)) - {run.slot for run in self.working})
        resume = ["--resume"] if _begun(entry) else []
        resumable = _resumable(entry)
        entry.config_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(entry.config_file, lambda place: save_config(resumable.config, place))
        words = self.launch.words(["train", str(entry.config_file), *resume], slot)
        if shutil.which(words[0]) is None:
            raise UserError(f"--launch: there is no command {words[0]} here; install it, or correct the template")
        with entry.log.open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.launch.environment(slot)},
                start_new_session=True,  # Ctrl-C reaches us alone; the runs get a SIGTERM, on which they save
                pass_fds=(self.lock,),
            )
        self.working.append(RunProcess(entry, process, time.monotonic(), slot))
        self.note(f"{entry.title} from start {entry.start}: {'resumes' if resume else 'starts'}, log {entry.log}")

    def _end(self, run: RunProcess) -> None:
        self.working.remove(run)
        code, seconds = run.process.returncode, clock(time.monotonic() - run.started)
        if code == 0:
            self.num_done += 1
            self.note(f"{self.num_done}/{self.num_all}  {run.entry.title}: done in {seconds}")
        elif self.signals:
            self.note(f"{run.entry.title}: stopped after {seconds}")
        else:
            self.failed.append(run.entry)
            how = f"exit code {code}" if code > 0 else signal_name(-code)
            self.note(f"{run.entry.title}: FAILED after {seconds} with {how}; the end of {run.entry.log}:")
            for line in log_tail(run.entry.log):
                self.note(f"    {line}")

    def _pass_on_signals(self) -> None:
        """Ask the runs to save and end on the first signal; kill them on the second."""
        if len(self.signals) == self.num_handled:
            return
        self.num_handled = len(self.signals)
        if self.num_handled == 1:
            self.note(f"stopping: {len(self.working)} runs save and end; the same signal again kills them")
        for run in self.working:
            if self.num_handled == 1:
                run.process.terminate()
            elif run.process.poll() is None:
                os.killpg(run.process.pid, signal.SIGKILL)


def log_tail(path: Path) -> list[str]:
    """Return the last lines of a log that are not empty."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
