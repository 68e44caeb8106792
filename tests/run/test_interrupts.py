"""The first Ctrl-C asks for a stop; the second ends a run also where Python drops what it raises."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from vlm_rl.run.interrupts import Interrupts


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class DroppedAway:
    """Is interrupted in its destructor, which lets no exception out."""

    def __del__(self) -> None:
        press()


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(10))  # the handler runs between two instructions


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def interrupts(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> Interrupts:
    """Listening, with a clock that is a second further at each look."""
    clock = itertools.count(100.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    made = Interrupts(lambda: asked.append("stop"))
    made.listen()
    return made


def test_the_first_asks_for_a_stop_and_raises_nothing(interrupts: Interrupts, asked: list[str]) -> None:
    press()
    interrupts.check()
    assert asked == ["stop"] and not interrupts.is_raised


def test_the_second_is_raised_at_once(interrupts: Interrupts, asked: list[str]) -> None:
    press()
    with pytest.raises(KeyboardInterrupt):
        press()
    assert asked == ["stop"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_destructor_swallows_is_raised_by_the_next_check(interrupts: Interrupts) -> None:
    press()
    DroppedAway()  # nothing arrives here
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()


def test_a_signal_that_a_launcher_passes_on_is_the_same_press(asked: list[str]) -> None:
    """torchrun sends its own to ranks that have the terminal's already."""
    interrupts = Interrupts(lambda: asked.append("stop"))
    interrupts.listen()
    press()
    press()
    assert asked == ["stop"] and not interrupts.is_raised


def test_a_process_that_ignores_it_still_does(asked: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as after nohup
    Interrupts(lambda: asked.append("stop")).listen()
    press()
    assert asked == []


def test_the_next_run_of_a_process_hears_it(asked: list[str]) -> None:
    """A quickstart trains twice in one process; while neither run listens, Ctrl-C is Python's own."""
    first = Interrupts(lambda: asked.append("first"))
    first.listen()
    first.close()
    with pytest.raises(KeyboardInterrupt):
        press()
    second = Interrupts(lambda: asked.append("second"))
    second.listen()
    first.close()  # the second one's handler is not its own
    press()
    assert asked == ["second"]
