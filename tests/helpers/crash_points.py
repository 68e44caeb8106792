"""The points at which a run touches the disk or forks, and a library that kills it there, or lets the disk fail."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("crash_points.c")


@cache
def library() -> Path | None:
    """Return the compiled library, to be preloaded (LD_PRELOAD); None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    name = f"crash-points-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    built = Path(tempfile.gettempdir()) / f"vlm-rl-tests-{os.getuid()}" / name
    if not built.exists():
        built.parent.mkdir(mode=0o700, exist_ok=True)
        work = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(work), str(SOURCE), "-ldl"], check=True)
        work.replace(built)
    return built


def arm(folder: str, *, number: int = 0, log: str = "") -> None:
    """Let this process, in which the library is preloaded, die at a point below `folder`, or list all its points."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if log else -1
    ctypes.CDLL(None).crash_arm(folder.encode(), ctypes.c_long(number), descriptor)


def fail(folder: str, *, error: str, number: int = 0, file: str = "") -> None:
    """Let this process's disk fail below `folder` with an error such as "EIO".

    It does so for good from the point of this number on, or from the first call on a path that holds `file`.
    """
    code = getattr(errno, error)
    ctypes.CDLL(None).crash_fail(folder.encode(), ctypes.c_long(number), file.encode(), ctypes.c_int(code))
