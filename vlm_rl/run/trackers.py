"""What each experiment tracker is told, through its own client. A library is imported only where it is asked for.

A run's own record is its directory. A tracker mirrors it (vlm_rl.run.mirror): none is needed, none is ever read back.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from vlm_rl.config import leaves
from vlm_rl.errors import UserError

NUM_BINS = 32


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run when it begins, and again when it continues."""

    path: Path
    id: str  # the tracker's, kept in the run directory; "" for a new run of MLflow, which gives its own
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
    """A row of a tracker's table: a stored response beside its problem."""

    problem: str
    image: Image.Image | None  # the problem's first, small
    question: str  # "" where the prepared set is no longer there; so is the gold
    gold: str
    response: str
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


class TrackioTracker:
    """Log to trackio: its local database, or the Space or server that its own variables name."""

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


class MlflowTracker:
    """Log to MLflow: its own default store, or the server that MLFLOW_TRACKING_URI names."""

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
        """Add both where there are samples: MLflow has no histograms, and each picture is a file."""
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
        """Add both where there are samples: SwanLab has no histograms, and each is drawn as bars."""
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


def check_trackers(names: Iterable[str]) -> None:
    """Raise UserError for a tracker whose library, which has the tracker's name, is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(
                f"log.trackers: {name} is not installed; install it (`uv pip install {name}`) "
                "or remove it from the list; metrics.jsonl is written either way"
            )


# -- forms that a client wants ---------------------------------------------------------------------


def _as_html(cells: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells as text that a page shows as it is: a response may hold tags, and is not to be trusted."""
    return {name: html.escape(str(value), quote=False) for name, value in cells.items()}


def _markdown(samples: Sequence[LoggedSample]) -> str:
    """Return the samples as a table in Markdown, whose first column is the number of the sample's image."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for number, sample in enumerate(samples, start=1):
        cells = [cell.replace("|", "&#124;").replace("\n", "<br>") for cell in _as_html(sample.cells()).values()]
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _as_yaml(value: Any) -> str:
    import yaml

    return f"```\n{yaml.safe_dump(value, sort_keys=False)}```"


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


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanLabTracker,
}
