"""Every attack ends as its promise says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.attack import ATTACKS, sandbox
from tests.attack.attack import Attack
from tests.helpers.rotation import todays

ROOT = Path(__file__).resolve().parents[2]
# One process makes all attacks of programs; the other slow ones take turns with them, a quarter of them a day.
PROGRAMS = [attack for attack in ATTACKS if attack in sandbox.ATTACKS]
QUICK = [attack for attack in ATTACKS if not attack.slow]
GROUPS = [PROGRAMS, *([attack] for attack in ATTACKS if attack.slow and attack not in PROGRAMS)]
SLOW = [attack for group in todays(GROUPS, days=4) for attack in group]
CASES = [
    *(pytest.param(attack, id=attack.name) for attack in todays(QUICK, days=2)),
    *(pytest.param(attack, id=attack.name, marks=pytest.mark.slow) for attack in SLOW),
]


@pytest.mark.parametrize("attack", CASES)
def test_an_attack_ends_as_promised(attack: Attack, tmp_path: Path) -> None:
    """Half of the quick ones, and a quarter of the slow ones a day; `python -m tests.attack` makes all."""
    assert attack.observe(tmp_path) == attack.expected


def test_names_are_different() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)


def test_each_promise_is_a_heading_of_the_pages_that_promise() -> None:
    pages = [ROOT / "SECURITY.md", ROOT / "docs" / "reliability.md"]
    headings = {heading for page in pages for heading in re.findall(r"(?m)^#+ (.+)$", page.read_text())}
    assert {attack.promise for attack in ATTACKS} - headings == set()
