"""The tests of the mathematics notice a wrong sign, denominator, bound or split (tests/helpers/breaks.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_every_break_of_the_mathematics_is_noticed() -> None:
    command = [sys.executable, "-m", "tests.helpers.breaks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
