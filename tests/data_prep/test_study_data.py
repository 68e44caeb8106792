"""Make the data of the study at a small size: sets and starts are made once and kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

import vlm_rl.data_prep.study_data as study
from vlm_rl.data.sets import load_set


@pytest.fixture
def small(monkeypatch) -> None:
    sizes = {"NUM_TRAIN": 6, "NUM_HELDOUT": 4, "SCAN_PROBLEMS": 8, "SCAN_PASSES": 1, "SCAN_SPRINKLED": 2}
    for name, size in {**sizes, "SCAN_MIXTURE": 6, "SHOWN_PROBLEMS": 4, "SHOWN_MIXTURE": 8}.items():
        monkeypatch.setattr(study, name, size)


def test_sets_are_made_once_and_hold_no_problem_in_common(tmp_path: Path, small) -> None:
    study.prepare_sets(tmp_path)
    sets = {name: load_set(tmp_path / name) for name in ("train", "heldout")}
    assert [len(problems) for problems in sets.values()] == [6, 4]
    pictures = {name: {problem.images for problem in problems} for name, problems in sets.items()}
    assert not pictures["train"] & pictures["heldout"]
    before = (tmp_path / "train" / "data.parquet").stat().st_mtime_ns
    study.prepare_sets(tmp_path)
    assert (tmp_path / "train" / "data.parquet").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heldout", "train"]


def test_each_start_opens_as_a_different_model(tmp_path: Path, small) -> None:
    models = {}
    for name in study.STARTS:
        study.make_start(tmp_path, name)
        models[name] = AutoModelForImageTextToText.from_pretrained(tmp_path / f"start-{name}").state_dict()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start-a", "start-b"]
    embedding = next(key for key in models["a"] if "embed_tokens" in key)
    assert not models["a"][embedding].equal(models["b"][embedding])


def test_failed_starts_are_named(tmp_path: Path, small, monkeypatch) -> None:
    study.prepare_sets(tmp_path)
    (tmp_path / "start-a").mkdir()  # there already: kept
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(SystemExit, match="failed: b;"):
        study.make_study_data(tmp_path)
