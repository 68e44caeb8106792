"""The trackers by the names of `log.trackers`. A library is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec

from vlm_rl.errors import UserError
from vlm_rl.run.trackers.mlflow import MlflowTracker
from vlm_rl.run.trackers.swanlab import SwanLabTracker
from vlm_rl.run.trackers.tensorboard import TensorBoardTracker
from vlm_rl.run.trackers.tracker import TrackedRun, Tracker
from vlm_rl.run.trackers.trackio import TrackioTracker
from vlm_rl.run.trackers.wandb import WandbTracker

TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanLabTracker,
}


def check_trackers(names: Iterable[str]) -> None:
    """Raise UserError for a tracker whose library, which has the tracker's name, is not installed."""
    for name in names:
        # A folder of the name, such as one that a tracker wrote into the working folder, is found without an origin.
        if (spec := find_spec(name)) is None or spec.origin is None:
            raise UserError(
                f"log.trackers: {name} is not installed; install it (`uv pip install {name}`) "
                "or remove it from the list; metrics.jsonl is written either way"
            )
