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


def listening() -> set[str]:
    """Return the addresses on which this process listens, as address:port in the hex of /proc/net/tcp and tcp6."""
    places = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # LISTEN
                places[f"socket:[{fields[9]}]"] = fields[1]
    found: set[str] = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError, KeyError):  # closed meanwhile; no such socket
            found.add(places[str(link.readlink())])
    return found
