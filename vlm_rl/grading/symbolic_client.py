"""Send symbolic queries to the comparison server and receive its replies; nothing of a text is read here.

The server (symbolic_server.py) is a separate program with a clean environment (no credentials, not even in /proc) and
its own process group. `start` or the first batch launches it, the next batch launches it again if it has died, and
`close` kills it with all of its workers.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from vlm_rl.grading.decision import SymbolicQuery

# ("ok", whether the two are equal, or the value as a decimal or None) or ("timeout" or "error", a sentence)
SymbolicReply = tuple[Literal["ok", "timeout", "error"], Any]

# All that the server's environment keeps: an interpreter built against its own libraries does not start without it.
_KEPT_VARIABLES = ("LD_LIBRARY_PATH",)
_START_SECONDS = 300.0
_LOOK_SECONDS = 5.0
_BATCH = 64  # queries sent at a time, which are what a dying server can lose


class SymbolicClient:
    """Answer symbolic queries with killable workers behind one pipe. Not for use in a forked child of its owner."""

    def __init__(
        self,
        *,
        workers: int,
        timeout: float,
        memory_bytes: int = 2 << 30,
        queries_per_worker: int = 50,
        waits: Callable[[], object] = lambda: None,
    ) -> None:
        """Set the limits; nothing is launched yet.

        A comparison that computes is always ended by its CPU clock, even with a 1/100 share of a core. The wall
        clock, 120 times the timeout and a minute, ends one that waits for something.

        Args:
            workers: Number of worker processes.
            timeout: CPU seconds of one query.
            memory_bytes: Memory that a query may take besides what its worker has at the start.
            queries_per_worker: Number of queries after which a worker is replaced.
            waits: Called every few seconds while replies are waited for.
        """
        self._waits = waits
        self.options: dict[str, Any] = {
            "workers": workers,
            "cpu_seconds": timeout,
            "wall_seconds": 120 * timeout + 60,
            "memory_bytes": memory_bytes,
            "queries_per_worker": queries_per_worker,
            "path": [folder for folder in sys.path if folder],  # instead of PYTHONPATH
        }
        self._server: subprocess.Popen[bytes] | None = None
        self._is_ready = False  # whether the server has greeted
        self._buffer = b""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Launch the server if it does not run, without the second of waiting until it is ready."""
        with self._lock:
            if self._server is None:
                self._launch()

    def answer(self, queries: Sequence[SymbolicQuery]) -> list[SymbolicReply]:
        """Return the replies to queries in their order; no text makes it raise.

        Raises RuntimeError if the server cannot be started.
        """
        with self._lock:
            return [
                reply
                for start in range(0, len(queries), _BATCH)
                for reply in self._answer_batch(queries[start : start + _BATCH])
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

    def _answer_batch(self, queries: Sequence[SymbolicQuery]) -> list[SymbolicReply]:
        rounds = -(-len(queries) // self.options["workers"]) + 1
        for _ in range(2):
            try:
                self._send(json.dumps(queries).encode() + b"\n")
                replies = self._receive(rounds * 20 * self.options["cpu_seconds"] + self.options["wall_seconds"])
            except OSError:
                replies = None
            if isinstance(replies, list) and len(replies) == len(queries):
                return [(status, value) for status, value in replies]
            self.close()
        return [("error", "the comparison server died twice on this batch")] * len(queries)

    def _send(self, line: bytes) -> None:
        server = self._server or self._launch()
        if not self._is_ready:
            self._wait_until_ready()
        assert server.stdin is not None
        server.stdin.write(line)
        server.stdin.flush()

    def _launch(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        # sympy iterates over sets, whose order follows the hash: the same text must always be computed alike.
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
        """Return the server's next line, parsed; None if it died or the time is over."""
        assert self._server is not None
        assert self._server.stdout is not None
        deadline = time.monotonic() + seconds
        pipe, poll = self._server.stdout.fileno(), select.poll()  # select takes no file beyond the 1024th
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self._buffer:
            self._waits()
            left = max(0.0, deadline - time.monotonic())
            ready = poll.poll(1000 * min(left, _LOOK_SECONDS))
            if not ready and left > _LOOK_SECONDS:
                continue
            chunk = os.read(pipe, 1 << 16) if ready else b""
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)
