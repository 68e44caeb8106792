"""The sandbox: what a program gets, how its end is told, and that nothing runs where a wall is missing.

tests/attack/sandbox.py attacks the walls.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import children_of
from vlm_rl.errors import UserError
from vlm_rl.sandbox import probe, programs
from vlm_rl.sandbox.interpreter import interpreter_files
from vlm_rl.sandbox.program import Program, ProgramLimits
from vlm_rl.sandbox.programs import Sandbox, SandboxError


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=2) as sandbox:
        yield sandbox


def test_a_program_reads_and_writes_bytes(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 2000  # more than a pipe holds
    source = "import sys\ndata = sys.stdin.buffer.read()\nsys.stdout.buffer.write(data[::-1])\nsys.exit(3)"
    run = sandbox.run(Program(source, stdin=data))
    assert (run.stdout, run.code, run.succeeded) == (data[::-1], 3, False)


def test_a_preloaded_library_stays_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets LD_PRELOAD in the process that starts its engine, and the grader may start there later."""
    library = next(Path(source) for source, target in interpreter_files() if Path(target).name.startswith("libc."))
    (tmp_path / "preloaded.so").write_bytes(library.read_bytes())
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "preloaded.so"))
    interpreter_files.cache_clear()
    try:
        assert not any("preloaded" in source for source, _ in interpreter_files())
        with Sandbox(workers=1) as own:
            assert own.run(Program("print(1)")).stdout == b"1\n"
    finally:
        interpreter_files.cache_clear()


def test_a_wall_that_cannot_be_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    files = (*interpreter_files(), ("/nowhere/libx.so", "/lib/libx.so"))
    monkeypatch.setattr("vlm_rl.sandbox.programs.interpreter_files", lambda: files)
    with Sandbox(workers=1) as own, pytest.raises(UserError, match="/nowhere/libx"):
        own.run(Program("print(1)"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("print(1)", "exit code 0"),
        ("raise ValueError('odd')", "exit code 1: ValueError: odd"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL after"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40 after"),  # real-time: without a name
        ("import time; time.sleep(60)", "no end after"),
        ("while True: print('x' * 1000)", "too much output"),
        ("def f(:", "exit code 1: SyntaxError: invalid syntax"),
    ],
)
def test_how_a_program_ended_is_said(sandbox: Sandbox, source: str, reason: str) -> None:
    limits = ProgramLimits(seconds=0.5 if "sleep" in source else 30)
    assert sandbox.run(Program(source, limits=limits)).reason.startswith(reason)


def test_each_program_starts_with_an_empty_folder(sandbox: Sandbox) -> None:
    source = "import os; print(sorted(os.listdir())); open('left', 'w').write('x')"
    files = {"data.txt": "text"}
    assert [sandbox.run(Program(source, files=files)).stdout for _ in range(4)] == [b"['data.txt', 'main.py']\n"] * 4


def test_a_killed_launcher_is_replaced() -> None:
    with Sandbox(workers=1) as sandbox:
        assert sandbox.run(Program("print(1)")).succeeded
        os.kill(next(iter(sandbox._launchers))._process.pid, signal.SIGKILL)
        assert sandbox.run(Program("print(2)")).stdout == b"2\n"


def test_closing_ends_a_program_that_runs() -> None:
    sandbox, ends = Sandbox(workers=1), []
    sandbox.check()

    def run() -> None:
        with pytest.raises(SandboxError):
            sandbox.run(Program("import time; time.sleep(60)", limits=ProgramLimits(seconds=60)))
        ends.append("ended")

    thread = threading.Thread(target=run)
    thread.start()
    (launcher,) = sandbox._launchers
    while not children_of(launcher._process.pid):  # until it runs
        time.sleep(0.01)
    sandbox.close()
    thread.join(timeout=30)
    assert ends == ["ended"]


def test_closing_ends_a_launcher_that_just_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[programs._Launcher] = []

    class Begins(programs._Launcher):
        def __init__(self) -> None:
            super().__init__()
            begun.append(self)
            sandbox.close()

    sandbox = Sandbox(workers=1)
    sandbox.check()
    (idle,) = sandbox._launchers
    idle.close()  # the next program needs a new one
    monkeypatch.setattr(programs, "_Launcher", Begins)
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run(Program("print(1)"))
    assert [launcher._process.poll() for launcher in begun] == [-signal.SIGKILL]


def test_a_wall_that_does_not_hold_stops_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe itself is tested: with a filter that allows everything, a second process can be started."""
    allow_everything = bytes.fromhex("06000000" + "0000ff7f")
    monkeypatch.setattr("vlm_rl.sandbox.system_calls.filter_program", lambda: allow_everything)
    with Sandbox(workers=1) as sandbox, pytest.raises(UserError, match="a wall of the sandbox does not hold"):
        sandbox.run(Program("print(1)"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"user.max_user_namespaces": "0"}, "user.max_user_namespaces is 0: set it with `sysctl user.max_user_name"),
        (
            {"kernel.apparmor_restrict_unprivileged_userns": "1"},
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({}, "in a container allow namespaces"),
    ],
)
def test_a_refusal_names_its_cause(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str) -> None:
    monkeypatch.setattr(probe, "_setting", lambda name: settings.get(name, ""))
    assert message in probe.refusal("a user namespace: Operation not permitted")


def test_without_a_table_of_system_calls_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with Sandbox() as sandbox, pytest.raises(UserError, match="no table for riscv64"):
        sandbox.run(Program("print(1)"))
