"""The data sets that `vlm-rl prepare` knows: their readers, and where and how large they are published.

A reader is given a path and a split. It yields a UsableRow or a DroppedRow for every row, so that
in = kept + dropped. To add a data set, write a reader and name it in SOURCES.
A benchmark is added in vlm_rl.evaluation.benchmarks instead: a file, and a line of its registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlm_rl.data_prep.readers import training_sources as training
from vlm_rl.data_prep.readers.benchmarks import read_benchmark
from vlm_rl.data_prep.readers.dapo import read_dapo, read_dapo_processed
from vlm_rl.data_prep.readers.generic import read_generic
from vlm_rl.data_prep.records import DroppedRow, UsableRow
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import Benchmark
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS

Reader = Callable[[Path, str], Iterator[UsableRow | DroppedRow]]


@dataclass(frozen=True, slots=True)
class Source:
    """A data set as it is published."""

    reader: Reader
    hub: str  # its id on the hub; "" if it has none
    files: tuple[str, ...]  # globs of what is needed from the hub's repository
    splits: tuple[str, ...] = ("",)  # the first is the default; "" if there is only one
    rows: tuple[int, ...] = ()  # published numbers of rows, in the order of the splits or of the editions

    def read(self, path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
        """Yield the data set's rows. Raises UserError for a split that does not exist."""
        if split and split not in self.splits:
            raise UserError(
                f"--split {split!r}: this data set has {', '.join(filter(None, self.splits)) or 'no splits'}"
            )
        return self.reader(path, split or self.splits[0])


def _benchmark(benchmark: Benchmark) -> Source:
    reader = partial(read_benchmark, benchmark)
    files = benchmark.files
    return Source(reader, files.hub, files.hub_files, files.splits, files.num_rows)


_PARQUET = ("*.parquet", "**/*.parquet")

SOURCES: dict[str, Source] = {
    "virl39k": Source(
        training.read_virl39k, "TIGER-Lab/ViRL39K", ("39Krelease.parquet", "images.zip"), rows=(38_870,)
    ),
    "dapo": Source(read_dapo, "BytedTsinghua-SIA/DAPO-Math-17k", ("data/*.parquet",), rows=(1_791_700, 960)),
    "dapo_processed": Source(
        read_dapo_processed, "open-r1/DAPO-Math-17k-Processed", _PARQUET, ("all", "en", "cn"), (17_398, 14_116, 3_282)
    ),
    "polaris": Source(training.read_polaris, "POLARIS-Project/Polaris-Dataset-53K", ("*.jsonl", *_PARQUET)),
    "math": Source(
        training.read_math, "DigitalLearningGmbH/MATH-lighteval", _PARQUET, ("train", "test"), (7500, 5000)
    ),
    "geometry3k": Source(
        training.read_geometry3k, "hiyouga/geometry3k", _PARQUET, ("train", "validation", "test"), (2101, 300, 601)
    ),
    "generic": Source(read_generic, "", ()),
    **{name: _benchmark(benchmark) for name, benchmark in BENCHMARKS.items()},
}
