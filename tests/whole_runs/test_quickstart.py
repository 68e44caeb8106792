"""The first result that a user sees holds: one seed of the quickstart, from its pictures to its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_rl.api import read_run

pytestmark = pytest.mark.slow


@pytest.mark.turn(1, days=2)
@pytest.mark.timeout(1200)
def test_the_quickstart_learns_to_look_and_keeps_it(tmp_path: Path) -> None:
    """One of the ten seeds of docs/quickstart.md, where chance is .111."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "vlm_rl", "quickstart", "--seed", "3", "--out", str(out)]
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "0"}  # as a user's; `make test-slow` sets it
    subprocess.run(command, env=environment, check=True, timeout=1100)
    first, *later = (result.summary["accuracy"] for result in read_run(out).evals())
    assert first < 0.25
    assert later[-1] >= 0.95, later
    controls = json.loads((out / "controls.json").read_text())
    assert max(controls["blank_images"], controls["shuffled_images"]) < 0.25, "right only where it sees"
    assert (out / "report.html").is_file()
