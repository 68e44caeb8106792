"""The tests of the mathematics notice a wrong sign, denominator, bound or split (tests/helpers/breaks.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.rotation import todays

ROOT = Path(__file__).resolve().parents[1]
PARTS = [f"{part}/6" for part in range(1, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("part", todays(PARTS, days=len(PARTS)))
def test_every_break_of_the_mathematics_is_noticed(part: str) -> None:
    """A sixth of them a day; `python -m tests.helpers.breaks` takes all."""
    command = [sys.executable, "-m", "tests.helpers.breaks", "--part", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
