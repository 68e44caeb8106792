"""perf/gpu.sh, a day with a card: its bounds and verdicts, and its parts at tiny size on a CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.rotation import todays

PERF = Path(__file__).parents[1] / "perf"


@pytest.fixture(scope="module")
def parts() -> Any:
    sys.path.insert(0, str(PERF))
    try:
        yield import_module("gpu_parts")
    finally:
        sys.path.remove(str(PERF))


@pytest.mark.parametrize(
    ("value", "bound", "is_missed"),
    [
        (0.45, {"at_least": 0.45}, False),
        (0.449, {"at_least": 0.45}, True),
        (16, {"at_most": 16}, False),
        (16.1, {"at_most": 16}, True),
        (0.9, {"within": 0.1}, False),
        (1.11, {"within": 0.1}, True),
        *((math.nan, bound, True) for bound in ({"at_least": 0}, {"at_most": 0}, {"within": 0.1})),
    ],
)
def test_what_was_not_measured_misses_its_bound(
    parts: Any, value: float, bound: dict[str, float], is_missed: bool
) -> None:
    assert parts.misses(value, bound) == is_missed


@pytest.mark.parametrize(
    ("measured", "on_card", "last"),
    [
        ({"gap of log-probs a token": 0.01, "steps that were skipped": 0}, False, "pass"),
        (
            {"gap of log-probs a token": 0.2, "steps that were skipped": 0},
            False,
            "fall short: gap of log-probs a token",
        ),
        ({"gap of log-probs a token": 0.01}, False, "fall short: steps that were skipped"),
        (
            {"gap of log-probs a token": 0.01, "steps that were skipped": 0, "peak over planned memory": 1.2},
            True,
            "fall short: peak over planned memory",
        ),
    ],
)
def test_the_last_line_is_the_verdict(
    parts: Any, measured: dict[str, float], on_card: bool, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parts.print_verdict("lora-7b", measured, on_card=on_card) == (last == "pass")
    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize("on_card", [False, True])
def test_a_part_that_measures_nothing_falls_short_on_a_card(
    parts: Any, on_card: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parts.print_verdict("versus-trl", {}, on_card=on_card) is not on_card
    assert capsys.readouterr().out.splitlines()[-1].startswith("fall short: " if on_card else "pass: ")


def test_every_part_has_bounds_and_a_line_in_the_script(parts: Any) -> None:
    assert yaml.safe_load((PERF / "gpu_thresholds.yaml").read_text()).keys() == parts.PARTS.keys()
    assert f"all=({' '.join(parts.PARTS)})" in (PERF / "gpu.sh").read_text()


# `real` has its test in tests/real.
PAIRS = (
    ("quickstart", "check-3b"),
    ("learner-3b", "rollout-3b"),
    ("step-3b", "switches"),
    ("doctor", "lora-7b", "versus-trl"),
)


@pytest.mark.slow
@pytest.mark.parametrize("names", todays(PAIRS, days=len(PAIRS)), ids=" ".join)
def test_every_part_passes_at_tiny_size(names: Sequence[str]) -> None:
    """Some of them a day; `DEVICE=cpu bash perf/gpu.sh` runs all, in six minutes."""
    environment = {**os.environ, "DEVICE": "cpu", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", PERF / "gpu.sh", *names], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert [f"| {name} | pass |" in done.stdout for name in names] == [True] * len(names)
