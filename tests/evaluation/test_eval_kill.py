"""`vlm-rl eval` killed in the middle: the same command continues it, and the result is that of one never killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.toy_runs import Runner
from vlm_rl.data_prep.counting_squares import SQUARES
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.run.directory import RunDirectory

NUM_KNOWN = 3  # problems that are answered before the kill


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(runner: Runner, tmp_path: Path, tiny_model: Path) -> None:
    raw = SQUARES.write(tmp_path / "raw", seed=0, train=1, heldout=8, warm=1, mixture=1)
    data = tmp_path / "heldout"
    prepare("virl39k", raw / "heldout", data)
    out, journal = tmp_path / "out", tmp_path / "out" / "eval" / f".{data.name}-000000-0.jsonl"
    command = ["eval", "--model", tiny_model, "--data", data, "--sampler", "transformers", "--temperature", "1.0"]
    command += ["--samples", "2", "--max-tokens", "6", "--batch-size", "1", "--out"]
    killed = runner(*command, out, faults={"kill_after_answers": {"number": NUM_KNOWN}})
    assert killed.code == -signal.SIGKILL, killed.output[-3000:]
    known = journal.read_bytes().splitlines()
    assert len(known) == 1 + NUM_KNOWN
    assert RunDirectory(out).evals() == []

    # What is known must be taken from the journal: a mark in it would vanish if the problem were graded again.
    marked = known[1].replace(b'"reason": "', b'"reason": "MARK ', 1)
    journal.write_bytes(b"\n".join([known[0], marked, *known[2:]]) + b"\n" + b'[{"cut')
    for folder in (out, tmp_path / "whole"):
        result = runner(*command, folder)
        assert result.code == 0, result.output[-3000:]
    (again,), (whole,) = RunDirectory(out).evals(), RunDirectory(tmp_path / "whole").evals()
    rows = again.rows().to_pylist()
    assert sum(row["reason"].startswith("MARK ") for row in rows) == 1
    for row in rows:
        row["reason"] = row["reason"].removeprefix("MARK ")
    assert rows == whole.rows().to_pylist() and again.summary == whole.summary
    assert not journal.exists()
