"""Slow tests that take turns: a part of their cases each day, all of them with EVERY_DAY=1 in the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import date
from typing import TypeVar

T = TypeVar("T")


class Todays(list[T]):
    """Today's cases; `every` has those of all days."""

    every: list[T]


def todays(cases: Iterable[T], *, days: int) -> Todays[T]:
    """Return every `days`-th case, beginning with another one each day; all cases where EVERY_DAY is set."""
    every = [*cases]
    chosen = every if os.environ.get("EVERY_DAY") else every[date.today().toordinal() % days :: days]
    found = Todays(chosen)
    found.every = every
    return found
