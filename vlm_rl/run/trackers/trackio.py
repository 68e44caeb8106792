"""Hugging Face's trackio."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module

import numpy as np

from vlm_rl.run.trackers.tracker import NUM_BINS, LoggedSample, TrackedRun


class TrackioTracker:
    """Log to trackio: its local database, or the Space or server that its environment variables name."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = import_module("trackio")
        config = {**run.config, "tags": list(run.tags)}  # trackio has no tags
        name = f"{run.name}-{run.id}"  # trackio resumes by name, and two folders may have the same one
        self._run = self._client.init(
            project=run.project, name=name, group=run.group, config=config, resume="allow", embed=False
        )
        self.id, self.where = run.id, f"trackio show --project {shlex.quote(run.project)}"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def responses(self, step: int, vectors: Mapping[str, np.ndarray], samples: Sequence[LoggedSample]) -> None:
        entries = {f"histograms/{k}": self._client.Histogram(v, num_bins=NUM_BINS) for k, v in vectors.items()}
        images = [s.image and self._client.Image(s.image) for s in samples]
        if samples:
            rows = [{"image": image, **s.cells()} for image, s in zip(images, samples, strict=True)]
            entries["samples"] = self._client.Table(data=rows)
        self._run.log(entries, step=step)

    def close(self) -> None:
        self._run.finish()
