"""What every experiment tracker is told of a run, and the interface of all.

A run's record is its directory. A tracker mirrors it (vlm_rl.run.mirror): none is needed, none is ever read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

NUM_BINS = 32


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run when it begins, and again when it continues."""

    path: Path
    id: str  # the tracker's, kept in the run directory; "" for a new run of MLflow, which makes one
    config: Mapping[str, Any]  # plain JSON
    project: str
    group: str | None
    tags: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        return self.path.resolve().name


@dataclass(frozen=True, slots=True, eq=False)
class LoggedSample:
    """A row of a tracker's table: a stored response with its problem."""

    problem: str
    image: Image.Image | None  # the problem's first, small; next to it what an environment showed
    question: str  # "" if the prepared set is gone; so is the gold
    gold: str
    response: str  # of an episode the whole conversation
    verdict: str
    reason: str
    reward: float
    tokens: int

    def cells(self) -> dict[str, Any]:
        """Return the cells by column, without the image."""
        return {name: getattr(self, name) for name in COLUMNS}


COLUMNS = [field.name for field in fields(LoggedSample) if field.name != "image"]


class Tracker(Protocol):
    """A place that mirrors a run. A method may raise whatever its client raises."""

    id: str  # by which a later process continues the same run
    where: str  # where a reader finds the run, or the command that shows or sends it

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add finite values to a step. Steps never decrease; a step may be added to more than once."""
        ...

    def responses(self, step: int, vectors: Mapping[str, np.ndarray], samples: Sequence[LoggedSample]) -> None:
        """Add the distribution of each vector, one value per response, and a table of samples; there may be none."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...
