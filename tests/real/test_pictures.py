"""easy-VQA, published pictures with questions: prepared as users prepare a table, and trained on by the tiny VLM."""

from __future__ import annotations

import csv
import importlib
import shutil
from pathlib import Path

import pytest

from tests.helpers.toy_runs import Runner, metrics_of, rollouts_of
from vlm_rl.data.sets import load_set
from vlm_rl.run.directory import RunDirectory

NUM_ROWS = 40


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a table of easy-VQA's first training questions."""
    easy_vqa = importlib.import_module("easy_vqa")
    rows = list(zip(*easy_vqa.get_train_questions(), strict=True))[:NUM_ROWS]
    pictures = easy_vqa.get_train_image_paths()
    path = tmp_path_factory.mktemp("easy_vqa") / "questions.csv"
    for number in {number for *_, number in rows}:
        shutil.copy(pictures[number], path.parent / f"{number}.png")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer", "image"])
        writer.writerows((question, answer, f"{number}.png") for question, answer, number in rows)
    return path


def test_pictures_are_prepared_and_trained_on(table: Path, tiny_model: Path, runner: Runner, tmp_path: Path) -> None:
    data = tmp_path / "set"
    prepared = runner("prepare", table, "--images", "image", "--keep-duplicates", "--out", data)
    assert prepared.code == 0, prepared.output[-3000:]
    problems = load_set(data)
    assert len(problems) == NUM_ROWS and all(len(problem.images) == 1 for problem in problems)
    with table.open(encoding="utf-8") as file:
        answers = sorted(row["answer"] for row in csv.DictReader(file))
    assert sorted(problem.answer for problem in problems) == answers

    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
out: {tmp_path / "run"}
model: {{path: {tiny_model}}}
data: {{train: [{data}], max_prompt_tokens: 256}}
reward: {{coin: 1.0, overlong_buffer: 8}}
rollout: {{sampler: transformers, prompts_per_step: 4, responses_per_prompt: 4, max_tokens: 16}}
train: {{steps: 1, mini_batch_prompts: 4, lr: 1e-3}}
checkpoint: {{every: 1}}
"""
    )
    trained = runner("train", config)
    assert trained.code == 0, trained.output[-3000:]
    run = RunDirectory(tmp_path / "run")
    (metrics,), (rollouts,) = metrics_of(run), rollouts_of(run)
    assert float(metrics["grad_norm"]) > 0 and len(rollouts) == 16
    assert {row["prompt_id"] for row in rollouts} <= {problem.id for problem in problems}
