"""How far a save is: a line when it begins, one when it ends, and on a terminal the bytes written meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from vlm_rl.distributed import rank
from vlm_rl.run.checkpoint import size_text

_SECONDS_BETWEEN_LOOKS = 0.5
_BLOCK = 512  # bytes of a block in st_blocks, on every file system


@dataclass(frozen=True, slots=True)
class SaveLines:
    """Where rank 0 says what becomes of a save."""

    begin: Callable[[str], None]
    end: Callable[[str], None]
    show: Callable[[str], None] | None = None  # called by a thread with a text that changes; "" removes it


class SaveProgress:
    """Reports the progress of a save, on rank 0 only.

    progress = SaveProgress(45_100_000_000, lines)
    progress.begin(20, beside=False)    # step 20: saving 45.1 GB
    progress.watch(folder)              # saving 12.1 GB of 45.1 GB, 490 MB/s
    progress.written()                  # this rank's files are written and hashed
    progress.commits()
    progress.end(45_100_000_000)        # step 20: saved 45.1 GB in 92.0 s, 490 MB/s with checks and hashes
    """

    def __init__(self, size: int = 0, lines: SaveLines | None = None) -> None:
        """Say nothing yet.

        Args:
            size: the bytes that a checkpoint is expected to take.
            lines: where the lines go; None for nowhere.
        """
        self.size = size
        self.lines = lines if lines is not None and rank() == 0 else None
        self._step, self._begun, self._written, self._idle = 0, 0.0, 0.0, 0.0
        self._stopped = Event()
        self._thread: Thread | None = None

    def begin(self, step: int, *, beside: bool) -> None:
        """Say that the checkpoint of this step is being made, `beside` (during) the training or not."""
        self._step, self._begun = step, time.monotonic()
        if self.lines is not None:
            self.lines.begin(f"step {step}: saving {size_text(self.size)}{' while the training continues' * beside}")

    def watch(self, folder: Path) -> None:
        """Show how many bytes are in a folder, those of all ranks, until this rank has written its own."""
        self.stop()
        if self.lines is not None and self.lines.show is not None:
            self._stopped.clear()
            args = (folder, self.lines.show)
            self._thread = Thread(target=self._watch, args=args, name="save-progress", daemon=True)
            self._thread.start()

    def _watch(self, folder: Path, show: Callable[[str], None]) -> None:
        while not self._stopped.wait(_SECONDS_BETWEEN_LOOKS):
            with suppress(OSError):  # a file was renamed meanwhile
                if done := _bytes_in(folder):
                    rate = done / (time.monotonic() - self._begun)
                    show(f"saving {size_text(done)} of {size_text(self.size)}, {size_text(rate)}/s")
        show("")

    def written(self) -> None:
        """Stop the clock: this rank's files are written and hashed. Any thread may call this."""
        self._written = time.monotonic()
        self._stopped.set()

    def commits(self) -> None:
        """Let the clock go on: a save during the training is committed at the end of a step, which may be later."""
        self._idle = max(0.0, time.monotonic() - self._written)

    def end(self, size: int) -> None:
        """Say how long it took to write the checkpoint of so many bytes, which is complete."""
        self.stop()
        if self.lines is None:
            return
        seconds = time.monotonic() - self._begun - self._idle
        rate = f"{size_text(size / seconds)}/s with checks and hashes"
        self.lines.end(f"step {self._step}: saved {size_text(size)} in {seconds:.1f} s, {rate}")

    def stop(self) -> None:
        """Show nothing more."""
        if self._thread is None:
            return
        self._stopped.set()
        self._thread.join()
        self._thread = None


def _bytes_in(folder: Path) -> int:
    """Return the bytes of a folder's files that are written; safetensors gives a file its full length at once."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(min(stat.st_size, stat.st_blocks * _BLOCK) for stat in stats)
