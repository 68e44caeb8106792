"""Runs whose checkpoints are written while they train on: the same promise as for those that wait."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.crash_walk import Walk
from tests.helpers import crash_points
from tests.helpers.toy_runs import ExitResult, Toys, assert_equal_runs, assert_sound
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.run.directory import RunDirectory

SETTINGS = {"train": {"steps": 3}, "checkpoint": {"every": 1, "keep_last": 1}}
ASYNC = {**SETTINGS, "checkpoint": {"every": 1, "keep_last": 1, "async_save": True}}


@pytest.fixture(scope="module")
def whole(toys: Toys) -> RunDirectory:
    """Return a run that waits for its saves."""
    return toys.train_run("waits", **SETTINGS)


def start(toys: Toys, name: str, then: str = "", ranks: int = 1, **faults: Any) -> ExitResult:
    """Train; the second save is written from the moment on when the third step's responses wait for their grades."""
    held = {"number": 2, "phase": "reward", "step": 3, "then": then}
    config = toys.config(name, **ASYNC)
    return toys.runner("train", str(config), ranks=ranks, faults={**faults, "hold_save": held})


def resume_and_compare(toys: Toys, name: str, step: int, expected: RunDirectory) -> None:
    """Resume the run, which must begin behind this step and end like the expected one."""
    result = toys.runner("train", str(toys.config(name, **ASYNC)), "--resume")
    assert result.code == 0, result.output[-3000:]
    assert f"step-{step:06d} (step {step + 1} of 3 is next)" in result.output
    assert_equal_runs(toys.run(name), expected)
    assert_sound(toys.run(name))


def saved(run: RunDirectory) -> tuple[list[int], int]:
    """Return the steps of the checkpoints that are there, and how many are unfinished."""
    return [step for step, _ in run.checkpoints()], len(list((run.path / "checkpoints").glob(".tmp-*")))


@pytest.mark.turn(1, days=2)
def test_it_equals_the_run_that_waits(toys: Toys, whole: RunDirectory) -> None:
    result = start(toys, "async")
    assert result.code == 0, result.output[-3000:]
    assert saved(toys.run("async")) == ([3], 0)
    log = (toys.run("async").path / "log.txt").read_text()
    for step in (1, 2, 3):
        _, _, after = log.partition(f"step {step}: saving ")
        assert " while the training continues" in after.splitlines()[0] and f"step {step}: saved " in after
    assert_equal_runs(toys.run("async"), whole)
    assert_sound(toys.run("async"))


@pytest.mark.slow
def test_killed_while_the_thread_writes_the_one_before_is_resumed(toys: Toys, whole: RunDirectory) -> None:
    assert start(toys, "killed", "SIGKILL").code == -signal.SIGKILL
    assert saved(toys.run("killed")) == ([1], 1)
    resume_and_compare(toys, "killed", 1, whole)


@pytest.mark.slow
def test_sigterm_waits_for_what_is_being_written(toys: Toys, whole: RunDirectory) -> None:
    """The notice comes in the step after the save, whose beginning is the state that is being written."""
    result = start(toys, "stopped", terminate_in={"phase": "reward", "step": 3})
    assert result.code == EXIT_STOPPED, result.output[-3000:]
    assert saved(toys.run("stopped")) == ([2], 0)
    resume_and_compare(toys, "stopped", 2, whole)


@pytest.mark.slow
def test_a_folder_that_vanishes_ends_the_run_with_a_message(toys: Toys, whole: RunDirectory) -> None:
    result = start(toys, "vanished", "vanish")
    assert result.code == 2, result.output[-3000:]
    folder = toys.run("vanished").path / "checkpoints"
    last = [line for line in result.output.splitlines() if line.startswith("vlm-rl: ")]
    assert last[0].startswith(f"vlm-rl: {folder}: the checkpoint of step 2 could not be written: ")
    assert last[0].endswith("then resume; step-000001 is untouched") and "Traceback" not in result.output
    assert saved(toys.run("vanished")) == ([1], 0)
    resume_and_compare(toys, "vanished", 1, whole)


@pytest.mark.slow
def test_another_error_of_a_single_rank_waits_for_it_too(toys: Toys, whole: RunDirectory) -> None:
    result = start(toys, "failed", raise_in={"phase": "reward", "step": 3, "rank": 0})
    assert result.code == 1 and "injected fault" in result.output, result.output[-3000:]
    assert saved(toys.run("failed")) == ([2], 0)
    resume_and_compare(toys, "failed", 2, whole)


@pytest.mark.slow
def test_an_error_on_one_of_two_ranks_leaves_the_one_before(toys: Toys) -> None:
    """The ranks cannot meet any more to commit what both may have written."""
    failing = {"raise_in": {"phase": "reward", "step": 3, "rank": 1}}
    assert start(toys, "one-of-two", ranks=2, **failing).code == 1
    assert saved(toys.run("one-of-two")) == ([1], 1)
    result = toys.runner("train", str(toys.config("one-of-two", **ASYNC)), "--resume", ranks=2)
    assert result.code == 0, result.output[-3000:]
    assert "step-000001 (step 2 of 3 is next)" in result.output
    assert_sound(toys.run("one-of-two"))


@pytest.mark.slow
def test_ctrl_c_twice_on_one_of_two_ranks_names_the_one_before(toys: Toys) -> None:
    """A rank alone commits nothing, so the save that is being written is lost."""
    held = {"hold_save": {"number": 2, "phase": "reward", "step": 3}}
    pressed = {"press_ctrl_c_in": {"phase": "reward", "step": 3, "presses": 2}}
    config = toys.config("pressed", **ASYNC)
    result = toys.runner("train", str(config), ranks=2, faults_of_ranks=[pressed | held, held])
    assert saved(toys.run("pressed")) == ([1], 1)
    assert "Ctrl-C again stops at once and loses 1 step.\n" in result.output, result.output[-3000:]
    assert "\nstopped at once: 1 step lost; to resume from step 1: torchrun" in result.output


@pytest.mark.slow
@pytest.mark.skipif(crash_points.library() is None, reason="needs a C compiler (cc)")
def test_killed_in_the_thread_s_own_writes_and_resumed(toys: Toys) -> None:
    """Points of crash_walk inside the folder of an unfinished checkpoint."""
    walk = Walk(toys, "transformers", 1, async_save=True)
    unfinished = [point for point in walk.points if "/.tmp-step-000002" in point[2]]
    for share in (0.3, 0.99):
        walk.crash(*unfinished[int(share * len(unfinished))])
