"""MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from vlm_rl.config import leaves
from vlm_rl.run.trackers.tracker import COLUMNS, NUM_BINS, LoggedSample, TrackedRun


class MlflowTracker:
    """Log to MLflow: its default store, or the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = import_module("mlflow")
        experiment = self._client.set_experiment(run.project)
        tags = {"group": run.group, **dict.fromkeys(map(_mlflow_name, run.tags), "true")}
        tags = {name: value for name, value in tags.items() if value is not None}
        self.id = self._client.start_run(run_id=run.id or None, run_name=run.name, tags=tags).info.run_id
        if not run.id:  # a parameter can be set once
            params = {_mlflow_name(key): str(value)[:500] for key, value in leaves(run.config)}
            self._client.log_params(params)
        self.where = f"{self._client.get_tracking_uri()}, experiment {experiment.name}, run {self.id}"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._client.log_metrics({_mlflow_name(name): value for name, value in values.items()}, step=step)

    def responses(self, step: int, vectors: Mapping[str, np.ndarray], samples: Sequence[LoggedSample]) -> None:
        """Add both if there are samples: MLflow has no histograms, and each picture is a file."""
        if not samples:
            return
        for name, vector in vectors.items():
            self._client.log_image(_histogram_image(name, vector), key=f"histograms/{name}", step=step)
        columns: dict[str, list[Any]] = {name: [sample.cells()[name] for sample in samples] for name in COLUMNS}
        if all(sample.image is not None for sample in samples):
            columns["image"] = [self._client.Image(sample.image) for sample in samples]
        self._client.log_table(columns, f"samples/step-{step:06d}.json")

    def close(self) -> None:
        self._client.end_run()


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _histogram_image(name: str, vector: np.ndarray) -> Image.Image:
    """Return a histogram as a picture, for a client that takes pictures and no histograms."""
    import vl_convert

    counts, edges = np.histogram(vector, bins=NUM_BINS)
    ends = edges.tolist()
    bars = [
        {"low": low, "high": high, "count": n}
        for low, high, n in zip(ends[:-1], ends[1:], counts.tolist(), strict=True)
    ]
    chart = {
        "data": {"values": bars},
        "mark": "bar",
        "encoding": {
            "x": {"field": "low", "bin": {"binned": True}, "title": name},
            "x2": {"field": "high"},
            "y": {"field": "count", "type": "quantitative"},
        },
        "width": 320,
        "height": 160,
        "background": "white",
    }
    return Image.open(BytesIO(vl_convert.vegalite_to_png(chart)))
