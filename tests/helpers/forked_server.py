"""`vlm-rl serve` in a process that is forked where vLLM is imported; its engine and worker are forked from it.

A server, its engine and its worker would each import everything for 10 s. They also sleep while they wait for each
other. vLLM's own yield the processor, for a second after each message: two servers then take most of two cores from
the learner that they serve.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.context import BaseContext, ForkServerProcess
from pathlib import Path
from typing import Any

from vlm_rl.cli import main

_get_context = multiprocessing.get_context
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.helpers.loaded_vllm"])


class ForkedServer:
    """What RolloutServer uses of a subprocess.Popen. The process leads its own group, as one that a user starts."""

    def __init__(self, arguments: Sequence[str], *, environment: dict[str, str], log: Path) -> None:
        """Start it; what it prints is appended to the log."""
        here = {**os.environ}
        os.environ.update(environment)  # the first call starts the process that forks, and that which clears up
        os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # a server that is killed leaves its memory to it
        try:
            self._process: ForkServerProcess = _FORKS.Process(target=_serve, args=(arguments, environment, log))
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(here)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended and return its exit code; raise TimeoutError if that takes longer."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"the server still runs after {timeout} s")
        return self._process.exitcode


def _serve(arguments: Sequence[str], environment: dict[str, str], log: Path) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    run(arguments)


def run(arguments: Sequence[str]) -> None:
    """Run a command whose vLLM forks its engine and its worker."""
    multiprocessing.get_context = _forking  # type: ignore[assignment]
    sys.exit(main(arguments))


def _forking(method: str | None = None) -> BaseContext:
    """Return the context that forks. vLLM asks for it before it starts a process, when its modules are there."""
    queues: Any = sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")
    if queues is not None:
        queues.sched_yield = partial(time.sleep, 0.0005)
    return _get_context("fork" if method == "spawn" else method)


if __name__ == "__main__":
    run(sys.argv[1:])
