"""Cases that take turns: none is left out for long, and a run can be had again."""

from __future__ import annotations

import ast
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.rotation import todays


@given(cases=st.lists(st.integers(), unique=True), days=st.integers(1, 7), first=st.integers(0, 10**6))
def test_every_case_has_one_turn_in_so_many_days(cases: list[int], days: int, first: int) -> None:
    turns: Counter[int] = Counter()
    for day in range(first, first + days):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TEST_DAY", str(day))
            turns.update(todays(cases, days=days))
            assert todays(cases, days=days) == todays(cases, days=days)
    assert turns == Counter(cases)


def test_all_days_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DAY", "all")
    assert todays("abc", days=3) == todays("abc", days=3).every == ["a", "b", "c"]


def test_days_are_counted_as_the_continuous_integration_counts_them() -> None:
    assert date(1970, 1, 1).toordinal() == 719163


def test_no_case_waits_for_a_day_that_never_comes() -> None:
    """A test with a turn whose cases take turns too would leave some of them out for ever, where both are even."""
    both = []
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                marks = " ".join(map(ast.unparse, node.decorator_list))
                if "mark.turn(" in marks and "todays(" in marks:
                    both.append(f"{path.name}::{node.name}")
    assert both == []
