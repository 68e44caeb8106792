"""Event files for TensorBoard."""

from __future__ import annotations

import html
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from typing import Any

import numpy as np
import yaml
from PIL import Image

from vlm_rl.run.trackers.tracker import COLUMNS, NUM_BINS, LoggedSample, TrackedRun


class TensorBoardTracker:
    """Write event files to tensorboard/ in the run directory.

    TensorBoard's own writer takes them, without torch, whose import would cost this process seconds.
    """

    def __init__(self, run: TrackedRun) -> None:
        folder = run.path / "tensorboard"
        self.id, self.where = run.id, f"tensorboard --logdir {shlex.quote(str(run.path.parent))}"
        self._protos = import_module("tensorboard.compat.proto.event_pb2")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2")
        self._tensor = import_module("tensorboard.compat.proto.tensor_pb2")
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
        facts = {"config": run.config, "project": run.project, "group": run.group, "tags": list(run.tags)}
        self._add(0, [self._text(name, _as_yaml(value)) for name, value in facts.items()])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, [self._summary.Summary.Value(tag=name, simple_value=v) for name, v in values.items()])

    def responses(self, step: int, vectors: Mapping[str, np.ndarray], samples: Sequence[LoggedSample]) -> None:
        entries = [self._histogram(f"histograms/{name}", vector) for name, vector in vectors.items()]
        if samples:
            entries.append(self._text("samples", _markdown(samples)))
        for number, sample in enumerate(samples, start=1):
            if sample.image is not None:
                entries.append(self._image(f"samples/{number}", sample.image))
        self._add(step, entries)

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, entries: list[Any]) -> None:
        summary = self._summary.Summary(value=entries)
        self._writer.add_event(self._protos.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def _text(self, tag: str, text: str) -> Any:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        tensor = self._tensor.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        tensor.tensor_shape.dim.add(size=1)
        return self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def _histogram(self, tag: str, vector: np.ndarray) -> Any:
        counts, edges = np.histogram(vector, bins=NUM_BINS)
        facts = {"min": vector.min(), "max": vector.max(), "num": len(vector), "sum": vector.sum()}
        histogram = self._summary.HistogramProto(
            **facts, sum_squares=vector @ vector, bucket_limit=edges[1:].tolist(), bucket=counts.tolist()
        )
        return self._summary.Summary.Value(tag=tag, histo=histogram)

    def _image(self, tag: str, image: Image.Image) -> Any:
        buffer = BytesIO()
        image.save(buffer, format="PNG")
        picture = self._summary.Summary.Image(
            height=image.height, width=image.width, colorspace=3, encoded_image_string=buffer.getvalue()
        )
        return self._summary.Summary.Value(tag=tag, image=picture)


def _markdown(samples: Sequence[LoggedSample]) -> str:
    """Return the samples as a table in Markdown, whose first column is the number of the sample's image."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for number, sample in enumerate(samples, start=1):
        cells = [cell.replace("|", "&#124;").replace("\n", "<br>") for cell in _as_html(sample.cells()).values()]
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _as_html(cells: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells as text that a page shows as it is: a response may hold tags, and is not to be trusted."""
    return {name: html.escape(str(value), quote=False) for name, value in cells.items()}


def _as_yaml(value: Any) -> str:
    return f"```\n{yaml.safe_dump(value, sort_keys=False)}```"
