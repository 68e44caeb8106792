"""Annotated problems for the tests of evaluation: made on the spot, and the real samples where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import shared_data
from tests.helpers.benchmark_rows import REAL_FILES, write_annotations
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.evaluation.benchmarks.score_command import read_annotations
from vlm_rl.grading.grader import Grader
from vlm_rl.types import Problem


@pytest.fixture(params=["made", "real"])
def annotation_files(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], list[Path]]:
    """Return a function from a benchmark's name to the files of its annotations."""

    def files_of(benchmark: str) -> list[Path]:
        if request.param == "made":
            return write_annotations(benchmark, tmp_path / "annotations" / benchmark)
        return sorted(shared_data().glob(REAL_FILES[benchmark]))

    return files_of


@pytest.fixture
def annotated(annotation_files: Callable[[str], list[Path]]) -> Callable[[str], list[Problem]]:
    """Return a function from a benchmark's name to its annotated problems."""
    return lambda benchmark: read_annotations(BENCHMARKS[benchmark], annotation_files(benchmark))


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=1, timeout=5.0) as grader:
        yield grader
