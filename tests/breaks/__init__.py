"""Wrong lines, and the tests that must notice them: see tests/mutate.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Break:
    """One wrong line."""

    name: str
    file: str  # from the repository's root
    right: str
    wrong: str
    tests: tuple[str, ...] = ()  # what pytest is given


def table(folder: str, tests: Sequence[str], *breaks: Break) -> tuple[Break, ...]:
    """Breaks of the files of one folder, noticed by the same tests."""
    return tuple(replace(one, file=f"{folder}/{one.file}", tests=tuple(tests)) for one in breaks)
