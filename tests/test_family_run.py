"""Runs of families as a user makes them: dry run, training, checkpoint, evaluation, a question in the demo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.groups import load_reference
from tests.helpers.prepared_sets import write_problems
from tests.helpers.toy_runs import Toys
from vlm_rl.data.sets import load_set
from vlm_rl.demo.backends import AskableCheckpoint, load_checkpoint
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.types import Problem

ROUNDING = 1e-5  # of a log-prob in float32
COIN = {"overlong_buffer": 8, "coin": 1.0}  # decides the reward, so that there is something to learn from


@pytest.mark.slow
def test_a_run_of_qwen3_vl(toys: Toys, family_model: Callable[[str], Path]) -> None:
    """Only the language model is trained; a coin decides the reward, so that there is something to learn from."""
    model = family_model("qwen3_vl")
    changes = {
        "model": {"path": str(model), "freeze": ["tower", "merger"], "gradient_checkpointing": True},
        "reward": COIN,
        "train": {"steps": 2, "mini_batch_prompts": 2, "micro_batch_tokens": 300, "lr": 1e-3, "zero_stage": 2},
    }
    planned = toys.runner("train", toys.config("qwen3_vl", **changes), "--dry-run")
    assert planned.code == 0 and "tower" in planned.output and "(frozen)" in planned.output
    run = toys.train_run("qwen3_vl", **changes)
    assert all(0 < record["rollout/logprob_gap"] < ROUNDING for record in run.metrics())

    (_, checkpoint), *_ = run.checkpoints()
    before, after = (dict(load_reference(path).named_parameters()) for path in (model, checkpoint))
    assert all(torch.equal(before[name], after[name]) == (".visual." in name) for name in before)

    out = toys.folder / "eval-qwen3-vl"
    words = ["eval", "--model", checkpoint, "--data", toys.heldout, "--out", out, "--sampler", "transformers"]
    scored = toys.runner(*words, "--max-tokens", "8", "--max-prompt-tokens", "160")
    assert scored.code == 0, scored.output[-2000:]
    assert (out / "eval" / toys.heldout.name).is_dir()

    asked = AskableCheckpoint("qwen3_vl", checkpoint, "", "think_answer", 3136, 1_003_520)
    loaded = load_checkpoint(asked, engine="transformers", max_tokens=8)
    prompt = loaded.builder.build(load_set(toys.heldout)[0])
    greedy = SamplingParams(temperature=0, max_tokens=8, responses=1)
    assert list(loaded.sampler.stream(prompt, greedy, seed=0, step=0))
    loaded.close()


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a prepared set of text."""
    problems = [Problem(f"sum-{n}", f"What is {n} + 1?", (), str(n + 1), "integer") for n in range(8)]
    return write_problems(problems, tmp_path_factory.mktemp("sets") / "sums", {})


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_moe", "qwen3_next"])
def test_a_run_of_a_text_model(model_type: str, toys: Toys, sums: Path, family_model: Callable[[str], Path]) -> None:
    """Windows, experts, and linear attention, whose rows are padded."""
    model = family_model(model_type)
    train = {"steps": 2, "mini_batch_prompts": 2, "micro_batch_tokens": 300, "lr": 1e-3, "zero_stage": 2}
    changes = {"model": {"path": str(model)}, "data": {"train": [str(sums)]}, "reward": COIN, "train": train}
    planned = toys.runner("train", toys.config(model_type, **changes), "--dry-run")
    assert planned.code == 0, planned.output[-2000:]
    assert ("rows       padded" in planned.output) == SUPPORTED[model_type].padded
    run = toys.train_run(model_type, **changes)
    assert all(0 < record["rollout/logprob_gap"] < ROUNDING for record in run.metrics())

    (_, checkpoint), *_ = run.checkpoints()
    before, after = (dict(load_reference(path).named_parameters()) for path in (model, checkpoint))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)

    out = toys.folder / f"eval-{model_type}"
    words = ["eval", "--model", checkpoint, "--data", sums, "--out", out, "--sampler", "transformers"]
    scored = toys.runner(*words, "--max-tokens", "8", "--max-prompt-tokens", "160")
    assert scored.code == 0, scored.output[-2000:]
    assert (out / "eval" / sums.name).is_dir()
