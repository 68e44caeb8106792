"""A run that was killed or stopped and then resumed equals the one that was not, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.crash_walk import RANKS, SAMPLERS, Walk
from tests.helpers import crash_points
from tests.helpers.rotation import the_day, todays
from tests.helpers.toy_runs import ExitResult, Toys, assert_equal_runs, assert_sound, rollouts_of
from vlm_rl.config import load_config
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.run.checkpoint import newest_verified
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.lock import RunLock

KEPT = {"checkpoint": {"every": 2, "keep_last": 1}}  # a save of step 4 may delete that of step 2


@pytest.fixture(scope="module")
def changes(toys: Toys) -> dict:
    return {**KEPT, "data": {"eval": [str(toys.heldout)]}, "eval": {"every": 2}}


@pytest.fixture(scope="module")
def whole(toys: Toys, changes: dict) -> tuple[RunDirectory, int]:
    """Return the uninterrupted run, and the number of points at which it touches the disk or forks."""
    points = toys.folder / "points.txt"
    config = toys.config("whole", **changes)
    fault = {"list_points": {"folder": str(toys.run("whole").path), "log": str(points)}}
    result = toys.runner("train", str(config), faults=fault if crash_points.library() else {})
    assert result.code == 0, result.output[-3000:]
    return toys.run("whole"), len(points.read_text().splitlines()) if points.exists() else 0


def finish(toys: Toys, name: str, config: Path) -> None:
    """Train to the end, resuming where a run is there, as a user would."""
    is_there = (toys.run(name).path / "config.yaml").exists()
    result = toys.runner("train", str(config), *(["--resume"] if is_there else []))
    assert result.code == 0, result.output[-3000:]


def at_point(toys: Toys, name: str, number: int) -> dict:
    return {"die_at_point": {"folder": str(toys.run(name).path), "number": number}}


needs_a_compiler = pytest.mark.skipif(crash_points.library() is None, reason="needs a C compiler (cc)")


def test_the_reference_run_learns_and_saves(whole: tuple[RunDirectory, int]) -> None:
    """Equality says nothing about a run in which nothing happens."""
    run, _ = whole
    assert any(record["grad_norm"] > 0 for record in run.metrics())
    assert run.checkpoints()[-1][0] == 4
    assert [(e.benchmark, e.step) for e in run.evals()] == [("heldout", step) for step in (0, 2, 4)]
    assert {row["policy_version"] for row in rollouts_of(run)[2]} == {4}  # two mini-batches a step


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "ranks"), todays(product(SAMPLERS, RANKS), days=4))
def test_killed_at_a_rotating_sample_of_all_points_and_resumed(toys: Toys, sampler: str, ranks: int) -> None:
    """One of the points that `make crash` walks, of another kind of run each day; a failure names its point."""
    if sampler == "vllm":
        pytest.importorskip("vllm")
    walk = Walk(toys, sampler, ranks)
    assert {what.split()[0] for _, _, what in walk.points} >= {"open", "write", "fsync", "rename", "mkdir", "fork"}
    assert {rank for rank, _, _ in walk.points} == set(range(ranks))
    for point in walk.sample(1, seed=the_day()):
        walk.crash(*point)


@needs_a_compiler
@pytest.mark.slow
def test_killed_again_and_again(toys: Toys, changes: dict, whole: tuple[RunDirectory, int]) -> None:
    """A resume may be killed too."""
    config = toys.config("often", **changes)
    out, rng = toys.run("often"), random.Random(7)
    for _ in range(2):
        is_there = (out.path / "config.yaml").exists()
        point = at_point(toys, "often", rng.randint(5, whole[1] // 2))
        toys.runner("train", str(config), *(["--resume"] if is_there else []), faults=point)
    finish(toys, "often", config)
    assert_equal_runs(out, whole[0])
    assert_sound(out)


@pytest.mark.slow
def test_killed_in_an_evaluation_it_answers_nothing_twice(toys: Toys, changes: dict, whole) -> None:
    """SIGKILL after two of the four problems of step 2; then the whole is what it would have been."""
    name, (expected, _) = "in-evaluation", whole
    config, run = toys.config(name, **changes), toys.run(name)
    assert toys.runner("train", str(config), faults={"kill_after_answers": {"number": 4 + 2}}).code == -signal.SIGKILL
    (journal,) = (run.path / "eval").glob(".*")
    head, first, second = journal.read_bytes().splitlines()
    assert journal.name == ".heldout-000002-0.jsonl"
    finished = {path: path.stat().st_mtime_ns for path in (run.path / "eval" / "heldout").iterdir()}
    marked = first.replace(b'"reason": "', b'"reason": "MARK ', 1)  # would be gone if it were graded again
    journal.write_bytes(b"\n".join([head, marked, second, b'[{"cut']))
    finish(toys, name, config)
    rows = {e.step: e.rows().to_pylist() for e in run.evals()}
    assert [row["reason"].startswith("MARK ") for row in rows[2]].count(True) == 1
    rows[2] = [row | {"reason": row["reason"].removeprefix("MARK ")} for row in rows[2]]
    assert rows == {e.step: e.rows().to_pylist() for e in expected.evals()}
    assert [e.summary for e in run.evals()] == [e.summary for e in expected.evals()]
    assert not list((run.path / "eval").glob(".*"))
    assert len(finished) == 2 and all(path.stat().st_mtime_ns == at for path, at in finished.items())


def test_eval_gives_the_numbers_of_the_training(toys: Toys, whole: tuple[RunDirectory, int]) -> None:
    """On the kept checkpoint, with the run's own longest response: the same responses, verdicts and scores."""
    run, out = whole[0], toys.folder / "again"
    step, checkpoint = run.checkpoints()[-1]
    words = ["--model", checkpoint, "--data", toys.heldout, "--out", out, "--seed", 3]
    result = toys.runner("eval", *map(str, words), "--sampler", "transformers", "--max-prompt-tokens", "160")
    assert result.code == 0, result.output[-3000:]
    (again,) = RunDirectory(out).evals()
    during = next(e for e in run.evals() if e.step == step)
    assert again.rows().to_pylist() == during.rows().to_pylist()
    shared = during.summary.keys() & again.summary.keys() - {
        "policy_version"
    }  # updates of a run, which eval has none
    assert {"accuracy", "interval", "data_sha256", "sampling", "template_system"} <= shared
    assert {key: during.summary[key] for key in shared} == {key: again.summary[key] for key in shared}


