"""A run of a model family as a user makes it: dry run, training, checkpoint, evaluation, a question in the demo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.families import VISION_FAMILIES
from tests.helpers.groups import load_reference
from tests.helpers.prepared_sets import write_problems
from tests.helpers.toy_runs import Toys
from vlm_rl.data.sets import load_set
from vlm_rl.demo.backends import AskableCheckpoint, load_checkpoint
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.types import Problem

ROUNDING = 1e-5  # of a log-prob in float32


@pytest.fixture(scope="module")
def text_set(toys: Toys) -> Path:
    problems = [
        Problem(str(n), f"How many are {n} and {n}?", (), str(2 * n), "integer", source="Toy") for n in range(8)
    ]
    return write_problems(problems, toys.folder / "sums")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_vl"])
def test_a_run_of_a_family(model_type: str, toys: Toys, text_set: Path, family_model: Callable[[str], Path]) -> None:
    """A vision model trains its language model only."""
    model, is_vision = family_model(model_type), model_type in VISION_FAMILIES
    train, heldout = (toys.train, toys.heldout) if is_vision else (text_set, text_set)
    changes = {
        "model": {"path": str(model), "freeze": ["tower", "merger"]},
        "data": {"train": [str(train)], "max_prompt_tokens": 160},
        "train": {"steps": 2, "mini_batch_prompts": 2, "micro_batch_tokens": 300, "lr": 1e-3, "zero_stage": 2},
    }
    planned = toys.runner("train", toys.config(model_type, **changes), "--dry-run")
    assert planned.code == 0 and "language_model" in planned.output
    run = toys.train_run(model_type, **changes)
    assert all(0 < record["rollout/logprob_gap"] < ROUNDING for record in run.metrics())

    (_, checkpoint), *_ = run.checkpoints()
    before, after = (
        dict(load_reference(model).named_parameters()),
        dict(load_reference(checkpoint).named_parameters()),
    )
    assert all(torch.equal(before[name], after[name]) == (".visual." in name) for name in before)

    out = toys.folder / f"eval-{model_type}"
    words = ["eval", "--model", checkpoint, "--data", heldout, "--out", out, "--sampler", "transformers"]
    scored = toys.runner(*words, "--max-tokens", "8")
    assert scored.code == 0, scored.output[-2000:]
    assert (out / "eval" / heldout.name).is_dir()

    asked = AskableCheckpoint(model_type, checkpoint, "", "think_answer", 3136, 1_003_520)
    loaded = load_checkpoint(asked, engine="transformers", max_tokens=8)
    prompt = loaded.builder.build(load_set(heldout)[0])
    greedy = SamplingParams(temperature=0, max_tokens=8, responses=1)
    assert list(loaded.sampler.stream(prompt, greedy, seed=0, step=0))
    loaded.close()
