"""Real file systems that refuse: small ones that fill, and ones that are read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CannotMountError(Exception):
    """Raised where this process may not mount a file system."""


@contextmanager
def small_disk(place: Path, *, kilobytes: int) -> Iterator[Path]:
    """Make a file system of this size at `place`. Raises CannotMountError."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        raise CannotMountError("needs the right to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def make_read_only(disk: Path) -> None:
    """Let the file system at `disk` (of `small_disk`) refuse every write from now on."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Leave no free block on the file system at `disk`."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(bytes(free))
