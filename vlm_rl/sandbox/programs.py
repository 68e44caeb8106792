"""Run programs that nobody has read, each inside its own walls; where the walls cannot be built, run nothing.

    with Sandbox(workers=2) as sandbox:
        run = sandbox.run(Program("print(input()[::-1])", stdin=b"abc"))
        run.stdout  # b"cba\\n"

A program runs in fresh user, process, mount, network, IPC and UTS namespaces, with Python's own files read-only, an
empty folder of its own, no capabilities, limits, and a filter of system calls under which it stays one process. What
it is compared with never goes inside. docs/code.md lists the walls; tests/attack/sandbox.py attacks them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from vlm_rl.errors import UserError
from vlm_rl.sandbox import probe, system_calls
from vlm_rl.sandbox.interpreter import LIBRARIES, PACKAGES, PYTHON, interpreter_files
from vlm_rl.sandbox.program import Program, ProgramLimits, ProgramRun

__all__ = ["Program", "ProgramLimits", "ProgramRun", "Sandbox", "SandboxError"]

_GRACE = 60.0  # seconds beyond a program's own, after which its launcher is taken for hung
_START_SECONDS = 60.0
_FEWEST_OPEN_FILES = 16


class SandboxError(RuntimeError):
    """Raised where a program could not be run for a fault of the sandbox; it says nothing about the program."""


class Sandbox:
    """A pool of launchers, each of which runs one program at a time. A context manager.

    Nothing starts before the first program. Then the walls are built and proved: programs of ours try the network,
    the files, a second process, threads, memory, output and time.
    """

    def __init__(self, *, workers: int = 2) -> None:
        self._idle: queue.SimpleQueue[_Launcher | None] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._launchers: set[_Launcher] = set()
        self._lock = threading.Lock()
        self._is_proved = False
        self._is_closed = False

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Build the walls and prove each, if that is not done yet.

        Raises UserError if this machine cannot build them or one does not hold; it says which, and what to do.
        """
        with self._lock:
            if not self._is_proved:
                probe.check_machine()
                for program, is_held in probe.PROBES:
                    run = self._run(program)
                    if fault := is_held(run):
                        raise UserError(
                            f"programs are not run here, because a wall of the sandbox does not hold: {fault}. "
                            "docs/code.md says what each wall needs"
                        )
                self._is_proved = True

    def run(self, program: Program) -> ProgramRun:
        """Run one program.

        Raises UserError if there are no walls, and SandboxError where the sandbox fails twice.
        """
        self.check()
        return self._run(program)

    def close(self) -> None:
        """Kill the launchers and whatever runs in them; a program that is waited for raises SandboxError."""
        self._is_closed = True
        for launcher in [*self._launchers]:
            launcher.close()

    def _run(self, program: Program) -> ProgramRun:
        launcher = self._idle.get()
        try:
            fault = ""
            for _ in range(2):
                if launcher is None and not self._is_closed:
                    launcher = _Launcher()
                    self._launchers.add(launcher)
                if launcher is None or self._is_closed:
                    if launcher is not None:  # which `close` does not know if it began meanwhile
                        launcher.close()
                    raise SandboxError("the sandbox is closed")
                try:
                    return launcher.run(program)
                except (OSError, ValueError, SandboxError) as error:
                    fault = str(error)
                    self._launchers.discard(launcher)
                    launcher.close()
                    launcher = None
            raise SandboxError(f"the sandbox failed twice on a program: {fault}")
        finally:
            self._idle.put(launcher)


def with_buffers_counted(limits: ProgramLimits) -> ProgramLimits:
    """Return limits of which the memory is that of the address space alone.

    What a program leaves in sockets and pipes is memory of the kernel. Every open file may hold a buffer of the
    machine's default size, so all of them come off the memory, up to a quarter of it. Where that is not enough, as on
    machines with large buffers, fewer files may be open.
    """
    buffer = _largest_buffer()
    share = limits.memory // 4
    open_files = max(_FEWEST_OPEN_FILES, min(limits.open_files, share // buffer))
    return replace(limits, memory=limits.memory - min(share, open_files * buffer), open_files=open_files)


def _largest_buffer() -> int:
    """Return the most bytes that one descriptor holds: a socket's buffer may pass its limit by one message."""
    try:
        default = int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="ascii"))
    except (OSError, ValueError):
        default = 212992
    return max(default * 3 // 2, 64 << 10)


class _Launcher:
    """The process that builds the walls (launcher.py) and runs one program at a time."""

    def __init__(self) -> None:
        """Start it. Raises UserError if the kernel refuses a wall."""
        program = Path(__file__).with_name("launcher.py")
        filter_of_calls = system_calls.filter_program().hex()
        setup = {
            "files": interpreter_files(),
            "python": PYTHON,
            "libraries": LIBRARIES,
            "packages": PACKAGES,
            "filter": filter_of_calls,
        }
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        self._process = subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", "-B", str(program), json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept,
            cwd="/",
            start_new_session=True,
        )
        try:
            self._receive(_START_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, program: Program) -> ProgramRun:
        """Run a program. Raises UserError, SandboxError, or OSError where the launcher is gone."""
        texts = {"main.py": program.source, **program.files}
        files = {name: text.encode(errors="surrogatepass") for name, text in texts.items()}
        sizes = {name: len(data) for name, data in files.items()}
        header = {"files": sizes, "stdin": len(program.stdin), "limits": asdict(with_buffers_counted(program.limits))}
        request = b"".join([json.dumps(header).encode(), b"\n", *files.values(), program.stdin])
        reply, (stdout, stderr) = self._receive(program.limits.seconds + _GRACE, request)
        return ProgramRun(
            ending=reply["ending"],
            code=reply.get("code") if reply["ending"] == "ended" else None,
            stdout=stdout,
            stderr=stderr,
            seconds=reply["seconds"],
            cpu_seconds=reply.get("cpu_seconds", 0.0),
            peak_bytes=reply.get("peak_kib", 0) * 1024,
        )

    def close(self) -> None:
        """Kill it; the programs of a launcher die with it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in self._pipes():
            with contextlib.suppress(OSError, ValueError):
                pipe.close()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _receive(self, seconds: float, request: bytes = b"") -> tuple[dict[str, Any], list[bytes]]:
        stdin, stdout = self._pipes()
        alarm = threading.Timer(seconds, self._process.kill)
        alarm.daemon = True
        alarm.start()
        try:
            stdin.write(request)
            stdin.flush()
            line = stdout.readline()
            reply: dict[str, Any] = json.loads(line) if line else {"failed": "its launcher ended"}
            parts = [stdout.read(size) for size in reply.get("sizes", [])]
        finally:
            alarm.cancel()
        if "refused" in reply:
            raise UserError(probe.refusal(reply["refused"]))
        if "failed" in reply:
            raise SandboxError(reply["failed"])
        return reply, parts
