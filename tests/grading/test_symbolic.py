"""The symbolic comparison server: its limits, met by real comparisons in real workers, and its life and death."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.processes import children_of
from tests.helpers.warm_grader import use_own_grader, use_warm_grader
from vlm_rl.grading import symbolic_client
from vlm_rl.grading.grader import Grader
from vlm_rl.grading.symbolic_client import SymbolicClient
from vlm_rl.templates import TEMPLATES

PLAIN = TEMPLATES["plain"]
GOOD, WRONG = ("equal", r"\ln 8", r"3\ln 2"), ("equal", r"\ln 8", r"2\ln 3")
LIGHT = ("equal", "2", "2")  # a hundredth of a second: far below every limit, on a slow machine too
ENDLESS = ("equal", "9", "9^{9^{9^9}}")  # more digits than there are particles: only a limit ends it


@pytest.fixture
def _started_as_a_user_s() -> Iterator[None]:
    """Servers begin as children of this process; those of other tests are forked, which is much quicker."""
    use_own_grader()
    yield
    use_warm_grader()


@pytest.fixture(scope="module")
def client() -> Iterator[SymbolicClient]:
    client = SymbolicClient(workers=2, timeout=0.5, memory_bytes=1 << 30)
    yield client
    client.close()


def test_cpu_time_decides_and_good_queries_survive(client: SymbolicClient) -> None:
    """Two endless queries die by their own CPU clocks, and their neighbours are answered."""
    replies = client.answer([ENDLESS, GOOD, ("equal", "9", "(10^9)!"), WRONG])
    assert [status for status, _ in replies] == ["timeout", "ok", "timeout", "ok"]
    assert (replies[1][1], replies[3][1]) == (True, False)


def test_a_process_with_thousands_of_open_files_is_answered() -> None:
    """A trainer's limit of files is far above 1024, and so may be the number of a pipe."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this machine lets a process have {hard} open files")
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    client = SymbolicClient(workers=1, timeout=5.0)
    try:
        while not held or held[-1] < 1100:
            held.append(os.open(os.devnull, os.O_RDONLY))
        assert client.answer([("equal", "x+1", "1+x")]) == [("ok", True)]
    finally:
        client.close()
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_wait_for_replies_shows_that_it_goes_on(client: SymbolicClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """One endless query takes 0.5 s of CPU time, into which 25 looks fit; where much runs, each takes longer."""
    signs = list[None]()
    monkeypatch.setattr(client, "_waits", lambda: signs.append(None))
    monkeypatch.setattr(symbolic_client, "_LOOK_SECONDS", 0.02)
    assert client.answer([ENDLESS])[0][0] == "timeout"
    assert len(signs) >= 5


@pytest.mark.usefixtures("_started_as_a_user_s")
def test_a_server_started_ahead_is_the_one_that_answers_also_behind_one_closed_before_it_was_ready(
    client: SymbolicClient,
) -> None:
    client.close()
    client.start()
    assert client._server is not None
    closed = client._server.pid
    client.close()
    assert not runs(closed)
    client.start()
    process = client._server.pid
    for query, verdict in ((GOOD, True), (WRONG, False)):
        client.start()  # it runs already
        assert client.answer([query]) == [("ok", verdict)]
    assert client._server.pid == process and runs(process)


@pytest.mark.usefixtures("_started_as_a_user_s")
def test_a_killed_server_is_replaced_knows_no_secret_and_leaves_no_process(
    client: SymbolicClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.answer([GOOD]) == [("ok", True)]
    assert client._server is not None
    monkeypatch.setenv("SOME_API_TOKEN", "very-secret")
    os.killpg(client._server.pid, signal.SIGKILL)
    assert client.answer([GOOD]) == [("ok", True)]
    assert client._server is not None
    processes = [client._server.pid, *children_of(client._server.pid)]
    assert len(processes) >= 2
    for process in processes:
        environment = Path(f"/proc/{process}/environ").read_text().split("\0")
        assert {line.partition("=")[0] for line in environment if line} <= {
            *("LD_LIBRARY_PATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        }
        assert "PYTHONHASHSEED=0" in environment  # the same text takes the same way every time
    client.close()
    assert eventually(lambda: not any(map(runs, processes)))  # the kernel may take a moment to end them


@pytest.fixture(scope="module")
def limited() -> Iterator[SymbolicClient]:
    """Yield a client of one worker, which may take 64 MiB and is replaced after each query. CPU time is free."""
    client = SymbolicClient(workers=1, timeout=100.0, memory_bytes=64 << 20, queries_per_worker=1)
    yield client
    client.close()


def workers(client: SymbolicClient) -> list[int]:
    """Return the process ids of the server's children; none while there is no server."""
    server = client._server
    return [] if server is None else children_of(server.pid)


def eventually(condition: Callable[[], bool]) -> bool:
    """Return whether a condition comes true within two minutes; what is waited for takes milliseconds."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_memory_bomb_meets_its_limit_and_harms_nothing_else(limited: SymbolicClient) -> None:
    r"""Ask for \sin(2^{9999^3}), which passes the filter and has 10^12 bits: 125 GB."""
    with Grader() as grader:
        grader._symbolic = limited

        def grade(answer: str) -> tuple[str, str]:
            grade = grader.grade(rf"\boxed{{{answer}}}", gold=r"\ln 8", answer_type="expression", template=PLAIN)
            return grade.verdict, grade.reason

        assert grade(r"3\ln 2")[0] == "correct"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        verdict, reason = grade(r"\sin(2^{9999^3})")
        assert verdict == "error" and "64 MiB" in reason
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
        assert limited._server is not None
        peak = re.search(r"VmHWM:\s+([0-9]+)", Path(f"/proc/{limited._server.pid}/status").read_text())
        assert peak and int(peak[1]) < 128 << 10  # KiB, of the server
        assert (grade(r"3\ln 2")[0], grade(r"2\ln 3")[0]) == ("correct", "wrong")


def test_a_worker_writes_no_file_and_is_replaced(limited: SymbolicClient) -> None:
    assert limited.answer([GOOD]) == [("ok", True)]
    assert eventually(lambda: len(workers(limited)) == 1)
    (worker,) = workers(limited)
    rows = Path(f"/proc/{worker}/limits").read_text().splitlines()
    limits = {row[:26].strip(): row[26:].split()[:2] for row in rows}
    assert limits["Max file size"] == limits["Max core file size"] == ["0", "0"]
    soft, hard = limits["Max address space"]
    assert soft == hard and 64 << 20 < int(soft) < 1 << 30
    assert limited.answer([GOOD, WRONG]) == [("ok", True), ("ok", False)]
    assert eventually(lambda: worker not in workers(limited))


def busy(client: SymbolicClient) -> list[int]:
    """Return the workers that have computed for a tenth of a second."""
    ticks = os.sysconf("SC_CLK_TCK") / 10
    return [worker for worker in workers(client) if cpu_ticks(worker) > ticks]


def pid_of_server(client: SymbolicClient) -> int:
    """Return the server's process id; 0 while there is none."""
    server = client._server
    return 0 if server is None else server.pid


def cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[11]) + int(fields[12])  # user and system


def test_a_worker_that_dies_loses_only_its_own_reply(limited: SymbolicClient) -> None:
    with ThreadPoolExecutor(1) as thread:
        replies = thread.submit(limited.answer, [LIGHT, ENDLESS, GOOD, WRONG])
        assert eventually(lambda: bool(busy(limited)))
        os.kill(busy(limited)[0], signal.SIGKILL)
        first, died, *rest = replies.result(120)
        assert (first, rest) == (("ok", True), [("ok", True), ("ok", False)])
        assert died[0] == "error" and "-9" in died[1]


@pytest.mark.slow
def test_a_server_that_dies_twice_is_an_error_and_a_third_one_answers(limited: SymbolicClient) -> None:
    with ThreadPoolExecutor(1) as thread:
        replies = thread.submit(limited.answer, [ENDLESS, GOOD])
        killed = {0}  # which is no server's
        for _ in range(2):
            assert eventually(lambda: bool(busy(limited)) and pid_of_server(limited) not in killed)
            killed.add(server := pid_of_server(limited))
            os.kill(server, signal.SIGKILL)
        assert [status for status, _ in replies.result(120)] == ["error", "error"]
    assert limited.answer([GOOD]) == [("ok", True)]


def test_a_comparison_that_waits_meets_the_wall_clock_and_is_an_error(
    limited: SymbolicClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take ENDLESS for a comparison that waits: its CPU clock would end it only after 100 seconds."""
    limited.close()
    monkeypatch.setitem(limited.options, "wall_seconds", 0.5)
    (status, sentence), light = limited.answer([ENDLESS, LIGHT])
    assert (status, light) == ("error", ("ok", True)) and "wall-clock" in sentence
    limited.close()


@pytest.mark.usefixtures("_started_as_a_user_s")
def test_a_server_that_cannot_start_says_what_is_missing() -> None:
    client = SymbolicClient(workers=1, timeout=1.0)
    client.options["path"] = []
    with pytest.raises(RuntimeError, match="did not start: cannot import pebble"):
        client.answer([GOOD])


OWNER = """
import os, sys, threading, time
from vlm_rl.grading.symbolic_client import SymbolicClient

client = SymbolicClient(workers=1, timeout=100.0)
client.answer([("equal", "x", "2x")])
threading.Thread(target=client.answer, args=([("equal", "9", "9^{9^{9^9}}")] * (sys.argv[1] == "busy"),)).start()
child = os.fork()  # it keeps the pipe to the server open
if child == 0:
    time.sleep(300)
print(client._server.pid, child, flush=True)
time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_no_process_outlives_its_owner(state: str) -> None:
    """Kill the owner: an idle server ends by itself, and so does a busy worker whose server is killed too."""
    with subprocess.Popen([sys.executable, "-c", OWNER, state], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server, child = map(int, owner.stdout.readline().split())
        processes = [server, *children_of(server)]
        assert len(processes) == 2
        if state == "busy":
            assert eventually(lambda: cpu_ticks(processes[1]) > 50)
        try:
            owner.kill()
            if state == "busy":
                os.kill(server, signal.SIGKILL)
            assert eventually(lambda: not any(map(runs, processes)))
        finally:
            os.kill(child, signal.SIGKILL)


def runs(pid: int) -> bool:
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
