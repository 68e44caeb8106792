"""`vlm-rl eval` killed in the middle: the same command continues it, and the result is that of one never killed.

Ranks that are asked for different things are refused.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.toy_runs import Runner, clean_environment
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.run.directory import RunDirectory
from vlm_rl.toy.counting_squares import SQUARES

NUM_KNOWN = 3  # problems that are answered before the kill


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_ranks_that_are_asked_for_different_things_do_not_start(tmp_path: Path, tiny_model: Path) -> None:
    """As two nodes whose commands differ: half of the responses would be longer than the others may be."""
    raw = SQUARES.write(tmp_path / "raw", seed=0, train=1, heldout=2, warm=1, mixture=1)
    prepare("virl39k", raw / "heldout", tmp_path / "heldout")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    command = f"eval --model {tiny_model} --data {tmp_path / 'heldout'} --out {tmp_path / 'out'}"
    of_rank = f"exec {sys.executable} -m vlm_rl {command} --sampler transformers --max-tokens $((RANK + 5))"
    done = subprocess.run(
        [*torchrun, "bash", "-c", of_rank], env=clean_environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    assert "vlm-rl: --max-tokens is '6' on rank 1 and '5' on rank 0: start every node with the same" in done.stderr
    assert done.stderr.count("Traceback") == 1, "torchrun's own"
    assert not (tmp_path / "out").exists()


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
