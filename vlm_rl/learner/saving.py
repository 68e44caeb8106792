"""The learner's state, to a run's checkpoints and back."""

from __future__ import annotations

import shutil
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vlm_rl.config import CheckpointConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import check_same_sets
from vlm_rl.distributed import alive, all_gather, barrier, from_main, rank, world_size
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.learner.checkpoint_files import CheckpointFiles
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.save_progress import SaveLines, SaveProgress
from vlm_rl.run.checkpoint import commit, prune, recover, saving, writing_checkpoint
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.lock import RunLock
from vlm_rl.run.manifest import CheckpointError, FileEntry

ResumePoint = tuple[Path, Mapping[str, Any]]  # the folder, and the state that its manifest holds


class NonFiniteError(RuntimeError):
    """Raised where a weight or an optimizer's state is NaN or infinite when a checkpoint is due."""


def checkpoint_to_resume(run: RunDirectory, lock: RunLock, sets: Sequence[str]) -> ResumePoint | None:
    """Take the lock of the run, and return its newest checkpoint that verifies, or None if there is none yet.

    Raises UserError if another process writes there, if there are checkpoints of which none verifies, and if
    one of these training sets was prepared again.
    """
    lock.acquire()
    newest = recover(run.path / "checkpoints")
    if newest is None:
        return None
    check_same_sets(run.path, newest[1].info.get("data", {}), sets)
    return newest[0], newest[1].info


def where_it_resumes(run: RunDirectory, checkpoint: ResumePoint | None, steps: int) -> str:
    """Return one line that says where a run of so many steps resumes and which step is next."""
    if checkpoint is None:
        return f"{run.path} has no checkpoint to resume from: starting again at step 1 of {steps}"
    folder, state = checkpoint
    if state["step"] >= steps:
        return f"{run.path} is finished at {folder.name}; raise train.steps to train longer"
    return f"resuming {run.path} from {folder.name} (step {state['step'] + 1} of {steps} is next)"


def restore_learner(learner: Learner, folder: Path, state: Mapping[str, Any]) -> None:
    """Load weights, optimizer and counters. Raises UserError for NaN."""
    learner.load(folder)
    _check_finite(learner, folder)
    learner.restore(state["learner"])


def start_learner(learner: Learner, folder: Path) -> None:
    """Load weights and optimizer of a different run's checkpoint, and keep the learner's counters at 0."""
    learner.start_from(folder)
    _check_finite(learner, folder)


