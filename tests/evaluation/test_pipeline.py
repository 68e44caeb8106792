"""Stages that overlap: what they give and raise is what the plain loop gives and raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from vlm_rl.evaluation.pipeline import overlapped

WAIT = 60  # seconds until a stage that never starts fails the test


class Stages:
    """Three stages that note what has been finished, and fail at `fails` = (stage, item)."""

    def __init__(self, *fails: tuple[str, int]) -> None:
        self.fails, self.graded = fails, []

    def _check(self, stage: str, item: int) -> None:
        if (stage, item) in self.fails:
            raise ValueError(f"{stage} {item}")

    def before(self, item: int) -> str:
        self._check("before", item)
        return f"prompt {item}"

    def heavy(self, ready: str) -> str:
        self._check("heavy", int(ready[-1]))
        return f"answer to {ready}"

    def after(self, item: int, ready: str, made: str) -> tuple[int, str, str]:
        self._check("after", item)
        self.graded.append(item)
        return item, ready, made


def plain(items: list[int], stages: Stages) -> Iterator[tuple[int, str, str]]:
    for item in items:
        ready = stages.before(item)
        yield stages.after(item, ready, stages.heavy(ready))


def outcome(loop: Callable[[Stages], Iterator[tuple[int, str, str]]], *fails: tuple[str, int]):
    """(what it gave, what was graded, what it raised)."""
    stages, given = Stages(*fails), []
    try:
        for one in loop(stages):
            given.append(one)
    except ValueError as error:
        return given, stages.graded, str(error)
    return given, stages.graded, None


def beside(items: list[int]) -> Callable[[Stages], Iterator[tuple[int, str, str]]]:
    return lambda s: overlapped(items, before=s.before, heavy=s.heavy, after=s.after)


@pytest.mark.parametrize("count", range(5))
def test_it_gives_what_the_plain_loop_gives(count: int) -> None:
    items = list(range(count))
    found = outcome(beside(items))
    assert found == outcome(lambda stages: plain(items, stages)) and len(found[0]) == count


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("stage", ["before", "heavy", "after"])
def test_an_error_comes_where_the_plain_loop_has_it(stage: str, place: int) -> None:
    items = list(range(3))
    assert outcome(beside(items), (stage, place)) == outcome(lambda s: plain(items, s), (stage, place))


def test_the_first_of_two_errors_is_raised() -> None:
    """The grading of item 0 fails while item 1 is answered, and fails too: the plain loop never came to that."""
    for later in ("before", "heavy"):
        assert outcome(beside([0, 1, 2]), ("after", 0), (later, 1))[2] == "after 0"


def test_the_light_stages_run_while_the_heavy_one_does() -> None:
    """The heavy stage of 1 ends only once 2 is prepared and 0 is finished: in a plain loop that would never be."""
    prepared, finished = threading.Event(), threading.Event()

    def before(item: int) -> int:
        if item == 2:
            prepared.set()
        return item

    def heavy(item: int) -> int:
        assert threading.current_thread() is threading.main_thread()  # an engine may belong to its thread
        if item == 1:
            assert prepared.wait(WAIT) and finished.wait(WAIT)
        return item

    def after(item: int, *_: int) -> int:
        if item == 0:
            finished.set()
        return item

    assert list(overlapped([0, 1, 2], before=before, heavy=heavy, after=after)) == [0, 1, 2]


def test_whoever_leaves_early_leaves_nothing_running() -> None:
    threads, stages = {*threading.enumerate()}, Stages()
    answering = overlapped([0, 1, 2, 3], before=stages.before, heavy=stages.heavy, after=stages.after)
    assert next(answering)[0] == 0
    answering.close()
    assert {*threading.enumerate()} <= threads  # some of other tests may have ended meanwhile
    assert stages.graded == [0]
