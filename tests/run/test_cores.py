"""Threads follow the cores that are there and free."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vlm_rl.run.cores import allowed_cores, set_threads


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, len(os.sched_getaffinity(0))),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, len(os.sched_getaffinity(0))),
        ({}, len(os.sched_getaffinity(0))),
    ],
)
def test_a_quota_of_the_container_counts(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert allowed_cores(tmp_path) == cores


def test_cores_that_others_use_are_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, cores = psutil.cpu_percent, len(os.sched_getaffinity(0))
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: measure(interval / 4, percpu))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    spinning = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(cores)]
    try:
        assert all(process.stdout and process.stdout.readline() for process in spinning)  # once they spin
        said = set_threads()
        assert f"1 of {cores} cores are free: taking 1 thread " in said if cores > 1 else said == ""
        assert os.environ.get("OMP_NUM_THREADS", "1") == "1"
    finally:
        for process in spinning:
            process.kill()
            process.communicate()


def test_threads_that_the_user_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(psutil, "cpu_percent", None)  # nobody looks
    assert set_threads() == "" and os.environ["OMP_NUM_THREADS"] == "7"
