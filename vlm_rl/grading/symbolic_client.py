"""The client of the symbolic comparison server: batches in, outcomes out, nothing hostile in here.

The server (symbolic_worker.py) is a separate program with a clean environment (no credentials, not even
in /proc) and its own process group. It is launched by `start`, at the latest by the first batch that needs
it, restarted if it dies, and killed as a whole on close.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Job = tuple[str, ...]  # ("equal", gold, answer) or ("value", text)
Outcome = tuple[
    Literal["ok", "timeout", "error"], Any
]  # ("ok", verdict or decimal text) | ("timeout" | "error", sentence)

# Empty but for this: where the interpreter was built against libraries of its own, it does not start without it.
_KEPT_VARIABLES = ("LD_LIBRARY_PATH",)
_START_SECONDS = 300.0
_BATCH = 64  # jobs sent at a time: what a dying server can lose


class SymbolicJudge:
    """A pool of killable workers behind one pipe. Not for use in a forked child of its owner."""

    def __init__(
        self, *, workers: int, timeout: float, memory_bytes: int = 2 << 30, jobs_per_worker: int = 50
    ) -> None:
        """`timeout` is the CPU seconds of one job. Its wall clock may run 120 times as long and a minute.

        A job that computes is always ended by its CPU clock, even with a 1/100 share of a core; the wall
        clock is for one that waits for something.
        """
        self.options: dict[str, Any] = {
            "workers": workers,
            "cpu_seconds": timeout,
            "wall_seconds": 120 * timeout + 60,
            "memory_bytes": memory_bytes,
            "jobs_per_worker": jobs_per_worker,
            "path": [folder for folder in sys.path if folder],  # instead of PYTHONPATH
        }
        self._server: subprocess.Popen[bytes] | None = None
        self._is_ready = False  # it has said so
        self._buffer = b""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Launch the server, unless it runs, without waiting until it is ready: that takes a second."""
        with self._lock:
            if self._server is None:
                self._launch()

    def decide(self, jobs: Sequence[Job]) -> list[Outcome]:
        """One outcome per job, in order. Never raises because of a job's text."""
        with self._lock:
            return [
                outcome
                for start in range(0, len(jobs), _BATCH)
                for outcome in self._batch(jobs[start : start + _BATCH])
            ]

    def close(self) -> None:
        """Stop the server and all its workers; a later batch starts a fresh one."""
        server, self._server, self._is_ready, self._buffer = self._server, None, False, b""
        if server is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for stream in (server.stdin, server.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _batch(self, jobs: Sequence[Job]) -> list[Outcome]:
        rounds = -(-len(jobs) // self.options["workers"]) + 1
        for _ in range(2):
            try:
                self._send(json.dumps(jobs).encode() + b"\n")
                reply = self._receive(rounds * 20 * self.options["cpu_seconds"] + self.options["wall_seconds"])
            except OSError:
                reply = None
            if isinstance(reply, list) and len(reply) == len(jobs):
                return [(outcome, value) for outcome, value in reply]
            self.close()
        return [("error", "the comparison server died twice on this batch")] * len(jobs)

    def _send(self, line: bytes) -> None:
        server = self._server or self._launch()
        if not self._is_ready:
            self._wait_until_ready()
        assert server.stdin is not None
        server.stdin.write(line)
        server.stdin.flush()

    def _launch(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        # Sets of symbols are ordered by hash: the same text must take the same way every time.
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        program = Path(__file__).with_name("symbolic_server.py")
        self._server = subprocess.Popen(
            [sys.executable, "-P", str(program), json.dumps(self.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        return self._server

    def _wait_until_ready(self) -> None:
        greeting = self._receive(_START_SECONDS)
        if greeting != "ready":
            self.close()
            raise RuntimeError(f"the symbolic comparison server did not start: {greeting or 'it ended'}")
        self._is_ready = True

    def _receive(self, seconds: float) -> Any:
        """The server's next line, parsed; None if it died or the time is over."""
        assert self._server is not None
        assert self._server.stdout is not None
        deadline = time.monotonic() + seconds
        pipe = self._server.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(pipe, 1 << 16) if ready else b""
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)
