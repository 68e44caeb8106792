"""Watch the ranks of a run: whether another one has failed, and whether none makes progress.

A rank that fails leaves the others in a collective, where NCCL would keep them for hours. It tells them over a store
that all ranks share, and a thread of each ends it. A rank that hangs tells nobody. Where no rank has given a sign of
life for log.stall_minutes, each writes its Python stacks and its last collective into log.txt, and after the same
time again the run ends with errors.EXIT_STALLED.

    watch.join(run)               # once there are ranks
    watch.arm(log, minutes=30)    # once the run trains
    watch.tell(error)             # a failure, to the others
    watch.close()
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistBackendError, DistNetworkError

from vlm_rl.distributed import last_collective, rank, signs_of_life, world_size
from vlm_rl.errors import EXIT_STALLED, UserError

GRACE_SECONDS = 20.0  # for a rank to end by itself once another has failed
_LONGEST_TICK = 5.0  # seconds between two looks
_BYTES_A_TICK = 1_000_000  # read or written: a sign of life too, of a save for example
_STORE_TIMEOUT = timedelta(seconds=30)
_FAILURES, _FAILURE, _PROGRESS, _STALLED = "failures", "failure", "progress", "stalled"  # keys of the store


class OtherRankError(UserError):
    """Raised on a rank that ends because a different one has failed."""


class Watch:
    """The watch of one rank."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._store: Store | None = None  # a connection of its own: the group's may be waiting
        self._limit: float | None = None  # seconds without progress
        self._log: Path | None = None
        self._last_signs, self._own_progress = (0, 0), 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def join(self, run: Path) -> None:
        """Look after the other ranks of the run in this folder from now on."""
        if world_size() > 1:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)
            # torchrun's store outlives a restart of the ranks.
            self._store = PrefixStore(f"{run.resolve()}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def arm(self, log: Path, *, minutes: float) -> None:
        """Notice from now on where no rank makes progress for so long; 0 notices nothing. Stacks go into the log."""
        self._log, self._limit = log, 60 * minutes or None

    def tell(self, error: BaseException) -> OtherRankError | None:
        """Tell the other ranks of this one's failure; return an error in its place where another was the first."""
        if self._store is None:
            return None
        with suppress(RuntimeError):  # the store is gone with the rank that had it
            if self._store.add(_FAILURES, 1) == 1:
                words = " ".join(str(error).split()) or type(error).__name__
                self._store.set(_FAILURE, f"rank {rank()} of {world_size()} failed: {words[:500]}")
            elif type(error) in (RuntimeError, DistBackendError, DistNetworkError):
                return OtherRankError(f"{self._failure()}. This rank, {rank()}, ends with it")
        return None

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _failure(self) -> str:
        assert self._store is not None
        return self._store.get(_FAILURE).decode(errors="replace")

    def _watch(self) -> None:
        """Look now and then, until closed. Time for which the process was stopped counts as half a limit at most."""
        progress, waited, looked, has_written = None, 0.0, time.monotonic(), False
        while not self._closed.wait(min(_LONGEST_TICK, (self._limit or 60.0) / 10)):
            try:
                self._end_with_others()
                now = self._progress()
            except RuntimeError:  # the store is gone, and the rank that had it
                if not self._closed.wait(2 * GRACE_SECONDS):  # within a minute, ticks and all
                    self._say("the rank with the store of all ranks is gone; this one ends too")
                    _end(1)
                return
            before, looked = looked, time.monotonic()
            if now != progress or self._limit is None:
                progress, waited, has_written = now, 0.0, False
                continue
            waited += min(looked - before, self._limit / 2)
            if waited > self._limit and not has_written:
                self._write_stacks(waited)
                has_written = True
            if waited > 2 * self._limit or self._is_ending():
                self._say(f"no rank has made progress for {waited / 60:.3g} minutes: the run ends")
                self._end_together()

    def _end_with_others(self) -> None:
        """End this process where another rank has failed and this one does not end by itself."""
        if self._store is None or not self._store.add(_FAILURES, 0):
            return
        if not self._closed.wait(GRACE_SECONDS):
            self._say(f"{self._failure()}. This rank ends with it")
            _end(1)

    def _is_ending(self) -> bool:
        """Tell whether another rank has found that there is no progress."""
        return self._store is not None and self._store.add(_STALLED, 0) > 0

    def _end_together(self) -> None:
        """End this process, once the others know that they end too: one of them may have the store."""
        end = time.monotonic() + 2 * _LONGEST_TICK
        with suppress(RuntimeError):
            number = 1 if self._store is None else self._store.add(_STALLED, 1)
            while self._store is not None and number < world_size() and time.monotonic() < end:
                time.sleep(0.1)
                number = self._store.add(_STALLED, 0)
        _end(EXIT_STALLED)

    def _progress(self) -> int:
        """Return a number that grows while any rank makes progress."""
        number, transferred = signs_of_life()[0], _bytes_transferred()
        before_number, before_bytes = self._last_signs
        is_alive = number != before_number or transferred - before_bytes > _BYTES_A_TICK
        self._last_signs = number, transferred
        if self._store is not None:
            return self._store.add(_PROGRESS, int(is_alive))
        self._own_progress += is_alive
        return self._own_progress

    def _write_stacks(self, waited: float) -> None:
        """Write what every thread of this rank is doing into the log."""
        assert self._log is not None
        self._say(
            f"no rank has made progress for {waited / 60:.3g} minutes (log.stall_minutes): it was last in "
            f"{signs_of_life()[1]}; {last_collective()}; the stacks of its threads:"
        )
        with suppress(OSError), self._log.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)

    def _say(self, text: str) -> None:
        """Write a line to the log, and print it."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank()} of {world_size()}: {text}"
        print(line, file=sys.stderr, flush=True)
        if self._log is not None:
            with suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                log.write(f"{line}\n")


def _bytes_transferred() -> int:
    """Return how many bytes this process has read and written; 0 if the system does not tell."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def _end(code: int) -> None:
    """End the process at once: its main thread hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
