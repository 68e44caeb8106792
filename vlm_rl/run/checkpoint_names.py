"""What a user may call a checkpoint: its folder, RUN, RUN/60, RUN/latest, RUN/checkpoints/latest."""

from __future__ import annotations

from pathlib import Path

from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory

LATEST = "latest"


def resolve_model(path: str | Path) -> Path:
    """Return the model folder that a path names: itself, or a checkpoint of the run that it names.

    A path that names neither comes back as it is, for the caller's own check of model folders. Raises UserError for
    a run without that checkpoint.
    """
    path = Path(path)
    if _run_and_step(path) is None:
        return path
    return find_checkpoint(path)[1]


def find_checkpoint(path: Path) -> tuple[RunDirectory, Path]:
    """Return the run and the folder of a checkpoint: RUN/checkpoints/step-000060, RUN/60, or RUN for its last one.

    Raises UserError where there is none.
    """
    if path.resolve().parent.name == "checkpoints" and path.is_dir():
        return RunDirectory(path.resolve().parents[1]).open(), path
    folder, step = _run_and_step(path) or (path, None)
    run = RunDirectory(folder).open()
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
    return (path, step) if (path / "config.yaml").is_file() else None
