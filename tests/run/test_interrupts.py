"""Ctrl-C ends a run also where Python drops what it raises."""

from __future__ import annotations

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
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(10))  # the handler runs between two instructions


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_destructor_swallows_is_raised_by_the_next_check() -> None:
    interrupts = Interrupts()
    interrupts.listen()
    interrupts.check()
    DroppedAway()  # nothing arrives here
    assert interrupts.noted
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()


def test_elsewhere_it_is_raised_at_once() -> None:
    Interrupts().listen()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_process_that_ignores_it_still_does() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as after nohup
    interrupts = Interrupts()
    interrupts.listen()
    os.kill(os.getpid(), signal.SIGINT)
    assert not interrupts.noted
