"""docs/models.md says what the tests say: a type has a yes where a test runs with it, and nowhere else."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tests.helpers.rotation import Todays
from vlm_rl.learner.architectures import SUPPORTED

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "models.md").read_text(encoding="utf-8")


def tables() -> tuple[list[list[str]], list[list[str]]]:
    """Return the cells of the table of types and of the table of tests, without the line below their heads."""
    texts = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)[:2]
    types, tests = ([[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in t.splitlines()] for t in texts)
    return [types[0], *types[2:]], tests[2:]


def types_of(test: str) -> set[str]:
    """Return the types that a test function is run with, on any day."""
    path, name = test.split("::")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    (values,) = (mark.args[1] for mark in getattr(module, name).pytestmark if mark.args[:1] == ("model_type",))
    return {*(values.every if isinstance(values, Todays) else values)}


def test_every_yes_is_a_test_and_every_test_a_yes() -> None:
    (head, *rows), tests = tables()
    assert [row[0] for row in rows] == list(SUPPORTED)
    test_of = {column: test for columns, _, test in tests for column in columns.split(", ")}
    assert [*test_of] == head[2:], "a column without its test"
    for column, test in test_of.items():
        cells = {row[0]: row[head.index(column)] for row in rows}
        run = types_of(test)
        assert cells == {name: "yes" if name in run else "not run" for name in SUPPORTED}, column
