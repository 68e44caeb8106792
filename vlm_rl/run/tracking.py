"""Trackers of a run: a process for each (vlm_rl.run.mirror), since none may stop or delay the training.

tracking = Tracking(run.path, config.log)
tracking.complaints()   # now and then: a line for each that failed since
tracking.close()        # waits at most END_SECONDS, and returns a line for each
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from vlm_rl.config import TrackersConfig
from vlm_rl.errors import UserError
from vlm_rl.run.mirror import END_SECONDS, Progress, progress_file
from vlm_rl.run.trackers.registry import check_trackers
from vlm_rl.run.writing import writing


class Tracking:
    """The trackers of one run. What they print goes into trackers/NAME.log of the run directory."""

    def __init__(self, run: Path, log: TrackersConfig, *, samples_every: int = 0) -> None:
        """Start a process for each tracker of `log`. Raises UserError for a missing library.

        Args:
            run: the run directory.
            log: which trackers, and what they are told.
            samples_every: steps between tables of samples; 0: none.
        """
        check_trackers(log.trackers)
        self.run = run
        settings = json.dumps(
            {"project": log.project, "group": log.group, "tags": log.tags, "samples_every": samples_every}
        )
        self._processes = {name: self._start(name, settings) for name in dict.fromkeys(log.trackers)}

    def _start(self, name: str, settings: str) -> subprocess.Popen[bytes]:
        output = progress_file(self.run, name).with_suffix(".log")
        with writing(output):
            output.parent.mkdir(exist_ok=True)
            with output.open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-P", "-m", "vlm_rl.run.mirror", str(self.run), name, settings],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # Ctrl-C is for the training, which then ends this process in order
                )

    def complaints(self) -> list[str]:
        """Return a line for each process that has ended before its time, once."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        ended = {name: code for name, code in codes.items() if code is not None}
        for name in ended:
            del self._processes[name]
        return [self._failure(name, code) for name, code in ended.items()]

    def close(self, seconds: float | None = END_SECONDS + 5) -> list[str]:
        """Let the processes send what is left, and return a line for each.

        Args:
            seconds: After which those that still run are killed; None waits for as long as it takes.
        """
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(b"\n")  # closing the pipe would not do: a forked child may hold it open
                process.stdin.close()
        deadline = None if seconds is None else time.monotonic() + seconds
        lines = [self._end(name, process, deadline) for name, process in self._processes.items()]
        self._processes = {}
        return lines

    def _end(self, name: str, process: subprocess.Popen[bytes], deadline: float | None) -> str:
        try:
            code = process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what its client left running goes with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"{name}: {Progress.read(self.run, name).where}" if code == 0 else self._failure(name, code)

    def _failure(self, name: str, code: int | None) -> str:
        late = f"it did not finish within {END_SECONDS:.0f} s"
        try:
            why = Progress.read(self.run, name).error or (late if code is None else f"it ended with exit code {code}")
        except UserError as error:
            why = str(error)
        command = f"vlm-rl track {shlex.quote(str(self.run))} log.trackers=[{name}]"
        log = progress_file(self.run, name).with_suffix(".log")
        return f"{name} does not have all of the run: {why} ({log} says more); `{command}` sends the rest"
