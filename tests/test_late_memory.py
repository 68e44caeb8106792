"""Memory that ends late in a run: what a resume may change then, and a step that is made again in shorter rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.toy_runs import Toys, assert_sound, metrics_of, rollouts_of
from vlm_rl.run.directory import RunDirectory

SMALLER = {
    "train.micro_batch_tokens": "150",
    "train.zero_stage": "2",
    "model.layer_patches": "false",
    "model.gradient_checkpointing": "true",
}


def words(changes: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def assert_close_runs(run: RunDirectory, expected: RunDirectory) -> None:
    """Compare prompts, responses, metrics and the last weights up to the rounding of float32."""
    assert [[row["text"] for row in rows] for rows in rollouts_of(run)] == [
        [row["text"] for row in rows] for rows in rollouts_of(expected)
    ]
    for mine, theirs in zip(metrics_of(run), metrics_of(expected), strict=True):
        assert mine["num_tokens"] == theirs["num_tokens"]
        for key in ("loss", "grad_norm", "entropy", "reward"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
    weights, others = (load_file(last_checkpoint(each) / "model.safetensors") for each in (run, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=2e-5)


def last_checkpoint(run: RunDirectory) -> Path:
    return run.checkpoints()[-1][1]


@pytest.mark.slow
def test_a_killed_run_resumes_in_less_memory_and_with_another_sampler(toys: Toys) -> None:
    whole = toys.train_run("memory-whole")
    config = toys.config("memory-cut")
    killed = toys.runner("train", config, faults={"raise_in": {"phase": "update", "step": 3, "rank": 0}})
    assert killed.code == 1 and "injected fault" in killed.output, killed.output[-3000:]
    run, copy = toys.run("memory-cut"), toys.folder / "cut-copy"
    shutil.copytree(run.path, copy)
    resumed = toys.runner("train", run.path, "--resume", *words(SMALLER))
    assert resumed.code == 0, resumed.output[-3000:]
    for key, value in SMALLER.items():
        assert resumed.output.count(f"{key} is {value.title()} from now on") == 1
    assert "other responses" not in resumed.output
    assert_close_runs(run, whole)
    assert_sound(run)
    now = run.config()
    assert (now.train.micro_batch_tokens, now.train.zero_stage, now.model.layer_patches) == (150, 2, False)
    assert now.model.gradient_checkpointing and now.model.path == whole.config().model.path

    shutil.rmtree(run.path)
    copy.rename(run.path)
    pytest.importorskip("vllm")
    other = toys.runner("train", run.path, "--resume", "rollout.sampler=vllm", "rollout.vllm.enforce_eager=true")
    assert other.code == 0, other.output[-3000:]
    assert (
        "with a different rollout.sampler, rollout.vllm.enforce_eager the run draws other responses" in other.output
    )
    assert [step for step, _ in run.checkpoints()] == [2, 4] and run.config().rollout.sampler == "vllm"
    assert metrics_of(run)[:2] == metrics_of(whole)[:2]
