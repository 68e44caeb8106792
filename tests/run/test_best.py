"""The best checkpoint of a run: which one it is, what a user may call it, and how much lower the last one is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from vlm_rl.config import parse_config
from vlm_rl.errors import UserError
from vlm_rl.run.checkpoint_names import find_checkpoint, resolve_model
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.eval_record import EVAL_SCHEMA
from vlm_rl.run.terminal import next_commands
from vlm_rl.session.alarms import evaluation_fell

Marks = Sequence[int]  # 1 for each problem that is right


def make_run(folder: Path, evaluations: dict[int, Marks], saved: Sequence[int] = ()) -> RunDirectory:
    data = {"train": ["t"], "eval": ["data/held-out", "data/a"]}
    tree = {"out": str(folder), "model": {"path": "m"}, "data": data, "eval": {"every": 10}}
    run = RunDirectory(folder).create(parse_config(tree, where="test"))
    for step, marks in evaluations.items():
        nothing = dict.fromkeys(EVAL_SCHEMA.names)
        rows = [
            {**nothing, "problem_id": f"p{i}", "verdict": "correct" if mark else "wrong", "length": 7}
            for i, mark in enumerate(marks)
        ]
        run.write_eval("held-out", step, rows, {"accuracy": sum(marks) / len(marks)})
        run.write_eval("a", step, rows, {"accuracy": 1.0 - sum(marks) / len(marks)})
    for step in saved:
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "MANIFEST.json").write_text("{}")
    return run


HIGH, HALF, LOW = [1] * 40, [1] * 20 + [0] * 20, [1] * 4 + [0] * 36


def test_the_earliest_of_equals_is_the_best_and_the_last_is_compared_problem_by_problem(tmp_path: Path) -> None:
    best = make_run(tmp_path / "run", {0: LOW, 10: HIGH, 20: HIGH, 30: HALF}, saved=(10, 20, 30)).best()
    assert best is not None and best.last is not None
    assert (best.benchmark, best.step, best.saved_step, best.accuracy) == ("held-out", 10, 10, 1.0)
    assert (best.last.won, best.last.lost, best.last.difference) == (0, 20, -0.5)
    low, high = best.last.interval
    expected = f"[{-100 * high:.1f}, {-100 * low:.1f}] (0 won, 20 lost)"
    assert best.sentence() == (
        f"held-out: best 100.0% at step 10; the last, step 30, is 50.0 points lower {expected}"
    )


def test_a_better_step_that_was_not_saved_is_named_so(tmp_path: Path) -> None:
    best = make_run(tmp_path / "run", {0: LOW, 10: HIGH, 20: HALF}, saved=(20,)).best()
    assert best is not None and (best.step, best.saved_step) == (10, 20)
    assert best.sentence().endswith("step 10 was not saved, the best that was is step 20 (50.0%)")


def test_the_model_before_training_may_be_the_best(tmp_path: Path) -> None:
    best = make_run(tmp_path / "run", {0: HIGH, 10: LOW}, saved=(10,)).best()
    assert best is not None and best.sentence().endswith("step 0 is the model that the run began with")


def test_the_best_may_be_the_last(tmp_path: Path) -> None:
    best = make_run(tmp_path / "run", {0: LOW, 10: HALF}, saved=(10,)).best()
    assert best is not None and best.last is None
    assert best.sentence() == "held-out: best 50.0% at step 10, the last"


@pytest.mark.parametrize("name", ["run/best", "run/checkpoints/best"])
def test_a_run_names_its_best_saved_step(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "run", {0: LOW, 10: HIGH, 20: HALF, 30: LOW}, saved=(20, 30))
    folder = tmp_path / "run/checkpoints/step-000020"
    assert resolve_model(tmp_path / name) == find_checkpoint(tmp_path / name)[1] == folder


def test_without_an_evaluation_or_its_checkpoint_none_is_the_best(tmp_path: Path) -> None:
    assert make_run(tmp_path / "bare", {}, saved=(10,)).best() is None
    with pytest.raises(UserError, match="has no evaluation, so that none of its checkpoints is the best"):
        resolve_model(tmp_path / "bare/best")
    make_run(tmp_path / "unsaved", {10: HIGH}, saved=(20,))
    with pytest.raises(UserError, match="has no checkpoint of an evaluated step"):
        resolve_model(tmp_path / "unsaved/best")


def test_a_folder_of_that_name_is_a_model_like_any_other(tmp_path: Path) -> None:
    make_run(tmp_path / "run", {10: HIGH}, saved=(10,))
    (tmp_path / "run/best").mkdir()
    assert resolve_model(tmp_path / "run/best") == tmp_path / "run/best"


def test_the_farewell_evaluates_the_best(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {10: HIGH, 20: HALF}, saved=(10, 20))
    said = next_commands(run.path, ["data/held-out"], best=run.best())
    assert said.startswith("held-out: best 100.0% at step 10;")
    assert f"vlm-rl eval --model {run.path}/best --data data/held-out" in said


def test_the_farewell_of_a_run_that_gained_nothing_proposes_no_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {0: HIGH, 10: LOW, 20: HALF}, saved=(10, 20))
    said = next_commands(run.path, ["data/held-out"], best=run.best())
    assert "vlm-rl eval" not in said and f"vlm-rl report {run.path}" in said
    assert "no evaluated step is more accurate than the model that the run began with" in said.splitlines()[-1]


def test_an_evaluation_that_falls_beyond_its_interval_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {0: LOW, 10: HIGH, 20: HALF})
    line = evaluation_fell(run.evals("held-out"))
    assert line is not None and "is 50.0 points [" in line and "below that of step 10 (0 won, 20 lost)" in line


@pytest.mark.parametrize("last", [HIGH, [1] * 39 + [0]], ids=["equal", "one problem of forty"])
def test_one_that_may_be_equal_is_not(tmp_path: Path, last: Marks) -> None:
    assert evaluation_fell(make_run(tmp_path / "run", {0: LOW, 10: HIGH, 20: last}).evals("held-out")) is None
