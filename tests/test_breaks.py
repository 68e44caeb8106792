"""The tables of tests/breaks/ against the code as it is: every line to break is there, and breaks no syntax."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest

from tests.mutate import PARTS, ROOT


@pytest.mark.parametrize("part", PARTS)
def test_every_break_still_finds_its_line(part: str) -> None:
    breaks = import_module(f"tests.breaks.{part}").BREAKS
    assert len({one.name for one in breaks}) == len(breaks) > 0
    for one in breaks:
        source = (ROOT / one.file).read_text(encoding="utf-8")
        assert one.right in source, f"{one.name}: {one.file} no longer holds {one.right!r}"
        ast.parse(source.replace(one.right, one.wrong))
        tests = [word for word in one.tests if word.startswith("tests/")]
        assert tests and all((ROOT / test.partition("::")[0]).is_file() for test in tests), one.name