@pytest.mark.slow
def test_the_best_of_the_saved_steps_is_kept(toys: Toys) -> None:
    """Evaluated after every step and saved after every second: a better step without a checkpoint is not a reason
    to let the best of those go that have one."""
    changes = {"data": {"eval": [str(toys.heldout)]}, "eval": {"every": 1}, "train": {"steps": 6}}
    run = toys.train_run("best", **changes, checkpoint={"every": 2, "keep_last": 1, "keep_best": False})
    accuracy = {e.step: e.summary["accuracy"] for e in run.evals()}
    assert list(accuracy) == list(range(7))
    best = 4 if accuracy[4] > accuracy[2] else 2  # as known when step 6 is saved
    assert [step for step, _ in run.checkpoints()] == [best, 6]


@pytest.mark.turn(0, days=2)
def test_the_step_of_the_best_evaluation_so_far_is_saved(toys: Toys, changes: dict) -> None:
    """No checkpoint is due. The policy hardly moves, and the evaluations before a resume are told to be worse: the
    first one after it is the best so far."""
    more = {"checkpoint": {"every": 50, "keep_last": 9}, "eval": {"every": 1}}
    run = toys.train_run("best-is-saved", **changes | more, train={"steps": 1, "lr": 1e-9})
    saved = {1}
    for last, keep_best in ((3, True), (5, False)):
        for result in run.evals():
            result.path.with_suffix(".json").write_text(json.dumps({**result.summary, "accuracy": 0.0}))
        keys = f"train.steps={last}", f"checkpoint.keep_best={keep_best}"
        assert toys.runner("train", run.path, *keys, "--resume").code == 0
        saved |= {last - 1, last} if keep_best else {last}
        assert {step for step, _ in run.checkpoints()} == saved


@pytest.mark.turn(1, days=2)
def test_a_damaged_later_step_is_not_the_best(toys: Toys) -> None:
    """Steps 2 and 4 are saved and were right throughout, and 4 is damaged: 2 is the best once 3 is saved."""
    changes = {"data": {"eval": [str(toys.heldout)]}, "eval": {"every": 1}, "checkpoint": {"every": 2}}
    run = toys.train_run("best-damaged", **changes, train={"steps": 4})
    for result in run.evals():
        summary = {**result.summary, "accuracy": float(result.step in (2, 4))}
        result.path.with_suffix(".json").write_text(json.dumps(summary))
    (run.path / "checkpoints" / "step-000004" / "model.safetensors").write_bytes(b"cut")
    overrides = ["checkpoint.every=1", "checkpoint.keep_last=1", "train.steps=3"]
    assert toys.runner("train", str(run.path), *overrides, "--resume").code == 0
    assert [step for step, _ in run.checkpoints()] == [2, 3, 4]
    assert run.config().checkpoint.every == 1 and run.config().train.steps == 3


