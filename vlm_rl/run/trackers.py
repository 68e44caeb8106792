"""Optional experiment trackers behind one interface. Each library is imported only when it is asked for.

A run's own record is metrics.jsonl. A tracker only mirrors it: none is needed, and none is ever read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from vlm_rl.config import Config
from vlm_rl.errors import UserError
from vlm_rl.run.writing import writing


class Tracker(Protocol):
    """A place that also receives the metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step; those that are not finite are left out."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


def make_trackers(names: Sequence[str], run_dir: Path, config: Config) -> list[Tracker]:
    """Return one tracker per name, in order. Raises UserError for a missing library."""
    return [TRACKERS[name](run_dir, config) for name in names]


class TensorBoardTracker:
    """Writes event files to tensorboard/ in the run directory; `tensorboard --logdir RUN` shows them."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        _library("tensorboard")
        self._folder = run_dir / "tensorboard"
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))
        self._writer.add_text("config", f"```\n{config.model_dump_json(indent=1)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with writing(self._folder):
            for name, value in _finite(values).items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()


class ModuleTracker:
    """Logs to wandb, or to trackio, which has the same three functions."""

    def __init__(self, module: ModuleType, **options: Any) -> None:
        self._module = module
        self._module.init(**options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(_finite(values), step=step)

    def close(self) -> None:
        self._module.finish()


def _wandb(run_dir: Path, config: Config) -> Tracker:
    return ModuleTracker(
        _library("wandb"),
        project="vlm-rl",
        name=run_dir.name,
        dir=str(run_dir),
        config=config.model_dump(mode="json"),
    )


def _trackio(run_dir: Path, config: Config) -> Tracker:
    return ModuleTracker(
        _library("trackio"), project="vlm-rl", name=run_dir.name, config=config.model_dump(mode="json")
    )


def check_trackers(names: Iterable[str]) -> None:
    """Raise UserError for a tracker whose library, which has the tracker's name, is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(
                f"log.trackers: {name} is not installed; install it (`uv pip install {name}`) "
                "or remove it from the list; metrics.jsonl is written either way"
            )


def _library(name: str) -> ModuleType:
    check_trackers([name])
    return import_module(name)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


TRACKERS: dict[str, Callable[[Path, Config], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": _wandb,
    "trackio": _trackio,
}
