"""Weights & Biases, on its service or on disk."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np

from vlm_rl.run.trackers.tracker import COLUMNS, NUM_BINS, LoggedSample, TrackedRun


class WandbTracker:
    """Log to Weights & Biases; without network or login into wandb/ of the run directory, for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_DATA_DIR", str(run.path / "wandb"))  # images of a table wait there for a sync
        self._client = import_module("wandb")
        options = {
            "project": run.project,
            "group": run.group,
            "tags": run.tags,
            "id": run.id,
            "resume": "allow",
            "name": run.name,
            "dir": str(run.path),
            "config": dict(run.config),
        }
        try:
            self._run = self._client.init(**options)
        except self._client.Error:
            self._run = self._client.init(**options, mode="offline")
        self.id = run.id
        folder = shlex.quote(str(Path(self._run.dir).parent))
        self.where = f"offline; `wandb sync {folder}` sends it" if self._run.offline else str(self._run.url)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def responses(self, step: int, vectors: Mapping[str, np.ndarray], samples: Sequence[LoggedSample]) -> None:
        entries = {f"histograms/{k}": self._client.Histogram(v, num_bins=NUM_BINS) for k, v in vectors.items()}
        if samples:
            table = entries["samples"] = self._client.Table(columns=["image", *COLUMNS])
            for sample in samples:
                image = None if sample.image is None else self._client.Image(sample.image)
                table.add_data(image, *sample.cells().values())
        self._run.log(entries, step=step)

    def close(self) -> None:
        self._run.finish()
