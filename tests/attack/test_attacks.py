"""Every attack ends as its promise says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack import ATTACKS
from tests.attack.attack import Attack

CASES = [pytest.param(attack, id=attack.name, marks=[pytest.mark.slow] * attack.slow) for attack in ATTACKS]


@pytest.mark.parametrize("attack", CASES)
def test_an_attack_ends_as_promised(attack: Attack, tmp_path: Path) -> None:
    assert attack.observe(tmp_path) == attack.expected


def test_names_are_different() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
