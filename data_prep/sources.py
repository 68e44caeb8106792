"""The data sets that `vlm-rl prepare` knows: their readers, and where and how large they are published.

A reader is given a path and a split. It yields a UsableRow or a DroppedRow for every row, so that
in = kept + dropped. To add a data set, write a reader and name it in SOURCES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vlm_rl.data_prep import training_sources as training
from vlm_rl.data_prep import vision_benchmarks as vision
from vlm_rl.data_prep.dapo import read_dapo, read_dapo_processed
from vlm_rl.data_prep.generic import read_generic
from vlm_rl.data_prep.records import DroppedRow, UsableRow
from vlm_rl.data_prep.text_benchmarks import TEXT_BENCHMARKS
from vlm_rl.errors import UserError

Reader = Callable[[Path, str], Iterator[UsableRow | DroppedRow]]


@dataclass(frozen=True, slots=True)
class Source:
    """A data set as it is published."""

    reader: Reader
    hub: str  # its id on the hub; "" if it has none
    files: tuple[str, ...]  # globs of what is needed from the hub's repository
    splits: tuple[str, ...] = ("",)  # the first is the default; "" where there is only one
    rows: tuple[int, ...] = ()  # published numbers of rows, in the order of the splits or of the editions

    def read(self, path: Path, split: str = "") -> Iterator[UsableRow | DroppedRow]:
        """Yield the data set's rows. Raises UserError for a split that does not exist."""
        if split and split not in self.splits:
            raise UserError(
                f"--split {split!r}: this data set has {', '.join(filter(None, self.splits)) or 'no splits'}"
            )
        return self.reader(path, split or self.splits[0])


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
    "mathvista": Source(
        vision.read_mathvista, "AI4Math/MathVista", ("data/*.parquet",), ("testmini", "test"), (1000, 5141)
    ),
    "mathvision": Source(
        vision.read_mathvision, "MathLLMs/MathVision", ("data/*.parquet",), ("testmini", "test"), (304, 3040)
    ),
    "mathverse": Source(
        vision.read_mathverse,
        "AI4Math/MathVerse",
        ("*.parquet", "*.json", "images.zip"),
        ("testmini", "testmini_text_only"),
        (3940, 788),
    ),
    "logicvista": Source(vision.read_logicvista, "lscpku/LogicVista", _PARQUET, ("test",), (448,)),
    "wemath": Source(vision.read_wemath, "We-Math/We-Math", _PARQUET, ("testmini",), (1740,)),
    "dynamath": Source(vision.read_dynamath, "DynaMath/DynaMath_Sample", _PARQUET, rows=(5010,)),
    "math500": Source(TEXT_BENCHMARKS["math500"], "HuggingFaceH4/MATH-500", ("*.jsonl", *_PARQUET), rows=(500,)),
    "aime24": Source(TEXT_BENCHMARKS["aime24"], "HuggingFaceH4/aime_2024", _PARQUET, rows=(30,)),
    "aime25": Source(TEXT_BENCHMARKS["aime25"], "math-ai/aime25", ("*.jsonl", *_PARQUET), rows=(30, 15)),
    "amc23": Source(TEXT_BENCHMARKS["amc23"], "math-ai/amc23", _PARQUET, rows=(40, 83)),
    "minerva": Source(TEXT_BENCHMARKS["minerva"], "math-ai/minervamath", ("*.jsonl", *_PARQUET), rows=(272,)),
    "olympiadbench": Source(
        TEXT_BENCHMARKS["olympiadbench"],
        "Hothan/OlympiadBench",
        ("OlympiadBench_Dataset/data/OE_TO_maths_en_COMP*", "**/OE_TO_maths_en_COMP*"),
        rows=(675, 674, 150),
    ),
}
