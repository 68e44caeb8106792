"""Rollout servers as a user starts them, each a process group beside the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.helpers.served import free_port, wait_for_status
from tests.helpers.toy_runs import clean_environment


class RolloutServer:
    """`vlm-rl serve CONFIG`; its signals go to all of its processes. Use as a context manager."""

    def __init__(self, config: Path, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vlm_rl", "serve", str(config), "--port", str(self.port)],
                env=clean_environment(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self, *, seconds: float = 480) -> Self:
        """Wait until the server answers; without a token, that is a refusal."""
        wait_for_status(self._process, self.port, "/vlm_rl/info", 401, log=self._log, seconds=seconds)
        return self

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.send(signal.SIGKILL)
