"""A function of ours in a process with limits: what it costs where its input is hostile."""

from __future__ import annotations

import pytest

from vlm_rl.sandbox.limited import FaultError, LimitedWorker, LimitError

# Functions of the standard library stand for ours: module.name of what takes and gives plain JSON.
MEMORY = 64 << 20


def test_a_value_comes_back_and_the_process_stays() -> None:
    worker = LimitedWorker("os.getpid", cpu_seconds=5, memory=MEMORY)
    assert worker.call() == worker.call()
    worker.close()


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("builtins.eval", ["[0] * 10**9"], "needed more memory than it may take"),
        ("builtins.eval", ["sum(iter(int, 1))"], r"took more than 0\.5 s of CPU time"),
        ("builtins.eval", ["'x' * 5000"], "returned more than 0 MiB"),
        ("builtins.eval", ["__import__('os').abort()"], r"SIGABRT"),
        ("builtins.eval", ["__import__('os')._exit(3)"], r"ended its process \(exit code 3\)"),
        ("builtins.eval", ["__import__('ctypes').string_at(0)"], r"ended its process \(SIGSEGV\)"),
    ],
)
def test_what_is_too_much_costs_one_call(function: str, arguments: list[str], message: str) -> None:
    worker = LimitedWorker(function, cpu_seconds=0.5, memory=MEMORY, output=1000)
    for _ in range(2):
        with pytest.raises(LimitError, match=message):
            worker.call(*arguments)
    assert worker.call("1 + 1") == 2
    worker.close()


def test_an_exception_of_any_kind_is_a_fault() -> None:
    worker = LimitedWorker("builtins.exec", cpu_seconds=5, memory=MEMORY)
    with pytest.raises(FaultError, match="ValueError: odd"):
        worker.call("raise ValueError('odd')")
    with pytest.raises(FaultError, match="BaseException: a panic"):
        worker.call("raise BaseException('a panic')")
    worker.close()
