"""A demo as a person starts it: `python -m vlm_rl demo` in a process of its own, with its log in a file."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.served import free_port
from vlm_rl.demo.default_runs import RECORDED


class DemoProcess:
    """A running demo; `log` is all that it has printed, on both streams."""

    def __init__(self, folder: Path, *options: str, run: Path = RECORDED) -> None:
        self.port = free_port()
        self._log = folder / "demo.log"
        command = [sys.executable, "-m", "vlm_rl", "demo", str(run), "--port", str(self.port), *options]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while "demo at" not in self.log:
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", self.port)):
                    return
            time.sleep(0.05)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def demo_process(folder: Path, *options: str, run: Path = RECORDED) -> Iterator[DemoProcess]:
    """Run a demo, of the recorded runs by default, on a free port until the block ends."""
    demo = DemoProcess(folder, *options, run=run)
    try:
        yield demo
    finally:
        demo.stop()
