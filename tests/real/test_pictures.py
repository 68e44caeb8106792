"""easy-VQA, published pictures with questions: prepared as users prepare a table, and trained on by the tiny VLM."""

from __future__ import annotations

import csv
import importlib
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.toy_runs import Runner, metrics_of, rollouts_of
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.picture_sets import PictureCounts, make_picture_sets
from vlm_rl.run.directory import RunDirectory
from vlm_rl.toy.drawn_pictures import COLOURS, SHAPES

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


def test_a_trace_says_what_the_published_answers_say(tmp_path: Path) -> None:
    """Of every kind of question: what is shown agrees with all answers about the picture, and leads to the answer."""
    easy_vqa = importlib.import_module("easy_vqa")
    counts = PictureCounts(drawn=1, published=2_000, heldout=1, test=400)
    make_picture_sets(tmp_path, counts=counts)
    questions = list(zip(*easy_vqa.get_train_questions(), strict=True))
    shown: dict[str, str] = {}
    with (tmp_path / "raw" / "traces" / "questions.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["id"].startswith("published")]
    assert len(rows) == 2_000 and len({row["question"] for row in rows}) > 60
    for row in rows:
        said = re.search(r"shows a (\w+) (\w+)\.", row["trace"])
        assert said and f"answer is {row['answer']}." in row["trace"]
        assert shown.setdefault(row["image"], said[0]) == said[0]
        question, answer, picture = questions[int(row["id"].split("-")[-1])]
        assert (question, answer, f"published-{picture}.png") == (row["question"], row["answer"], row["image"])
    for question, answer, picture in questions:
        if f"published-{picture}.png" not in shown:
            continue
        words = set(question.rstrip("?").split())
        things = set(re.findall(r"\w+", shown[f"published-{picture}.png"]))
        asked = words & {*COLOURS, *SHAPES}
        is_there = bool(asked & things)
        expected = (
            {"yes" if is_there != bool({"no", "not"} & words) else "no"}
            if asked and answer in ("yes", "no")
            else things
        )
        assert answer in expected, (question, answer, things)
    assert len(load_set(tmp_path / "easy_vqa")) == 400
