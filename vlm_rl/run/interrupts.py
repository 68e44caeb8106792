"""Ctrl-C that is not lost: the first asks for a stop, the second stops at once.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a destructor or in a callback of the
garbage collector it is printed and dropped there, and a run that waits for a hanging function would wait on.

    interrupts = Interrupts(run.ask_to_stop)
    interrupts.listen()
    interrupts.check()   # now and then
    interrupts.close()   # the next run of this process listens for itself
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

_ONE_PRESS = 0.3  # seconds: a launcher passes on the signal that the terminal has sent already


class Interrupts:
    """Remembers Ctrl-C until somebody asks."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        """Note nothing yet.

        Args:
            on_first: called in the signal handler at the first Ctrl-C; asks for a stop that loses nothing.
        """
        self.is_raised = False  # whether the second one was pressed
        self._on_first, self._first_at = on_first, 0.0

    def listen(self) -> None:
        """Note SIGINT from now on, and raise KeyboardInterrupt for the second; if it is ignored it stays so."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_sigint)

    def close(self) -> None:
        """Leave SIGINT to Python again."""
        if signal.getsignal(signal.SIGINT) == self._on_sigint:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed twice and the second press's exception was lost."""
        if self.is_raised:
            raise KeyboardInterrupt

    def _on_sigint(self, *_: object) -> None:
        if not self._first_at:
            self._first_at = time.monotonic()
            self._on_first()
        elif time.monotonic() - self._first_at > _ONE_PRESS:
            self.is_raised = True
            raise KeyboardInterrupt