def _check_finite(learner: Learner, folder: Path) -> None:
    if name := learner.non_finite():
        raise UserError(
            f"{folder}: {name} holds NaN or infinity: move this checkpoint away, and resume from the earlier one"
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that is being written."""

    state: Mapping[str, Any]
    folder: Path  # where its files are until it is committed
    best: int | None
    written: Future[dict[str, FileEntry]]  # this rank's files

    def outcome(self) -> dict[str, FileEntry] | CheckpointError | None:
        """Return the files that this rank has written, its error, or None while it is writing."""
        if not self.written.done():
            return None
        error = self.written.exception()
        return error if isinstance(error, CheckpointError) else self.written.result()


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, each whole or not there.

    With checkpoint.async_save a save ends once the state is copied to host memory. A thread of each rank writes the
    copies and hashes them; only the main thread runs collectives, and it commits in `finish`. Use as a context
    manager.
    """

    def __init__(
        self,
        root: Path,
        learner: Learner,
        builder: PromptBuilder,
        keep: CheckpointConfig,
        *,
        lock: RunLock,
        best_step: Callable[[], int | None] = lambda: None,
        newest: int | None = None,
        size: int = 0,
        lines: SaveLines | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            root: the folder of all checkpoints.
            learner: has the weights and the optimizer.
            builder: has the tokenizer.
            keep: which earlier checkpoints are kept, and whether saves are asynchronous.
            lock: of the run; a checkpoint is committed only while it is held.
            best_step: gives a step that is kept too.
            newest: the step of the checkpoint that the run continues from.
            size: the bytes that a checkpoint is expected to take; the first one is refused where fewer are free.
            lines: where saves are announced, and how far they are.
        """
        self.root, self.learner, self.builder, self.keep = root, learner, builder, keep
        self.lock, self.best_step = lock, best_step
        self._progress = SaveProgress(size, lines)
        self._pending: _Pending | None = None
        self._committed = newest
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # starts with the first job

    def save(self, state: Mapping[str, Any], *, add_files: Callable[[Path], None] = lambda _: None) -> None:
        """Write a checkpoint of what the learner is now, after the one before; all ranks together.

        Args:
            state: goes into the manifest; holds `step`.
            add_files: writes more files into the folder, on rank 0 and before the save ends.

        Raises CheckpointError for what the file system refuses, and NonFiniteError before anything is written where
        a weight or the optimizer's state is not finite.
        """
        self.finish()
        alive("save")
        step = state["step"]
        self._progress.begin(step, beside=self.keep.async_save)
        if name := self.learner.non_finite():
            raise NonFiniteError(
                f"step {step}: {name} holds NaN or infinity: this state is not saved, and the newest checkpoint in "
                f"{self.root} stays the newest: resume from it; if this comes back, start a new run with a "
                "lower train.lr"
            )
        size = self._progress.size
        making = saving(self.root, step=step, size=size) if rank() == 0 else writing_checkpoint(self.root, step=step)
        with making as own:
            folder = Path(all_gather(str(own))[0])
            self._progress.watch(folder)
            files = self.learner.save(folder, later=self.keep.async_save)
            if rank() == 0:
                add_files(folder)
                (self.builder.processor or self.builder.tokenizer).save_pretrained(folder)
        # As of now: later the loop is further on, and may have evaluated again.
        best = self.best_step() if rank() == 0 else None
        self._pending = _Pending(deepcopy(state), folder, best, self._written(files, step))
        if not self.keep.async_save:
            self.finish()

    def _written(self, files: CheckpointFiles, step: int) -> Future[dict[str, FileEntry]]:
        """Write what the files left for later, in the thread."""
        if self.keep.async_save:
            return self._thread.submit(writing_checkpoint(self.root, step=step)(self._write), files)
        done: Future[dict[str, FileEntry]] = Future()
        done.set_result(self._write(files))
        return done

    def _write(self, files: CheckpointFiles) -> dict[str, FileEntry]:
        entries = files.write()
        self._progress.written()
        return entries

    def finish(self, *, wait: bool = True) -> None:
        """Commit the checkpoint that is being written, if there is one, and prune older ones; all ranks together.

        With `wait=False` it stays where a rank is still writing. Raises CheckpointError, on all ranks, for what the
        file system refused one of them.
        """
        if (pending := self._pending) is None:
            return
        if wait:
            futures.wait([pending.written])
        self._progress.commits()
        outcomes = all_gather(pending.outcome())
        failed = next((outcome for outcome in outcomes if isinstance(outcome, CheckpointError)), None)
        if failed is None and None in outcomes:
            return
        self._pending = None
        if failed is not None:
            futures.wait([pending.written])
            self._progress.stop()
            barrier()  # none writes into the folder any more
            if rank() == 0:
                shutil.rmtree(pending.folder, ignore_errors=True)
            raise failed
        from_main(lambda: self._commit(pending, dict(ChainMap(*outcomes))))
        self._committed = pending.state["step"]

    @property
    def step_after_error(self) -> int | None:
        """Return the step of the newest checkpoint if the run failed now; None without one. See `__exit__`."""
        if self._pending is not None and world_size() == 1:
            return self._pending.state["step"]
        return self._committed

    def _commit(self, pending: _Pending, written: Mapping[str, FileEntry]) -> None:
        self.lock.check()
        step = pending.state["step"]
        try:
            newest = commit(pending.folder, self.root, step=step, info=pending.state, written=written)
        except BaseException:
            shutil.rmtree(pending.folder, ignore_errors=True)
            raise
        with writing_checkpoint(self.root, step=step):
            prune(
                self.root,
                newest=newest,
                keep_last=self.keep.keep_last,
                keep_every=self.keep.keep_every,
                best=pending.best,
            )
        self._progress.end(sum(entry.size for entry in written.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit what is being written before the run ends.

        After an error the ranks may not meet again. A single rank then commits alone. Of several none does, and a
        resume takes the checkpoint before.
        """
        if error is None or isinstance(error, StoppedError):
            self.finish()
        elif world_size() == 1:
            with suppress(CheckpointError):  # the run's own error says more
                self.finish()
        self._progress.stop()
        self._thread.shutdown()