@pytest.mark.slow
def test_resumed_twice_in_an_epoch_and_at_its_end(toys: Toys) -> None:
    """12 problems, 4 a step: steps 1 to 3 are the first epoch, 4 to 6 the second."""
    expected = toys.train_run("six-steps", train={"steps": 6}, checkpoint={"every": 6})
    run = toys.run("in-parts")
    run.create(load_config(toys.config("in-parts", train={"steps": 1}, checkpoint={"every": 6})))
    lines = {1: "starting again at step 1 of 1", 2: "step-000001 (step 2 of 2 is next)"}
    lines |= {3: "step-000002 (step 3 of 3 is next)", 6: "step-000003 (step 4 of 6 is next)"}
    for last, line in lines.items():
        config = toys.config("in-parts", train={"steps": last}, checkpoint={"every": 6})
        result = toys.runner("train", str(config), "--resume")
        assert result.code == 0, result.output[-3000:]
        assert result.output.count(line) == 1, result.output[-3000:]
    assert_equal_runs(run, expected)
    assert run.config().train.steps == 6
    drawn = [{row["prompt_id"] for row in rows} for rows in rollouts_of(run)]
    for epoch in (drawn[:3], drawn[3:]):
        assert Counter(name for names in epoch for name in names) == {f"Toy-train-{i}": 1 for i in range(12)}
    assert [record["attempt"] for record in run.metrics()] == [1, 2, 3, 4, 4, 4]


def test_a_finished_run_resumes_to_nothing(toys: Toys, whole: tuple[RunDirectory, int]) -> None:
    before = (whole[0].path / "metrics.jsonl").read_bytes()
    evaluated = whole[0].evals()[-1].path.stat().st_mtime_ns
    result = toys.runner("train", str(whole[0].path), "--resume")
    assert result.code == 0, result.output[-3000:]
    assert f"{whole[0].path} is finished at step-000004" in result.output
    assert (whole[0].path / "metrics.jsonl").read_bytes() == before
    assert whole[0].evals()[-1].path.stat().st_mtime_ns == evaluated


def test_a_run_that_was_copied_or_moved_is_resumed_where_it_is(toys: Toys, whole: tuple[RunDirectory, int]) -> None:
    """Whatever folder its configuration names; the run that it is a copy of stays as it is."""
    here, before = whole[0].path, (whole[0].path / "config.yaml").read_bytes()
    for number, place in enumerate(("copied", "moved"), start=1):
        there = toys.run(place)
        shutil.copytree(here, there.path) if place == "copied" else here.rename(there.path)
        result = toys.runner("train", there.path, "--resume", f"checkpoint.keep_last={1 + number}")
        assert result.code == 0, result.output[-3000:]
        assert f"out is '{there.path}' from now on, and was '{here}'" in result.output
        assert f"{there.path} is finished at step-000004" in result.output
        assert there.config().out == str(there.path) and there.config().checkpoint.keep_last == 1 + number
        here = there.path
    assert (whole[0].path / "config.yaml").read_bytes() == before


def test_a_run_that_another_process_writes_is_refused_by_name(toys: Toys, whole: tuple[RunDirectory, int]) -> None:
    run = whole[0]
    with RunLock(run.path) as lock:
        lock.acquire()
        result = toys.runner("train", str(run.path), "--resume")
    assert result.code == 2, result.output[-3000:]
    assert f"vlm-rl: {run.path}: another process (host " in result.output
    assert f"pid {os.getpid()}, since " in result.output
    assert not (run.path / ".lock").exists()  # a finished run has no such file


@pytest.fixture(scope="module")
def pressed(toys: Toys) -> tuple[Path, Path, ExitResult]:
    """Return a configuration, its set, and how the run ended in whose second step of three Ctrl-C was pressed."""
    data = Path(shutil.copytree(toys.train, toys.folder / "copy-of-train"))
    changes = {"data": {"train": [str(data)]}, "checkpoint": {"every": 50}, "train": {"steps": 3}}
    config = toys.config("ctrl-c", **changes)
    fault = {"press_ctrl_c_in": {"phase": "update", "step": 2}}
    return config, data, toys.runner("train", str(config), faults=fault)


def test_ctrl_c_keeps_the_step_in_progress_where_no_checkpoint_is_due(
    toys: Toys, pressed: tuple[Path, Path, ExitResult]
) -> None:
    *_, result = pressed
    assert result.code == EXIT_STOPPED, result.output[-3000:]
    assert "Ctrl-C: waiting for what is in progress (" in result.output
    assert "Ctrl-C again stops at once and loses 1 step." in result.output
    run = toys.run("ctrl-c")
    assert f"stopped by Ctrl-C after step 2; resume with: vlm-rl train {run.path} --resume\n" in result.output
    assert [step for step, _ in run.checkpoints()] == [2]


