"""One writer at a time in a run directory.

    with RunLock(run.path) as lock:
        lock.acquire()          # raises UserError, which names the process that writes there
        ...
        lock.check()            # raises UserError if another machine has taken the folder over meanwhile

Two things keep a second writer out, and each covers what the other cannot:

- **A kernel lock** (flock) on the file .lock. It ends with its process, however that ends, and only it decides
  between processes of one machine. A file system that passes it on, such as NFS, keeps other machines out as well.
- **A lease** inside the file, which names its holder and counts its renewals. It is for shared file systems that do
  not pass the kernel lock on. A process of another machine watches the lease for six intervals: one that changes is
  held, one that does not was left behind by a crash. No clock is compared with another machine's: clocks may
  differ.

Two cases are left, both on such file systems: a machine that was suspended for more than six intervals, and two
machines that take over the same old lease within one. The holder that lost the lease sees it at its next renewal, and
`check` then stops it.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from vlm_rl.errors import UserError
from vlm_rl.run.writing import writing
from vlm_rl.untrusted.json_object import read_object

LOCK = ".lock"
RENEWAL_SECONDS = 10.0
MISSED_RENEWALS = 6  # after which a lease is old: loading a large model may keep its holder from renewing it
OLD_SECONDS = MISSED_RENEWALS * RENEWAL_SECONDS
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one per start of a kernel, whatever a container calls its host

Lease = dict[str, Any]  # host, pid, since: for people; machine, holder, renewals: what decides


class RunLock:
    """The right to write into a folder. Use as a context manager, which gives it back."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._file: int | None = None  # the descriptor that holds the kernel lock
        self._lease: Lease = {}
        self._newer_lease: Lease = {}  # of another process, once it has replaced ours
        self._renewing = threading.Thread(target=self._renew, name="run-lock", daemon=True)
        self._released = threading.Event()

    def acquire(self) -> None:
        """Take the lock. Raises UserError if another process holds it, or if the folder cannot be written."""
        with writing(self.path):
            file, is_exclusive = _open_locked(self.path)
            try:
                previous = _read(self.path)
                if previous and not (is_exclusive and previous.get("machine") == _machine()):
                    _wait_until_old(self.path, previous)
                self._lease = _new_lease()
                _write(file, self._lease)
            except BaseException:
                os.close(file)
                raise
        self._file = file
        os.register_at_fork(after_in_child=self._forget)
        self._renewing.start()

    def check(self) -> None:
        """Raise UserError if another process has taken the folder over."""
        if self._newer_lease:
            raise UserError(
                f"{self.path.parent} was taken over by {_holder(self._newer_lease)} while this process was "
                "suspended: nothing more is written here; let that process finish, or stop it and resume"
            )

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._file is None:
            return
        self._released.set()
        self._renewing.join()
        with suppress(OSError):
            if _is_at(self.path, self._file) and not self._newer_lease:
                self.path.unlink()
        self._forget()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _forget(self) -> None:
        """Close the file. A child that was forked does so too, or it would hold the lock when its parent is gone."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _renew(self) -> None:
        assert self._file is not None
        while not self._released.wait(RENEWAL_SECONDS):
            with suppress(OSError):  # whoever writes a run's files reports what the file system refuses
                lease = _read(self.path)
                if lease and lease.get("holder") != self._lease["holder"]:
                    self._newer_lease = lease
                    return
                self._lease["renewals"] += 1
                _write(self._file, self._lease)


def lease_of(folder: Path) -> bytes:
    """Return the lease of whoever writes into a folder, which changes with every renewal; empty if nobody does."""
    try:
        return (folder / LOCK).read_bytes()
    except OSError:
        return b""


def _open_locked(path: Path) -> tuple[int, bool]:
    """Open the lock's file and take the kernel lock on it. Return the descriptor, and whether it is locked.

    It is not on a file system without such locks. Raises UserError if another process holds it.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            _refuse(path)
        except OSError:  # this file system has no such locks
            return file, False
        if _is_at(path, file):
            return file, True
        os.close(file)  # its holder has just removed it


def _wait_until_old(path: Path, lease: Lease) -> None:
    """Wait until a lease of another machine has missed its renewals. Raises UserError if it is renewed."""
    seconds = MISSED_RENEWALS * RENEWAL_SECONDS
    print(
        f"{path.parent} was last written by {_holder(lease)}: waiting {seconds:.0f} s to see whether it still is",
        file=sys.stderr,
        flush=True,
    )
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(RENEWAL_SECONDS / 10)
        if _read(path) != lease:
            _refuse(path)


def _refuse(path: Path) -> NoReturn:
    raise UserError(
        f"{path.parent}: {_holder(_read(path))} writes here: "
        "wait until it ends, or stop it, then give this command again"
    )


def _holder(lease: Lease) -> str:
    if not lease:
        return "another process"
    return f"another process (host {lease.get('host')}, pid {lease.get('pid')}, since {lease.get('since')})"


def _new_lease() -> Lease:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(" ", "seconds"),
        "machine": _machine(),
        "holder": secrets.token_hex(8),
        "renewals": 0,
    }


def _machine() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()


def _read(path: Path) -> Lease:
    """Return the lease, or {} if there is none or it is just being written."""
    try:
        return read_object(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _write(file: int, lease: Lease) -> None:
    data = json.dumps(lease).encode() + b"\n"
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))
    os.fsync(file)  # a shared file system shows others what has left this machine


def _is_at(path: Path, file: int) -> bool:
    """Tell whether the path still names this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
