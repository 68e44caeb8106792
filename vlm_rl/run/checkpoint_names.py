"""What a user may call a model: its folder, a name of the hub, RUN, RUN/60, RUN/latest, RUN/checkpoints/latest."""

from __future__ import annotations

from pathlib import Path

from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import locate_model
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory

LATEST = "latest"


def resolve_model(path: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of a model: a path itself, a checkpoint of a run, or a model of the hub, downloaded.

    Args:
        path: what the user named.
        weights: whether the weights of a model of the hub are downloaded too.

    A path that names none of these comes back as it is, for the caller's own check of model folders. Raises
    UserError for a run without that checkpoint, and for a model that cannot be downloaded.
    """
    path = Path(path)
    if _run_and_step(path) is None:
        return locate_model(path, weights=weights)
    return find_checkpoint(path)[1]


def find_checkpoint(path: Path) -> tuple[RunDirectory, Path]:
    """Return the run and the folder of a checkpoint: RUN/checkpoints/step-000060, RUN/60, or RUN for its last one.

    Raises UserError where there is none.
    """
    if path.resolve().parent.name == "checkpoints" and path.is_dir():
        return RunDirectory.of_any_kind(path.resolve().parents[1]), path
    folder, step = _run_and_step(path) or (path, None)
    run = RunDirectory.of_any_kind(folder)
    known = dict(run.checkpoints())
    if not known or (step is not None and step not in known):
        has = f"it has {', '.join(map(str, known))}" if known else "it has none"
        raise UserError(f"{run.path} has no checkpoint{'' if step is None else f' of step {step}'}: {has}")
    return run, known[max(known) if step is None else step]


def _run_and_step(path: Path) -> tuple[Path, int | None] | None:
    """Return the run that a path names and the step, None for its last checkpoint; None where it names no run."""
    if path.name == LATEST and not path.is_dir():
        step, path = None, path.parent
    elif path.name.isdecimal() and not path.exists():
        step, path = int(path.name), path.parent
    else:
        step = None
    if path.name == "checkpoints":
        path = path.parent
    return (path, step) if any((path / name).is_file() for name in ("config.yaml", SFT_CONFIG)) else None
