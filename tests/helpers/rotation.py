"""Tests that take turns: a part of their cases each day, all of them with TEST_DAY=all in the environment.

TEST_DAY is a number of days since the year 1, and today's by default; a run prints it, so that its cases can be taken
again. All processes of a run take the same: tests/conftest.py sets it before they are started.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import date
from typing import TypeVar

import pytest

T = TypeVar("T")


class Todays(list[T]):
    """Today's cases; `every` has those of all days."""

    every: list[T]


def todays(cases: Iterable[T], *, days: int) -> Todays[T]:
    """Return every `days`-th case, beginning with another one each day; all cases where TEST_DAY is `all`."""
    every, day = [*cases], os.environ["TEST_DAY"]
    found = Todays(every if day == "all" else every[int(day) % days :: days])
    found.every = every
    return found


def is_its_day(item: pytest.Item) -> bool:
    """Tell whether a test runs today: `@pytest.mark.turn(1, days=2)` runs it every second day."""
    mark, day = item.get_closest_marker("turn"), os.environ["TEST_DAY"]
    return mark is None or day == "all" or int(day) % mark.kwargs["days"] == mark.args[0]


def the_day() -> int:
    """Return the day whose cases run, as a seed; today where all of them do."""
    day = os.environ["TEST_DAY"]
    return date.today().toordinal() if day == "all" else int(day)
