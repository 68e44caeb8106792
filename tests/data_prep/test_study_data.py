"""Make the data of the studies at a small size: sets and starts are made once and kept."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

import vlm_rl.data_prep.study_data as study
from vlm_rl.data.sets import load_set


def small(lesson: study.Lesson) -> study.Lesson:
    passes, sprinkled = min(lesson.passes, 1), min(lesson.sprinkled, 1)
    return replace(lesson, problems=4, passes=passes, sprinkled=sprinkled, mixture=4)


SMALL = {name: replace(task, lessons=[*map(small, task.lessons)]) for name, task in study.STUDY_TASKS.items()}


@pytest.fixture(params=SMALL)
def task(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(study, "STUDY_TASKS", SMALL)
    monkeypatch.setattr(study, "NUM_TRAIN", 6)
    monkeypatch.setattr(study, "NUM_HELDOUT", 4)
    return request.param


def test_sets_are_made_once_and_hold_no_problem_in_common(tmp_path: Path, task) -> None:
    study.prepare_sets(tmp_path, SMALL[task].task)
    sets = {name: load_set(tmp_path / name) for name in ("train", "heldout")}
    assert [len(problems) for problems in sets.values()] == [6, 4]
    shown = {name: {(p.question, tuple(p.images)) for p in problems} for name, problems in sets.items()}
    assert not shown["train"] & shown["heldout"]
    before = (tmp_path / "train" / "data.parquet").stat().st_mtime_ns
    study.prepare_sets(tmp_path, SMALL[task].task)
    assert (tmp_path / "train" / "data.parquet").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heldout", "train"]
    data = (tmp_path / "heldout" / "data.parquet").read_bytes()
    shutil.rmtree(tmp_path / "heldout")  # as a command that was stopped between the two leaves it
    study.prepare_sets(tmp_path, SMALL[task].task)
    assert (tmp_path / "heldout" / "data.parquet").read_bytes() == data


@pytest.mark.parametrize("task", ["shades"], indirect=True)
def test_each_start_opens_as_a_different_model(tmp_path: Path, task) -> None:
    models = {}
    for name in study.STARTS:
        study.make_start(tmp_path, SMALL[task], name)
        models[name] = AutoModelForImageTextToText.from_pretrained(tmp_path / f"start-{name}").state_dict()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start-a", "start-b"]
    embedding = next(key for key in models["a"] if "embed_tokens" in key)
    assert not models["a"][embedding].equal(models["b"][embedding])


@pytest.mark.turn(0, days=2)
@pytest.mark.parametrize("task", ["votes"], indirect=True)
def test_a_stopped_warm_start_goes_on_after_its_last_whole_lesson(tmp_path: Path, task, monkeypatch) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    study.make_start(whole, SMALL[task], "a")
    lessons = []

    def stop_in_the_second(*args: Any, **settings: Any) -> None:
        lessons.append(args)
        if len(lessons) == 2:
            raise KeyboardInterrupt
        study_warm_start(*args, **settings)

    study_warm_start = study.warm_start
    monkeypatch.setattr(study, "warm_start", stop_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        study.make_start(stopped, SMALL[task], "a")
    study.make_start(stopped, SMALL[task], "a")
    assert len(lessons) == 3  # the second again, and not the first
    weights = [AutoModelForImageTextToText.from_pretrained(out / "start-a").state_dict() for out in (whole, stopped)]
    assert all(value.equal(weights[1][key]) for key, value in weights[0].items())


def test_failed_starts_are_named(tmp_path: Path, task, monkeypatch) -> None:
    study.prepare_sets(tmp_path, SMALL[task].task)
    (tmp_path / "start-a").mkdir()  # there already: kept
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(SystemExit, match="failed: b;"):
        study.make_study_data(tmp_path, task)
