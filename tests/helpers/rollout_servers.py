"""Rollout servers as a user starts them, each a process group beside the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Self

from tests.helpers.served import free_port
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
        end = time.monotonic() + seconds
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < end, self._log.read_text()[-3000:]
            time.sleep(0.5)
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

    def _answers(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/vlm_rl/info")
            return connection.getresponse().status == 401
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()
