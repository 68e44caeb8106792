"""`vlm-rl eval` killed in the middle: the same command goes on, and the result is that of one never killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlm_rl.data_prep.counting_squares import SQUARES
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.run.directory import RunDirectory

NUM_KNOWN = 3  # problems that are answered before the kill


def command(model: Path, data: Path, out: Path) -> list[str]:
    words = ["eval", "--model", model, "--data", data, "--out", out, "--sampler", "transformers"]
    words += ["--temperature", "1.0", "--samples", "2", "--max-tokens", "6", "--batch-size", "1"]
    return [sys.executable, "-m", "vlm_rl", *map(str, words)]


def start(words: list[str]) -> subprocess.Popen[bytes]:
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in ranks}
    return subprocess.Popen(words, env={**kept, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def lines(journal: Path) -> list[bytes]:
    return journal.read_bytes().split(b"\n")[:-1] if journal.is_file() else []


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    raw = SQUARES.write(tmp_path / "raw", seed=0, train=1, heldout=24, warm=1, mixture=1)
    data = tmp_path / "heldout"
    prepare("virl39k", raw / "heldout", data)
    out, journal = tmp_path / "out", tmp_path / "out" / "eval" / f".{data.name}-000000-0.jsonl"
    process = start(command(tiny_model, data, out))
    try:
        until = time.monotonic() + 240
        while len(lines(journal)) < 1 + NUM_KNOWN and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    known = lines(journal)
    assert process.returncode == -signal.SIGKILL and len(known) >= 1 + NUM_KNOWN
    assert RunDirectory(out).evals() == []

    # What is known must be taken from the journal: a mark in it would vanish if the problem were graded again.
    marked = known[1].replace(b'"reason": "', b'"reason": "MARK ', 1)
    journal.write_bytes(b"\n".join([known[0], marked, *known[2:]]) + b"\n" + b'[{"cut')
    assert start(command(tiny_model, data, out)).wait(timeout=240) == 0
    assert start(command(tiny_model, data, tmp_path / "whole")).wait(timeout=240) == 0
    (again,), (whole,) = RunDirectory(out).evals(), RunDirectory(tmp_path / "whole").evals()
    rows = again.rows().to_pylist()
    assert sum(row["reason"].startswith("MARK ") for row in rows) == 1
    for row in rows:
        row["reason"] = row["reason"].removeprefix("MARK ")
    assert rows == whole.rows().to_pylist() and again.summary == whole.summary
    assert not journal.exists()
