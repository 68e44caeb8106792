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
