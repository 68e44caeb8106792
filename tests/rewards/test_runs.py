"""Training runs with functions, judges and boxes: a failure is named and counted, and the run continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chat_server import chat_server
from tests.helpers.images import plain_png
from tests.helpers.prepared_sets import write_problems
from tests.helpers.toy_runs import Toys
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.run.directory import RunDirectory
from vlm_rl.types import Problem

OWN = "tests.helpers.own_reward"
STEP = {"steps": 1}


def judge(folder: Path, url: str, **changes: Any) -> dict[str, Any]:
    (folder / "prompt.txt").write_text("{question} The response was {response}")
    section = {"url": url, "model": "tiny", "prompt": str(folder / "prompt.txt"), "max_tokens": 14, "images": True}
    return {**section, "highest": 8.0, "retries": 0, "concurrency": 4, **changes}


def texts_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_the_part_that_decides_in_training_decides_in_every_evaluation(toys: Toys) -> None:
    """By the part a response of few letters a token is right, which the grader never says of untrained models."""
    own = {"functions": {"short": {"path": f"{OWN}.short_words", "role": "accuracy"}}, "allow_function": True}
    run = toys.train_run(
        "part", reward=own, train=STEP, data={"eval": [str(toys.heldout)]}, eval={"every": 1}, checkpoint={"every": 1}
    )
    (first, last) = run.evals("heldout")
    for result in (first, last):
        rows = result.rows(["path", "verdict", "response", "length"]).to_pylist()
        assert {row["path"] for row in rows} == {"short"} and result.summary["rule"] == "reward.short"
        assert [row["verdict"] == "correct" for row in rows] == [
            len(row["response"]) < 10 * row["length"] for row in rows
        ]
    out = toys.folder / "part-eval"
    words = ["--model", str(run.path / "latest"), "--data", str(toys.heldout), "--sampler", "transformers"]
    words += ["--temperature", "0", "--max-prompt-tokens", "160"]
    asked = toys.runner("eval", *words, "--out", str(out))
    assert asked.code == 0 and "heldout: reward.short decides what is right" in asked.output, asked.output[-3000:]
    (again,) = RunDirectory(out).evals("heldout")
    assert again.rows(["verdict", "response"]) == last.rows(["verdict", "response"])
    other = toys.config("other", reward={"overlong_buffer": 0})
    asked = toys.runner("eval", *words, "--reward", str(other), "--out", str(toys.folder / "grader-eval"))
    assert asked.code == 0, asked.output[-3000:]
    (by_grader,) = RunDirectory(toys.folder / "grader-eval").evals("heldout")
    assert by_grader.summary["rule"] == "strict" and by_grader.summary["accuracy"] < again.summary["accuracy"]


def box_set(folder: Path, count: int) -> Path:
    """Write problems with one box each: every third is away from the box that the policy has learned to give."""
    image = plain_png(56, 56)
    boxes = [[0.1, 0.25, 0.6, 0.8] if index % 3 else [0.6, 0.0, 0.9, 0.1] for index in range(count)]
    problems = [
        Problem(
            f"Box-{index}",
            f"<image>Where is it? {index}",
            (image,),
            str(box),
            "list",
            source="Box",
            meta={"box": box},
        )
        for index, box in enumerate(boxes)
    ]
    return write_problems(problems, folder, {"min_pixels": 3136, "max_pixels": 1_003_520})


@pytest.mark.slow
def test_a_run_on_boxes_has_one_score_in_training_evaluation_comparison_and_report(toys: Toys) -> None:
    """A policy that always gives one box is right by IoU where that is the gold, and by no comparison of texts."""
    folder = toys.folder / "boxes"
    train, heldout = box_set(folder / "train", 6), box_set(folder / "heldout", 6)
    response = r"<think> look </think><answer>\boxed{[123, 245, 567, 789]}</answer>"
    traces = folder / "traces.json"
    traces.write_text(json.dumps([(f"Box-{index % 6}", response) for index in range(240)]))
    job = {"model": str(toys.random_model), "train": str(train), "traces": str(traces), "out": str(folder / "warm")}
    assert toys.runner(warm_start=job).code == 0
    section = {"threshold": 0.5, "role": "accuracy", "coordinates": "thousandths"}
    run = toys.train_run(
        "boxes",
        model={"path": str(folder / "warm")},
        data={"train": [str(train)], "eval": [str(heldout)]},
        reward={"iou": section},
        rollout={"max_tokens": 48, "prompts_per_step": 6, "temperature": 0.01},
        train={"steps": 1, "lr": 1e-6, "mini_batch_prompts": 6},
        eval={"every": 1},
        checkpoint={"every": 1},
    )
    (record,) = run.metrics()
    assert record["rewards/accuracy/mean"] == record["rewards/iou/mean"] == pytest.approx(4 / 6)
    (first, last) = run.evals("heldout")
    verdicts = {f"Box-{index}": "correct" if index % 3 else "wrong" for index in range(6)}
    for result in (first, last):
        rows = result.rows(["problem_id", "verdict", "path"]).to_pylist()
        assert {row["problem_id"]: row["verdict"] for row in rows} == verdicts
        assert {row["path"] for row in rows} == {"iou"} and result.summary["rule"] == "reward.iou"
        assert result.summary["accuracy"] == pytest.approx(4 / 6)
    out = folder / "eval"
    asked = toys.runner(
        *("eval", "--model", str(run.path / "latest"), "--data", str(heldout), "--sampler", "transformers"),
        *("--temperature", "0", "--max-prompt-tokens", "160", "--max-tokens", "48", "--out", str(out)),
    )
    assert asked.code == 0 and "reward.iou decides what is right" in asked.output, asked.output[-3000:]
    (again,) = RunDirectory(out).evals("heldout")
    assert again.rows(["problem_id", "verdict"]) == last.rows(["problem_id", "verdict"])
    asked = toys.runner("eval", "compare", str(out), str(run.path))
    assert asked.code == 0 and "heldout (judged by reward.iou)" in asked.output, asked.output
    assert "accuracy 66.7 -> 66.7" in asked.output
    assert toys.runner("report", str(run.path), "--out", str(folder / "report.html")).code == 0
    assert "reward.iou" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_run_whose_rewards_are_undecided_stops_before_its_update_and_goes_on_where_told(toys: Toys) -> None:
    own = {"functions": {"broken": {"path": f"{OWN}.raises"}}, "allow_function": True}
    config = str(toys.config("undecided-all", reward=own, train=STEP))
    stopped = toys.runner("train", config)
    assert stopped.code == EXIT_STOPPED, stopped.output[-3000:]
    assert "16 of 16 rewards of this step are undecided, above reward.max_undecided=0.5: broken: " in stopped.output
    run = toys.run("undecided-all")
    assert not list(run.metrics()) and [step for step, _ in run.checkpoints()] == [0]
    resumed = toys.runner("train", config, "--resume", "reward.max_undecided=1")
    assert resumed.code == 0, resumed.output[-3000:]
    assert [record["step"] for record in run.metrics()] == [1]


@pytest.mark.slow
def test_a_run_survives_a_hostile_judge_and_broken_functions(
    toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = {
        "exits": {"path": f"{OWN}.exits_at_once", "role": "logged"},
        "short": {"path": f"{OWN}.short_words", "weight": 0.5},
    }
    with chat_server() as server:
        reward = {"functions": functions, "allow_function": True, "max_undecided": 1.0}
        section = judge(tmp_path, server.url("hang"), timeout=0.3, api_key_env="JUDGE_KEY")
        path = toys.config("hostile", reward={**reward, "judge": section}, train=STEP)
        result = toys.runner("train", str(path), environment={"JUDGE_KEY": "s3cret"})
    assert result.code == 0, result.output[-3000:]
    assert "step 1: reward exits: 16 of 16 undecided; problem 'Toy-" in result.output
    assert "ended its process with exit code 7" in result.output
    assert "step 1: reward judge: 16 of 16 undecided; problem 'Toy-" in result.output
    assert "the judge did not reply within 0.3 s" in result.output
    (record,) = list(RunDirectory(toys.folder / "runs" / "hostile").metrics())
    assert record["rewards/judge/mean"] == 0 and record["rewards/judge/undecided_rate"] == 1
    assert record["rewards/short/undecided_rate"] == 0 and record["rewards/short/mean"] > 0
    assert b"s3cret" not in texts_below(toys.folder / "runs" / "hostile") + result.output.encode()
