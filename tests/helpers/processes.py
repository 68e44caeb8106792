"""Questions about processes that tests ask Linux."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children. Threads and processes may end meanwhile."""
    children: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, listed.read_text().split())
    return children


def processes_with(text: str) -> list[int]:
    """Return the process ids whose command line has this text."""
    pids: list[int] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text.encode() in file.read_bytes():
                pids.append(int(file.parent.name))
    return pids
