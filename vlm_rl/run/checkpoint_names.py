"""What a user may call a model: its folder, a name of the hub, or a run's checkpoint.

RUN and RUN/latest are the last checkpoint, RUN/60 is that of a step, RUN/best the best evaluated step that is saved.
The folder RUN/checkpoints may stand for RUN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import locate_model
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.untrusted.plain_files import check_plain

LATEST: Literal["latest"] = "latest"
BEST: Literal["best"] = "best"


def resolve_model(path: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of a model: a path itself, a checkpoint of a run, or a model of the hub, downloaded.

    Args:
        path: what the user named.
        weights: whether the weights of a model of the hub are downloaded too.

    A path that names none of these comes back unchanged, for the caller's check of model folders. Raises
    UserError for a run without that checkpoint, and for a model that cannot be downloaded.
    """
    path = Path(path)
    if _run_and_step(path) is None:
        return locate_model(path, weights=weights)
    return find_checkpoint(path)[1]


def find_checkpoint(path: Path) -> tuple[RunDirectory, Path]:
    """Return the run and the folder of a checkpoint: RUN/checkpoints/step-000060, RUN/60, RUN/best, RUN for the last.

    Raises UserError if there is none.
    """
    check_plain(path)
    if path.resolve().parent.name == "checkpoints" and path.is_dir():
        return RunDirectory.of_any_kind(path.resolve().parents[1]), path
    folder, step = _run_and_step(path) or (path, None)
    run = RunDirectory.of_any_kind(folder)
    known = dict(run.checkpoints())
    if step == BEST:
        return run, _best(run)
    if not known or (step is not None and step not in known):
        has = f"it has {', '.join(map(str, known))}" if known else "it has none"
        raise UserError(f"{run.path} has no checkpoint{'' if step is None else f' of step {step}'}: {has}")
    return run, known[max(known) if step is None else step]


def _best(run: RunDirectory) -> Path:
    if run.config_file == SFT_CONFIG or (best := run.best()) is None:
        raise UserError(f"{run.path} has no evaluation, so that none of its checkpoints is the best: name a step")
    if best.checkpoint is None:
        raise UserError(f"{run.path} has no checkpoint of an evaluated step: name a step, or {run.path} for the last")
    return best.checkpoint


def _run_and_step(path: Path) -> tuple[Path, int | Literal["best"] | None] | None:
    """Return the run that a path names and the step, None for its last checkpoint; None if it names no run."""
    step: int | Literal["best"] | None = None
    if path.name in (LATEST, BEST) and not path.is_dir():
        step, path = BEST if path.name == BEST else None, path.parent
    elif path.name.isdecimal() and not path.exists():
        step, path = int(path.name), path.parent
    if path.name == "checkpoints":
        path = path.parent
    return (path, step) if any((path / name).is_file() for name in ("config.yaml", SFT_CONFIG)) else None
