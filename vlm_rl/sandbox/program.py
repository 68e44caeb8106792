"""One program, what it may take, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vlm_rl.errors import signal_name

_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']{1,80})'")


def explained(error: str) -> str:
    """Return the last line of a traceback, or what it means where a module is not inside the walls."""
    if (missing := _MISSING_MODULE.fullmatch(error)) is None:
        return error
    return (
        f"it imports {missing[1]}, which is not there: the sandbox has the standard library, and NumPy if installed"
    )


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What one program may take."""

    seconds: float = 20.0  # by the wall clock
    cpu_seconds: int = 10
    memory: int = 1 << 30  # bytes of the whole program, with the buffers that the kernel may hold for it
    threads: int = 16
    output: int = 1 << 20  # bytes, of stdout and of stderr
    files: int = 16 << 20  # bytes in its folder, which is memory too
    num_files: int = 1000
    open_files: int = 64
    stack: int = 64 << 20  # bytes of the main thread, and the default of others


@dataclass(frozen=True, slots=True)
class Program:
    """One program with its input."""

    source: str
    stdin: bytes = b""
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    files: Mapping[str, str] = field(default_factory=dict)  # plain name -> text, further files in its folder


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """How a program ended and what it wrote."""

    ending: Literal["ended", "time", "output"]  # by itself or by a limit of the kernel, or killed for one of the two
    code: int | None  # the exit code, or minus the signal; None if it was killed for time or output
    stdout: bytes
    stderr: bytes
    seconds: float
    cpu_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def succeeded(self) -> bool:
        """Tell whether it ended by itself with exit code 0."""
        return self.ending == "ended" and self.code == 0

    @property
    def reason(self) -> str:
        """Return in a few words how it ended, with the last line of stderr after an error."""
        if self.ending != "ended":
            return {"time": f"no end after {self.seconds:.1f} seconds", "output": "too much output"}[self.ending]
        if self.code is None:
            return "it broke the process that waits for it"
        if self.code < 0:
            return f"killed by {signal_name(-self.code)} after {self.cpu_seconds:.1f} CPU seconds"
        last = self.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"exit code {self.code}" + (f": {explained(last)[:200]}" if self.code and last else "")
