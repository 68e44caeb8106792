"""Call a function of ours on what a stranger wrote, in a process with limits.

    worker = LimitedWorker("vlm_rl.data.chat_templates.render", cpu_seconds=5.0, memory=256 << 20)
    worker.call(template, messages)

A template without an end, a tokenizer that takes all memory or values that are slow to compare cost that process.
The caller gets a LimitError. The function is trusted, unlike a program in the sandbox, so it needs no walls but the
limits, and works on every machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from vlm_rl.errors import signal_name

__all__ = ["FaultError", "LimitError", "LimitedWorker"]

_PROGRAM = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options['path']; "
    "from vlm_rl.sandbox.limited_worker import serve; serve(options)"
)
_KEPT_VARIABLES = ("LD_LIBRARY_PATH",)
_SLOWEST = 20  # times its CPU seconds, and a minute: a process that waits for something, or has a share of a core


class LimitError(Exception):
    """Raised where a call took more than it may; the message says what, as in "took more than 5 s of CPU time"."""


class FaultError(Exception):
    """Raised where the function raised; the message names the exception."""


class LimitedWorker:
    """A process that calls one function, one call at a time.

    It starts with the first call, and again after a limit.
    """

    def __init__(self, function: str, *, cpu_seconds: float, memory: int, output: int = 64 << 20) -> None:
        """Set the limits; nothing is started yet.

        Args:
            function: module.name of a function whose arguments and value are plain JSON.
            cpu_seconds: of one call.
            memory: bytes that it may take beside what the process has after its imports.
            output: bytes of a reply.
        """
        path = [os.path.realpath(folder) for folder in sys.path if folder]
        limits = {"cpu_seconds": cpu_seconds, "memory": memory, "output": output}
        self._options = {"function": function, "path": path, **limits}
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] = lambda: None  # also called where the worker is collected, and at exit
        self._lock = threading.Lock()

    def call(self, *arguments: Any) -> Any:
        """Return the function's value. Raises LimitError, FaultError, or OSError where no process can be started."""
        line = json.dumps(arguments).encode() + b"\n"
        with self._lock:
            process = self._process or self._start()
            try:
                reply = self._ask(process, line)
            except BaseException:
                self._stop()
                raise
        if "limit" in reply:
            raise LimitError(reply["limit"])
        if "fault" in reply:
            raise FaultError(reply["fault"])
        return reply["value"]

    def close(self) -> None:
        """End the process; a later call starts it again."""
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps(self._options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _stop(self) -> None:
        self._process = None
        self._end()

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        cpu_seconds = self._options["cpu_seconds"]
        with contextlib.suppress(BrokenPipeError):  # how it ended is told below
            process.stdin.write(line)
            process.stdin.flush()
        deadline, data = time.monotonic() + _SLOWEST * cpu_seconds + 60, bytearray()
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while not data.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise LimitError("had no end")
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise LimitError(self._how_it_ended(process.wait()))
            data += chunk
        return json.loads(data)

    def _how_it_ended(self, code: int) -> str:
        name = signal_name(-code) if code < 0 else f"exit code {code}"
        told = {
            "SIGPROF": f"took more than {self._options['cpu_seconds']:g} s of CPU time",
            "SIGABRT": f"needed more than {self._options['memory'] >> 20} MiB of memory, or gave up (SIGABRT)",
        }
        return told.get(name, f"ended its process ({name})")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