@pytest.mark.parametrize("phase", ["evaluation", "save"])
def test_ctrl_c_says_that_it_waits_for_what_is_between_steps(toys: Toys, phase: str) -> None:
    changes: dict[str, Any] = {
        "data": {"eval": [str(toys.heldout)]},
        "eval": {"every": 1},
        "checkpoint": {"every": 1},
    }
    fault = {"press_ctrl_c_in": {"phase": phase, "step": 1}}
    result = toys.runner("train", toys.config(f"waits-for-{phase}", **changes), faults=fault)
    assert result.code == EXIT_STOPPED, result.output[-3000:]
    assert f"Ctrl-C: waiting for what is in progress ({phase});" in result.output


def test_a_set_that_was_prepared_again_stops_a_resume(toys: Toys, pressed: tuple[Path, Path, ExitResult]) -> None:
    """Its order would be another one, so that problems would come twice or never."""
    config, data, _ = pressed
    manifest = json.loads((data / "manifest.json").read_text())
    (data / "manifest.json").write_text(json.dumps(manifest | {"sha256": {"data.parquet": "f" * 64}}))
    result = toys.runner("train", str(config), "--resume")
    assert result.code == 2 and f"{data} was prepared again since" in result.output, result.output[-3000:]
    (data / "manifest.json").write_text(json.dumps(manifest))
    finish(toys, "ctrl-c", config)


def test_ctrl_c_twice_says_what_is_lost_and_how_to_go_on(toys: Toys) -> None:
    """A destructor swallows what the second one raises, so that step 2 still ends."""
    config = toys.config("interrupted", checkpoint={"every": 50}, train={"steps": 3})
    fault = {"press_ctrl_c_in": {"phase": "update", "step": 2, "presses": 2}}
    result = toys.runner("train", str(config), faults=fault)
    assert result.code == 130, result.output[-3000:]
    again = f"vlm-rl train {toys.run('interrupted').path} --resume\n"
    assert f"stopped at once: 2 steps lost, since no checkpoint was written; to begin again at step 1: {again}" in (
        result.output
    )


def test_a_checkpoint_is_due_by_time_too(toys: Toys) -> None:
    """A millisecond: after each step."""
    config = toys.config("by-time", checkpoint={"every": 50, "minutes": 1e-5, "keep_last": 9}, train={"steps": 3})
    assert toys.runner("train", str(config)).code == 0
    assert [step for step, _ in toys.run("by-time").checkpoints()] == [1, 2, 3]


# (phase, how often it has begun; drawing and generating are a rollout each) -> the step whose end (or, before the
# update, beginning) is saved
PHASES = {("rollout", 5): 2, ("reward", 2): 1, ("evaluation", 2): 2, ("save", 1): 2}


@pytest.mark.turn(1, days=2)
def test_sigterm_saves_where_a_damaged_checkpoint_of_the_step_is(toys: Toys, changes: dict, whole) -> None:
    """Step 3 is saved and damaged; a resume begins with step 2, ends step 3 again, and is stopped there. The whole is
    what it would have been."""
    config = toys.config("term-damaged", **changes | {"checkpoint": {"every": 2, "keep_last": 2}})
    run = toys.run("term-damaged")
    for number, resume in ((3, []), (1, ["--resume"])):
        fault = {"terminate_in": {"phase": "update", "step": number}}
        result = toys.runner("train", str(config), *resume, faults=fault)
        assert result.code == EXIT_STOPPED and "after step 3" in result.output, result.output[-3000:]
        assert f"resume with: vlm-rl train {run.path} --resume\n" in result.output
        newest = newest_verified(run.path / "checkpoints")
        assert newest is not None and newest[1].step == 3
        assert_sound(run)
        if not resume:
            (newest[0] / "config.json").write_text("{}")
    finish(toys, "term-damaged", config)
    assert_equal_runs(run, whole[0])


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "number"), PHASES)
def test_sigterm_saves_and_resumes(toys, changes, whole, phase, number) -> None:
    name = f"term-{phase}"
    config = toys.config(name, **changes)
    fault = {"terminate_in": {"phase": phase, "step": number}}
    result = toys.runner("train", str(config), faults=fault)
    assert result.code == EXIT_STOPPED, result.output[-3000:]
    assert f"resume with: vlm-rl train {toys.run(name).path} --resume\n" in result.output
    newest = newest_verified(toys.run(name).path / "checkpoints")
    assert newest is not None
    assert newest[1].step == PHASES[phase, number]
    assert_sound(toys.run(name))
    finish(toys, name, config)
    assert_equal_runs(toys.run(name), whole[0])
