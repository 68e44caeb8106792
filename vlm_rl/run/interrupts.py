"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a destructor or in a callback of the
garbage collector it is printed and dropped there, and a run that waits for a hanging function would wait on.

    interrupts = Interrupts()
    interrupts.listen()
    interrupts.check()   # now and then
"""

from __future__ import annotations

import signal


class Interrupts:
    """Remembers Ctrl-C until somebody asks."""

    def __init__(self) -> None:
        self.noted = False

    def listen(self) -> None:
        """Note SIGINT from now on, and raise KeyboardInterrupt as before; a process that ignores it still does."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_sigint)

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed and what it raised got lost."""
        if self.noted:
            raise KeyboardInterrupt

    def _on_sigint(self, *_: object) -> None:
        self.noted = True
        raise KeyboardInterrupt
