"""Every attack ends as its promise says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.attack import ATTACKS
from tests.attack.attack import Attack

ROOT = Path(__file__).resolve().parents[2]
CASES = [pytest.param(attack, id=attack.name, marks=[pytest.mark.slow] * attack.slow) for attack in ATTACKS]


@pytest.mark.parametrize("attack", CASES)
def test_an_attack_ends_as_promised(attack: Attack, tmp_path: Path) -> None:
    assert attack.observe(tmp_path) == attack.expected


def test_names_are_different() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)


def test_each_promise_is_a_heading_of_the_pages_that_promise() -> None:
    pages = [ROOT / "SECURITY.md", ROOT / "docs" / "reliability.md"]
    headings = {heading for page in pages for heading in re.findall(r"(?m)^#+ (.+)$", page.read_text())}
    assert {attack.promise for attack in ATTACKS} - headings == set()
