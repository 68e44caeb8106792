"""What is said of a save: a line when it begins, the bytes on the disk meanwhile, and how fast it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vlm_rl.learner import save_progress
from vlm_rl.learner.save_progress import SaveLines, SaveProgress


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_terminal_sees_the_bytes_that_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of files below the folder too, but none of a file that has its length before its content."""
    monkeypatch.setattr(save_progress, "_SECONDS_BETWEEN_LOOKS", 0.005)
    lines: list[str] = []
    shown: list[str] = []
    progress = SaveProgress(10_000_000, SaveLines(lines.append, lines.append, shown.append))
    progress.begin(20, beside=False)
    progress.watch(tmp_path)
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner" / "shard").write_bytes(os.urandom(1_500_000))
    (tmp_path / "model").write_bytes(os.urandom(1_500_000))
    with (tmp_path / "later").open("wb") as file:
        file.truncate(7_000_000)
        until(lambda: any(text.startswith("saving 3.0 MB of 10.0 MB, ") for text in shown))
        assert not any(text.startswith("saving 10.0 MB") for text in shown)
    progress.written()
    until(lambda: shown[-1] == "")
    progress.commits()
    progress.end(10_000_000)
    assert [line.partition(" in ")[0] for line in lines] == ["step 20: saving 10.0 MB", "step 20: saved 10.0 MB"]


def test_the_wait_for_the_end_of_a_step_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 s until the thread has written, 90 s until the step ends, 2 s until it is committed: 10 s for 5 GB."""
    now = 0.0
    monkeypatch.setattr(save_progress.time, "monotonic", lambda: now)
    lines: list[str] = []
    progress = SaveProgress(5_000_000_000, SaveLines(lines.append, lines.append))
    progress.begin(20, beside=True)
    for passed, call in ((8, progress.written), (30, progress.commits), (60, progress.commits)):  # twice: not yet
        now += passed
        call()
    now += 2
    progress.end(5_000_000_000)
    assert lines == [
        "step 20: saving 5.0 GB while the training continues",
        "step 20: saved 5.0 GB in 10.0 s, 500 MB/s with checks and hashes",
    ]


def test_a_save_that_fails_shows_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a folder that vanishes."""
    monkeypatch.setattr(save_progress, "_SECONDS_BETWEEN_LOOKS", 0.005)
    lines: list[str] = []
    shown: list[str] = []
    progress = SaveProgress(10, SaveLines(lines.append, lines.append, shown.append))
    progress.begin(20, beside=False)
    progress.watch(tmp_path / "gone")
    time.sleep(0.05)
    progress.stop()
    assert shown == [""] and lines == ["step 20: saving 0.0 kB"]
    progress.stop()
