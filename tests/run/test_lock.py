"""One writer at a time in a run directory: what each half of the lock keeps out, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers import disks
from vlm_rl.errors import UserError
from vlm_rl.run import lock as lock_module
from vlm_rl.run.lock import RunLock

HOLDER = """
import sys, time
from pathlib import Path
from vlm_rl.run.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
lock.release()
"""
# A process of another machine, on a file system that does not pass the kernel lock on; its clock is an hour ahead.
ELSEWHERE = {"host": "elsewhere", "pid": 7, "since": "2999-01-01 01:00:00+00:00", "machine": "m2", "holder": "h2"}


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture
def quick_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "RENEWAL_SECONDS", 0.1)


def write_lease(folder: Path, lease: dict, renewals: int) -> None:
    work = folder / "lease"
    work.write_text(json.dumps({**lease, "renewals": renewals}))
    work.replace(folder / lock_module.LOCK)


def test_a_second_process_is_refused_by_name_until_the_first_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as process, RunLock(tmp_path) as second:
        lease = json.loads((tmp_path / lock_module.LOCK).read_text())
        with pytest.raises(UserError) as refusal:
            second.acquire()
        for word in (str(tmp_path), f"host {lease['host']}", f"pid {process.pid}", f"since {lease['since']}"):
            assert word in str(refusal.value)
    assert list(tmp_path.iterdir()) == []  # given back, and nothing is left
    with RunLock(tmp_path) as third:
        third.acquire()


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    with RunLock(tmp_path) as first, RunLock(tmp_path) as second:
        first.acquire()
        with pytest.raises(UserError, match=f"pid {os.getpid()}"):
            second.acquire()
        second.release()
        assert (tmp_path / lock_module.LOCK).exists()


def test_a_killed_holder_holds_nothing(tmp_path: Path, capsys) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / lock_module.LOCK).exists()
        with RunLock(tmp_path) as lock:
            lock.acquire()
    assert capsys.readouterr().err == ""  # on one machine nothing has to be waited for


def test_a_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        lock.acquire()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:  # it outlives the lock
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with RunLock(tmp_path) as again:
            again.acquire()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"{}"])
def test_a_damaged_lock_that_nobody_holds_is_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / lock_module.LOCK).write_bytes(content)
    with RunLock(tmp_path) as lock:
        lock.acquire()
        assert json.loads((tmp_path / lock_module.LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.usefixtures("quick_renewals")
@pytest.mark.parametrize("since", ["1999-01-01 00:00:00+00:00", "2999-01-01 00:00:00+00:00"])
def test_an_old_lease_of_another_machine_is_taken_whatever_its_clock_says(tmp_path: Path, since: str, capsys) -> None:
    write_lease(tmp_path, {**ELSEWHERE, "since": since}, 5)
    with RunLock(tmp_path) as lock:
        lock.acquire()
        lock.check()
    assert "host elsewhere, pid 7" in capsys.readouterr().err


def test_a_lease_that_another_machine_renews_is_refused_whatever_its_clock_says(tmp_path: Path) -> None:
    write_lease(tmp_path, ELSEWHERE, 0)
    program = """
import json, sys, time
from pathlib import Path
path, lease = Path(sys.argv[1]), json.loads(sys.argv[2])
for renewals in range(1, 10_000):
    path.with_name("next").write_text(json.dumps({**lease, "renewals": renewals}))
    path.with_name("next").replace(path)
    print(flush=True)
    time.sleep(0.05)
"""
    words = [sys.executable, "-c", program, str(tmp_path / lock_module.LOCK), json.dumps(ELSEWHERE)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        with RunLock(tmp_path) as lock, pytest.raises(UserError, match="host elsewhere, pid 7, since 2999"):
            lock.acquire()
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / lock_module.LOCK).exists()  # it is the other's


@pytest.mark.usefixtures("quick_renewals")
def test_a_lease_is_renewed_and_one_that_was_taken_over_stops_its_holder(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        lock.acquire()
        renewed = until(lambda: json.loads((tmp_path / lock_module.LOCK).read_text())["renewals"] >= 2)
        assert renewed
        lock.check()
        write_lease(tmp_path, ELSEWHERE, 1)
        assert until(lambda: bool(lock._newer_lease))
        with pytest.raises(UserError, match=r"taken over by another process .host elsewhere"):
            lock.check()
    assert json.loads((tmp_path / lock_module.LOCK).read_text())["host"] == "elsewhere"


def until(holds) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if holds():
                return True
        except ValueError:  # the file is just being written
            pass
        time.sleep(0.02)
    return False


def test_a_folder_that_is_not_there_is_a_message(tmp_path: Path) -> None:
    with RunLock(tmp_path / "none") as lock, pytest.raises(UserError, match=r"\.lock could not be written"):
        lock.acquire()


def test_a_read_only_folder_is_a_message(tmp_path: Path) -> None:
    try:
        with disks.small_disk(tmp_path / "small", kilobytes=64) as disk:
            disks.make_read_only(disk)
            with RunLock(disk) as lock, pytest.raises(UserError, match=r"\.lock could not be written: Read-only"):
                lock.acquire()
    except disks.CannotMountError as error:
        pytest.skip(str(error))
