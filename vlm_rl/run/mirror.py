"""Mirror a run directory into one tracker, in a separate process that a run starts and never waits for.

    python -m vlm_rl.run.mirror RUN NAME LOG    # LOG: project, group, tags and samples_every as JSON

It reads what the run has written, sends what the tracker does not have, and ends once its standard input or its
parent has. trackers/NAME.json keeps how far it has come: a later process, of a resume or of `vlm-rl track`,
continues there. A step is sent once: steps that a resume trains again are not sent again.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from vlm_rl.data.images import decode_image
from vlm_rl.data.stored_images import ImageColumn
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory, metric_record
from vlm_rl.run.run_files import write_atomically
from vlm_rl.run.terminal import contrasts, shortened
from vlm_rl.run.trackers.registry import TRACKERS
from vlm_rl.run.trackers.tracker import LoggedSample, TrackedRun, Tracker
from vlm_rl.run.turn_record import StoredTurn, conversation, read_turns
from vlm_rl.untrusted.json_object import read_object

POLL_SECONDS = 1.0
END_SECONDS = 30.0  # after the run has ended
NUM_SAMPLES = 8  # rows of a table
MAX_CHARACTERS = 4000  # of a question or response
MAX_SIDE = 256  # pixels of an image
_GAP = 4  # pixels between images

# Of a summary: how the numbers came about.
_SETTINGS = {"sampling", "seed", "step", "policy_version", "num_ranks", "min_pixels", "max_pixels", "versions"}


@dataclass(frozen=True, slots=True)
class _ShownRow:
    """What a table shows of a RolloutRow."""

    prompt_id: str
    text: str
    verdict: str
    reason: str
    reward: float
    length: int
    turns: str = ""


@dataclass
class Progress:
    """What a tracker has: the content of trackers/NAME.json."""

    id: str = ""  # the tracker's, of the run that a later process continues
    where: str = ""
    step: int = -1  # the last step sent, and its attempt
    attempt: int = 0
    offset: int = 0  # bytes of metrics.jsonl that were read
    evals: list[list[Any]] = field(default_factory=list)  # [set, step] of each evaluation sent
    error: str = ""  # why the last process ended before its time

    @classmethod
    def read(cls, run: Path, name: str) -> Progress:
        """Read the progress of a tracker of this run; an empty one if there is none."""
        file = progress_file(run, name)
        if not file.exists():
            return cls()
        try:
            return cls(**read_object(file.read_bytes()))
        except (ValueError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}): remove it, and a new run of {name} is begun") from None

    def write(self, run: Path, name: str) -> None:
        """Replace the file."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        write_atomically(progress_file(run, name), lambda place: place.write_text(text, encoding="utf-8"))


def progress_file(run: Path, name: str) -> Path:
    """Return trackers/NAME.json of a run directory."""
    return run / "trackers" / f"{name}.json"


