"""A finished run whose last step a resume makes again."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.helpers.toy_runs import Toys, assert_equal_runs
from vlm_rl.run.directory import RunDirectory


def assert_last_step_is_made_again(toys: Toys, run: RunDirectory, *changes: str) -> None:
    """Take the last checkpoint away and resume, with other values of keys: the run is as it was, bit for bit.

    It must have a checkpoint of the step before.
    """
    before = RunDirectory(Path(shutil.copytree(run.path, run.path.with_name(f"{run.path.name}-before"))))
    last, checkpoint = run.checkpoints()[-1]
    shutil.rmtree(checkpoint)
    result = toys.runner("train", run.path, "--resume", *changes)
    assert result.code == 0, result.output[-3000:]
    assert [record["attempt"] for record in run.metrics()] == [1] * (last - 1) + [2]
    assert_equal_runs(run, before)
