"""Read and write a run directory: the contract between training, report and demo.

    config.yaml                          the resolved configuration; of a supervised run: sft.yaml
    metrics.jsonl                        one object per line: step, attempt, then metrics; only appended to
    rollouts/step-000012.parquet         one row per response (RolloutRow)
    eval/<benchmark>/step-000060.parquet one row per response (EvalRecord)
    eval/<benchmark>/step-000060.json    its summary, written last
    checkpoints/step-000060/             owned by vlm_rl.run.checkpoint
    log.txt                              what rank 0 showed, with the time (vlm_rl.run.run_log)
    controls.json                        optional: accuracies that show what the learning curve means
    CONTAMINATED.json                    only if the run was trained on rows of a benchmark

After a resume some steps are trained again under a higher attempt number; readers take the last attempt. Files other
than metrics.jsonl are written under a temporary name and moved into place: no reader sees half a file.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlm_rl.config import (
    Config,
    SftConfig,
    check_benchmark_name,
    load_config,
    load_sft_config,
    save_config,
)
from vlm_rl.errors import UserError
from vlm_rl.run.best import Best, best_of
from vlm_rl.run.eval_record import EVAL_SCHEMA, EvalRecord
from vlm_rl.run.eval_result import EvalResult
from vlm_rl.run.rollout_row import LATER_ROLLOUT_COLUMNS, READ_ROLLOUT_SCHEMA, ROLLOUT_SCHEMA, RolloutRow
from vlm_rl.run.run_files import place_of, read_records, table_of, write_atomically, write_parquet
from vlm_rl.run.writing import writing
from vlm_rl.untrusted.json_object import read_object
from vlm_rl.untrusted.plain_files import check_plain, check_plain_tree

if TYPE_CHECKING:
    import pandas as pd

    from vlm_rl.run.plot import RunPlot

SFT_CONFIG = "sft.yaml"  # the configuration in the folder of a supervised run


class RunDirectory:
    """A run's folder. `create` makes a new one and `open` checks an existing one; all else needs one of the two."""

    def __init__(self, path: str | Path, *, config_file: str = "config.yaml") -> None:
        self.path = Path(path)
        self.config_file = config_file  # supervised runs have SFT_CONFIG: nothing takes them for others

    @classmethod
    def of_any_kind(cls, path: str | Path) -> RunDirectory:
        """Open a run of `vlm-rl train` or `vlm-rl sft`. Raises UserError if it is neither."""
        is_supervised = (Path(path) / SFT_CONFIG).is_file()
        return cls(path, config_file=SFT_CONFIG if is_supervised else "config.yaml").open()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Return the folder's name."""
        return self.path.resolve().name

    # -- beginning ------------------------------------------------------------------------------

    def create(self, config: Config | SftConfig) -> RunDirectory:
        """Make the folder with its configuration; a failure leaves nothing behind.

        Raises UserError if the folder exists and is not empty, or cannot be written.
        """
        self.refuse_existing()
        place = place_of(self.path)
        made = [p for p in place.absolute().parents if not p.exists()]  # innermost first
        work: Path | None = None
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
            work.chmod(0o755)
            save_config(config, work / self.config_file)
            work.rename(place)  # replaces an empty folder, but not a filled one
        except OSError as error:
            if work is not None:
                shutil.rmtree(work, ignore_errors=True)
            for parent in made:
                with suppress(OSError):
                    parent.rmdir()
            raise self._not_writable(error.strerror or str(error)) from None
        return self

    def replace_config(self, config: Config | SftConfig) -> None:
        """Replace the run's configuration. Raises UserError if the file system refuses."""
        path = self.path / self.config_file
        with writing(path):
            write_atomically(path, partial(save_config, config))

    def check_new(self) -> None:
        """Raise UserError if `create` would fail, as far as that can be told without writing."""
        self.refuse_existing()
        parent = next(folder for folder in place_of(self.path).absolute().parents if folder.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise self._not_writable(f"{parent} is not a folder that you may write to")

    def _not_writable(self, why: str) -> UserError:
        return UserError(
            f"cannot write the run directory {self.path}: {why}; choose a different place with out=FOLDER"
        )

    def refuse_existing(self) -> None:
        """Raise UserError if `create` would find something in its place."""
        if self.path.is_dir() and not any(self.path.iterdir()):
            return
        if (self.path / self.config_file).exists():
            raise UserError(f"{self.path} already holds a run; resume it with --resume, or choose a different out")
        if self.path.exists() or self.path.is_symlink():
            raise UserError(f"{self.path} exists and is not an empty folder; choose a different out")

    def open(self) -> RunDirectory:
        """Check that this is a run and that all its files are plain files. Raises UserError otherwise."""
        if not self.path.is_dir():
            raise UserError(f"no run directory at {self.path}; `vlm-rl train` or `vlm-rl quickstart` makes one")
        check_plain(self.path / self.config_file)
        if not (self.path / self.config_file).is_file():
            raise UserError(f"{self.path} is not a run directory: it has no {self.config_file}")
        check_plain_tree(self.path)
        return self

    def remove_leftovers(self) -> None:
        """Delete files that a killed writer left half-written. Must not run while another run writes here.

        Those of its trackers are left: a killed run's mirror lives on for a while.
        """
        for path in self.path.rglob(".*.tmp"):
            if path.parent != self.path / "trackers":
                path.unlink(missing_ok=True)

    def config(self) -> Config:
        """Return the resolved configuration. Raises UserError if it does not parse."""
        return load_config(self.path / "config.yaml")

    def any_config(self, overrides: Sequence[str] = ()) -> Config | SftConfig:
        """Return the configuration, of a supervised run too, with keys changed as on the command line.

        Raises UserError if it does not parse.
        """
        load = load_sft_config if self.config_file == SFT_CONFIG else load_config
        return load(self.path / self.config_file, overrides)

    def config_text(self) -> str:
        """Return the text of config.yaml."""
        return (self.path / "config.yaml").read_text(encoding="utf-8")

    # -- metrics --------------------------------------------------------------------------------

    def append_metrics(self, step: int, attempt: int, values: Mapping[str, float]) -> None:
        """Append one line of metrics and flush it. Earlier lines never change, so a resume keeps what was logged.

        A value that is not finite is stored as null and read back as NaN. Raises UserError if the file system
        refuses.
        """
        record = {"step": int(step), "attempt": int(attempt)}
        record |= {key: _finite(value) for key, value in values.items() if key not in record}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a kill cut the last line short: start a new one
                    line = b"\n" + line
            file.write(line)
            file.flush()

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each step, in order: its last attempt's, later lines overriding earlier ones."""
        merged: dict[int, dict[str, float]] = {}
        for record in self._metric_records():
            step, attempt = record["step"], record["attempt"]
            known = merged.get(step)
            if known is None or attempt > known["attempt"]:
                merged[step] = record
            elif attempt == known["attempt"]:
                known.update(record)
        return [merged[step] for step in sorted(merged)]

    def _metric_records(self) -> Iterator[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        check_plain(path)
        with path.open("rb") as file:
            yield from (record for line in file if (record := metric_record(line)) is not None)

    # -- rollouts -------------------------------------------------------------------------------

    def write_rollouts(self, step: int, attempt: int, rows: Sequence[RolloutRow]) -> Path:
        """Write the responses of a step. A later attempt replaces the file.

        Raises UserError if the file system refuses.
        """
        assert all(row.step == step and row.attempt == attempt for row in rows)
        path = self._rollout_path(step)
        table = table_of(rows, ROLLOUT_SCHEMA)
        with self._writing_below("rollouts"):
            write_atomically(path, partial(write_parquet, table))
        return path

    def rollouts(self, step: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return a step's responses, all columns or those named. Raises UserError if it cannot."""
        path = self._rollout_path(step)
        if not path.exists():
            raise UserError(f"{self.path} has no rollouts of step {step}; it has {_span(self.rollout_steps())}")
        advice = "delete it to continue without this step"
        return read_records(path, columns, READ_ROLLOUT_SCHEMA, later=LATER_ROLLOUT_COLUMNS, advice=advice)

    def rollout_steps(self) -> list[int]:
        """Return the steps whose rollouts are stored, ascending."""
        return sorted(_step_files(self.path / "rollouts", ".parquet"))

    def _rollout_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"step-{step:06d}.parquet"

    # -- evaluations ----------------------------------------------------------------------------

    def write_eval(
        self,
        benchmark: str,
        step: int,
        rows: Sequence[EvalRecord] | Sequence[Mapping[str, Any]],
        summary: Mapping[str, Any],
    ) -> Path:
        """Write an evaluation: first the records, then the summary, without which it does not count.

        Args:
            benchmark: the name of its folder.
            step: of the checkpoint that was measured.
            rows: one record per response.
            summary: its numbers, as plain JSON.

        Raises UserError if the file system refuses.
        """
        check_benchmark_name(benchmark)
        path = self.path / "eval" / benchmark / f"step-{step:06d}.parquet"
        table = table_of(rows, EVAL_SCHEMA)
        with self._writing_below("eval", benchmark):
            path.with_suffix(".json").unlink(missing_ok=True)
            write_atomically(path, partial(write_parquet, table))
            _write_json(path.with_suffix(".json"), summary)
        return path

    def evals(self, benchmark: str | None = None) -> list[EvalResult]:
        """Return the finished evaluations of one benchmark or of all, ordered by benchmark and step.

        Raises UserError for a damaged summary.
        """
        root = self.path / "eval"
        folders = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        return [
            EvalResult(folder.name, step, path, _read_json(path.with_suffix(".json")))
            for folder in folders
            if benchmark in (None, folder.name)
            for step, path in sorted(_step_files(folder, ".parquet").items())
            if path.with_suffix(".json").exists()
        ]

    def metrics_frame(self) -> pd.DataFrame:
        """Return the metrics as a data frame of pandas, one row per step."""
        import pandas as pd

        frame = pd.DataFrame(self.metrics())
        return frame if frame.empty else frame.set_index("step")

    def plot(self, what: str = "length") -> RunPlot:
        """Return a plot over the steps, which a notebook shows; it is a Figure of matplotlib.

        Args:
            what: length, reward, accuracy (of evaluations, with their 95 % intervals), or the name of a metric.

        Raises UserError for a metric that the run did not log.
        """
        from vlm_rl.run.plot import plot_run

        return plot_run(self.name, self.metrics(), self.evals(), what)

    def best(self) -> Best | None:
        """Return the best step on the first set of data.eval, evaluated and saved; None if none is evaluated.

        Raises UserError for a damaged file.
        """
        if not (evaluated := self.config().data.eval):
            return None
        return best_of(self.evals(Path(evaluated[0]).resolve().name), dict(self.checkpoints()))

    # -- the rest -------------------------------------------------------------------------------

    @contextmanager
    def _writing_below(self, *names: str) -> Iterator[None]:
        """Make the folder self.path/NAME/..., and raise UserError for what the file system refuses in the block.

        It is made level by level: a run folder that vanished is not made again without the rest of the run.
        """
        folders = [self.path.joinpath(*names[: depth + 1]) for depth in range(len(names))]
        with writing(folders[-1]):
            for folder in folders:
                folder.mkdir(exist_ok=True)
            yield

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return (step, folder) of each checkpoint that has a manifest, ascending, without verifying it."""
        folders = _step_files(self.path / "checkpoints", "")
        return [(step, path) for step, path in sorted(folders.items()) if (path / "MANIFEST.json").exists()]

    def write_controls(self, controls: Mapping[str, Any]) -> None:
        """Store the accuracies of control measurements; vlm_rl.report.run_report explains the keys."""
        _write_json(self.path / "controls.json", controls)

    def controls(self) -> dict[str, Any]:
        """Return the accuracies of the control measurements; empty if there are none."""
        path = self.path / "controls.json"
        return _read_json(path) if path.exists() else {}

    def stamp_contaminated(self, sets: Sequence[str]) -> None:
        """Mark the run as trained on rows of these benchmarks. Stamps add up and are never removed."""
        known = sorted({*self.contaminated(), *sets})
        _write_json(self.path / "CONTAMINATED.json", {"trained_on_test_rows_of": known})

    def contaminated(self) -> tuple[str, ...]:
        """Return the benchmarks whose rows were trained on; empty for a clean run. Raises UserError as evals does."""
        path = self.path / "CONTAMINATED.json"
        if not path.exists():
            return ()
        names = _read_json(path).get("trained_on_test_rows_of", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(
                f"{path} is damaged (it names no list of benchmarks): restore it from a copy, or remove it"
            )
        return tuple(names)


def distinct_names(runs: Sequence[RunDirectory]) -> list[str]:
    """Return a name for each run: the end of its path, long enough to tell them apart."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max((len(p) for p in parts), default=0)):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(run.path) for run in runs]


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    text = json.dumps(dict(tree), indent=1, default=float) + "\n"
    write_atomically(path, lambda place: place.write_text(text, encoding="utf-8"))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError if the file is damaged."""
    check_plain(path)
    try:
        tree = read_object(path.read_bytes())
        json.dumps(tree, ensure_ascii=False).encode()  # half of a surrogate pair could not be shown
        return tree
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}): restore it from a copy, or remove it") from None


def metric_record(line: bytes) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl, or None if it is damaged, such as a line that a kill cut short."""
    try:
        raw = read_object(line)
        counts = {key: raw.pop(key) for key in ("step", "attempt")}
        "".join(raw).encode()  # a ValueError for half of a surrogate pair, which no page can show
        values = {key: math.nan if value is None else float(value) for key, value in raw.items()}
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    # The files of rollouts hold both as int32.
    is_sound = all(type(count) is int and 0 <= count < 2**31 for count in counts.values())
    return counts | values if is_sound else None


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _step_files(folder: Path, suffix: str) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    pattern = re.compile(r"step-(\d+)" + re.escape(suffix))
    matches = ((pattern.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match}


def _span(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none at all"
