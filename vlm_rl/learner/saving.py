"""The learner's state, to a run's checkpoints and back."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlm_rl.config import CheckpointConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import all_gather, barrier, rank
from vlm_rl.errors import UserError
from vlm_rl.learner.learner import Learner
from vlm_rl.run.checkpoint import commit, prune, recover, saving, writing_checkpoint
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.lock import RunLock

ResumePoint = tuple[Path, Mapping[str, Any]]  # the folder, and the state that its manifest holds


class NonFiniteError(RuntimeError):
    """Raised where a weight or an optimizer's state is NaN or infinite when a checkpoint is due."""


def checkpoint_to_resume(run: RunDirectory, lock: RunLock) -> ResumePoint | None:
    """Take the lock of the run, and return its newest checkpoint that verifies, or None where there is none yet.

    Raises UserError where another process writes there, and where there are checkpoints of which none verifies.
    """
    lock.acquire()
    newest = recover(run.path / "checkpoints")
    return (newest[0], newest[1].info) if newest else None


def restore_learner(learner: Learner, folder: Path, state: Mapping[str, Any]) -> None:
    """Load weights, optimizer and counters. Raises UserError for NaN."""
    learner.load(folder)
    if name := learner.non_finite():
        raise UserError(
            f"{folder}: {name} holds NaN or infinity: move this checkpoint away, and resume from the earlier one"
        )
    learner.restore(state["learner"])


def save_checkpoint(
    root: Path,
    learner: Learner,
    builder: PromptBuilder,
    state: Mapping[str, Any],
    *,
    keep: CheckpointConfig,
    best_step: Callable[[], int | None] = lambda: None,
) -> Path:
    """Write a checkpoint of the learner, prune old ones, and return its folder.

    Args:
        root: the folder of all checkpoints.
        learner: has the weights and the optimizer.
        builder: has the tokenizer.
        state: goes into the manifest; holds `step`.
        keep: which earlier ones are kept.
        best_step: gives a step that is kept too.

    Raises NonFiniteError before anything is written where a weight or the optimizer's state is not finite.
    """
    if name := learner.non_finite():
        raise NonFiniteError(
            f"step {state['step']}: {name} holds NaN or infinity: this state is not saved, and the newest "
            f"checkpoint in {root} stays the newest: resume from it; if this comes back, start a new run with a "
            "lower train.lr"
        )
    with (saving if rank() == 0 else writing_checkpoint)(root, step=state["step"]) as own:
        work = Path(all_gather(str(own))[0])
        written = dict(ChainMap(*all_gather(learner.save(work))))
        if rank() == 0:
            (builder.processor or builder.tokenizer).save_pretrained(work)
            newest = commit(work, root, step=state["step"], info=state, written=written)
            prune(root, newest=newest, keep_last=keep.keep_last, keep_every=keep.keep_every, best=best_step())
    barrier()
    return root / f"step-{state['step']:06d}"
