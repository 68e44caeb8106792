"""SwanLab."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

from vlm_rl.run.trackers.tracker import COLUMNS, NUM_BINS, LoggedSample, TrackedRun


class SwanLabTracker:
    """Log to SwanLab; without network or login into swanlog/ of the run directory, for `swanlab sync`."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = import_module("swanlab")
        options = {
            "project": run.project,
            "group": run.group,
            "tags": list(run.tags),
            "id": run.id,
            "resume": "allow",
            "name": run.name,
            "log_dir": str(run.path / "swanlog"),
            "config": dict(run.config),
        }
        self.id, folder = run.id, shlex.quote(str(run.path / "swanlog"))
        try:
            self._run = self._client.init(**options)
        except Exception:  # what no login and no network raise differs by version
            with suppress(Exception):
                self._client.finish()
            self._run = self._client.init(**options, mode="offline")
            self.where = f"offline; `swanlab sync {folder}/run-*-{run.id}` sends it"
        else:
            self.where = f"swanlab watch {folder}"
            with suppress(ValueError):  # in its local mode a run has no address
                self.where = str(self._run.url or self.where)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._client.log(dict(values), step=step)

    def responses(self, step: int, vectors: Mapping[str, np.ndarray], samples: Sequence[LoggedSample]) -> None:
        """Add both if there are samples: SwanLab has no histograms, and each is drawn as bars."""
        if not samples:
            return
        entries: dict[str, Any] = {}
        for name, vector in vectors.items():
            counts, edges = np.histogram(vector, bins=NUM_BINS)
            bars = self._client.echarts.Bar().add_xaxis([f"{edge:.4g}" for edge in edges[:-1]])
            entries[f"histograms/{name}"] = bars.add_yaxis(name, counts.tolist())
        rows = [list(sample.cells().values()) for sample in samples]
        entries["samples"] = self._client.echarts.Table().add(COLUMNS, rows)
        images = [self._client.Image(s.image, caption=s.problem) for s in samples if s.image is not None]
        self._client.log(entries | ({"samples/images": images} if images else {}), step=step)

    def close(self) -> None:
        self._client.finish()
