"""What the doctor is waiting for, while it lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.text import Text

SILENCE = 20.0  # seconds after which a log gets a line


class WaitingLine:
    """Shows which check is running and what it does: live on a terminal, in a log a line after every silence.

    with WaitingLine(console) as waiting:
        waiting("sync", "loading the model")     # sync: loading the model … 12 s
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._name = self._phase = ""
        self._begun = self._printed = clock()
        self._status = console.status("") if console.is_terminal else None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> WaitingLine:
        if self._status is not None:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._status is not None:
            self._status.stop()  # or the terminal's cursor stays hidden

    def __call__(self, name: str, phase: str) -> None:
        """Take note of the running check and of what it does now."""
        if name != self._name:
            self._begun = self._clock()
        self._name, self._phase = name, phase

    def answered(self) -> None:
        """Take note that a line was printed."""
        self._printed = self._clock()

    def tick(self) -> None:
        """Show the line again, with its seconds."""
        if not self._name:
            return
        now = self._clock()
        doing = f"{self._name}: {self._phase}" if self._phase else self._name
        line = Text(f"{doing} … {now - self._begun:.0f} s", style="dim")
        if self._status is not None:
            self._status.update(line)
        elif now - self._printed >= SILENCE:
            self._console.print(Text("     ").append_text(line), soft_wrap=True)
            self._printed = now

    def _run(self) -> None:
        while not self._is_over.wait(0.5):
            self.tick()