class Mirror:
    """One tracker of one run."""

    def __init__(self, run: RunDirectory, name: str, log: Mapping[str, Any]) -> None:
        self.run, self.name = run, name
        self.samples_every = log["samples_every"]
        self.config = run.any_config()
        self.progress = Progress.read(run.path, name)
        self.progress.error = ""
        own_id = "" if name == "mlflow" else uuid.uuid4().hex[:8]  # MLflow makes one
        tags = (*log["tags"], *(["CONTAMINATED"] if run.contaminated() else []))
        self.tracker: Tracker = TRACKERS[name](
            TrackedRun(
                path=run.path,
                id=self.progress.id or own_id,
                config=self.config.model_dump(mode="json"),
                project=log["project"],
                group=log["group"],
                tags=tags,
            )
        )
        self.progress.id, self.progress.where = self.tracker.id, self.tracker.where
        self.progress.write(run.path, name)
        self._problems: dict[str, tuple[ImageColumn, int, str, str]] | None = None

    def catch_up(self) -> None:
        """Send everything that the run has written and the tracker does not have."""
        sent = self.progress
        written = time.monotonic()
        for step, values in self._events():
            finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
            if finite:
                self.tracker.scalars(step, finite)
            if time.monotonic() - written > POLL_SECONDS:
                sent.write(self.run.path, self.name)
                written = time.monotonic()
        sent.write(self.run.path, self.name)

    def _events(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the values of each step in order, those of an evaluation after its step's own.

        The metrics are read first: an evaluation of a later step than theirs waits for the next time.
        """
        lines = list(self._new_lines())
        last = max((step for step, _, _, _ in lines), default=max(self.progress.step, 0))
        evals = [
            result
            for result in self.run.evals()
            if result.step <= last and [result.benchmark, result.step] not in self.progress.evals
        ]
        evals.sort(key=lambda result: result.step)
        for step, attempt, values, offset in lines:
            while evals and evals[0].step < step:
                yield self._evaluation(evals.pop(0))
            sent = self.progress
            sent.offset = offset
            if step > sent.step:
                sent.step, sent.attempt = step, attempt
                self._send_responses(step)
                yield step, values
            elif (step, attempt) == (sent.step, sent.attempt):
                yield step, values
        for result in evals:
            yield self._evaluation(result)

    def _new_lines(self) -> Iterator[tuple[int, int, dict[str, float], int]]:
        """Yield (step, attempt, values, end in bytes) of each whole line of metrics.jsonl that was not read yet."""
        path, offset = self.run.path / "metrics.jsonl", self.progress.offset
        if not path.exists():
            return
        with path.open("rb") as file:
            if offset > os.fstat(file.fileno()).st_size:  # the machine went down, or an older copy was put back
                offset = 0
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                if record := metric_record(line):
                    yield int(record.pop("step")), int(record.pop("attempt")), record, offset

    def _evaluation(self, result: Any) -> tuple[int, dict[str, float]]:
        self.progress.evals.append([result.benchmark, result.step])
        return result.step, dict(_numbers(result.summary, f"eval/{result.benchmark}"))

    # -- responses -----------------------------------------------------------------------------------

    def _send_responses(self, step: int) -> None:
        if step not in self.run.rollout_steps():
            return
        shows = bool(self.samples_every) and step % self.samples_every == 0
        table = self.run.rollouts(
            step, [column.name for column in fields(_ShownRow)] if shows else ["reward", "length"]
        )
        vectors = {name: table[name].to_numpy().astype(np.float64) for name in ("length", "reward")}
        vectors = {name: vector[np.isfinite(vector)] for name, vector in vectors.items()}
        vectors = {name: vector for name, vector in vectors.items() if len(vector)}
        rows = [_ShownRow(**row) for row in table.to_pylist()] if shows else []
        samples = [self._sample(row) for row in contrasts(rows, NUM_SAMPLES)]
        self.tracker.responses(step, vectors, samples)

    def _sample(self, row: _ShownRow) -> LoggedSample:
        image, question, gold = self._problem(row.prompt_id)
        turns = _turns_of(row)
        seen = [_opened(data) for turn in turns for data in turn.images]
        return LoggedSample(
            problem=row.prompt_id,
            image=_side_by_side([picture for picture in (image, *seen) if picture is not None]),
            question=shortened(question, MAX_CHARACTERS),
            gold=shortened(gold, MAX_CHARACTERS),
            response=shortened(conversation(turns) or row.text, MAX_CHARACTERS),
            verdict=row.verdict,
            reason=row.reason or "",
            reward=row.reward,
            tokens=row.length,
        )

    def _problem(self, problem_id: str) -> tuple[Image.Image | None, str, str]:
        """Return the first image, the question and the gold of a problem; nothing if its set is gone."""
        if self._problems is None:
            self._problems = dict(_problems_of(self.config.data.train))
        if problem_id not in self._problems:
            return None, "", ""
        column, index, question, gold = self._problems[problem_id]
        try:
            images = column.row(index)
            image = decode_image(images[0], where=problem_id) if images else None
        except UserError:  # the file has changed since: the rest of the row is still worth a look
            image = None
        if image is not None:
            image.thumbnail((MAX_SIDE, MAX_SIDE))
        return image, question, gold


def _turns_of(row: _ShownRow) -> list[StoredTurn]:
    try:
        return read_turns(row.turns)
    except UserError:  # written by somebody else: the last turn is in `text`
        return []


def _opened(data: bytes) -> Image.Image | None:
    try:
        return decode_image(data, where="a turn")
    except UserError:
        return None


def _side_by_side(pictures: Sequence[Image.Image]) -> Image.Image | None:
    """Return the problem's picture with those that the environment showed to its right."""
    if len(pictures) < 2:
        return pictures[0] if pictures else None
    width = sum(picture.width for picture in pictures) + _GAP * (len(pictures) - 1)
    strip = Image.new("RGB", (width, max(picture.height for picture in pictures)), "white")
    left = 0
    for picture in pictures:
        strip.paste(picture, (left, 0))
        left += picture.width + _GAP
    return strip


def _problems_of(sets: list[str]) -> Iterator[tuple[str, tuple[ImageColumn, int, str, str]]]:
    for path in sets:
        try:
            column = ImageColumn(Path(path) / "data.parquet")
            table = column.table().select(["id", "question", "answer"])
        except (pa.ArrowException, OSError, KeyError):  # moved or removed since
            continue
        for index, row in enumerate(table.to_pylist()):
            yield row["id"], (column, index, row["question"], row["answer"])


def _numbers(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield every number of a summary under its path; the two ends of an interval as low and high."""
    for key, value in tree.items():
        if key in _SETTINGS:
            continue
        name = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, name)
        elif key == "interval" and value:
            yield from zip((f"{name}/low", f"{name}/high"), map(float, value), strict=True)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


# -- the process -----------------------------------------------------------------------------------


def _mirror(run: RunDirectory, name: str, log: Mapping[str, Any], *, parent: int) -> None:
    mirror = Mirror(run, name, log)
    has_ended = False
    while not has_ended:
        has_ended = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0]) or os.getppid() != parent
        mirror.catch_up()
    mirror.tracker.close()


def _outlive(parent: int) -> None:
    """End this process some time after its parent: a client that hangs would keep it for ever."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    time.sleep(END_SECONDS)
    os._exit(1)


def main(path: str, name: str, log: str) -> None:
    """Mirror until the run ends. What goes wrong is said in trackers/NAME.json."""
    parent = os.getppid()
    threading.Thread(target=_outlive, args=(parent,), daemon=True).start()
    os.nice(10)
    run = RunDirectory.of_any_kind(path)
    with (Path(path) / "trackers" / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a killed run may still be sending
        try:
            _mirror(run, name, json.loads(log), parent=parent)
        except Exception as error:
            progress = Progress.read(run.path, name)
            progress.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            progress.write(run.path, name)
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
