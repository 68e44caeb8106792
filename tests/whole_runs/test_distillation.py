"""Runs whose policy learns from a teacher of a different size, and from itself with the answer in its prompt."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.groups import own_inputs
from tests.helpers.resumed import assert_last_step_is_made_again
from tests.helpers.rotation import todays
from tests.helpers.toy_runs import Toys
from vlm_rl.config import load_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import load_set
from vlm_rl.errors import UserError
from vlm_rl.model_files.model_folder import open_config
from vlm_rl.run.directory import RunDirectory
from vlm_rl.session.teacher import check_reads_the_same
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model

HINT = " The answer is {answer}."
TEMPERATURE = 1.1  # of toys


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachers") / "wider"
    texts = SQUARES.tokenizer_texts()
    return build_tiny_model(folder, seed=5, tokenizer_texts=texts, hidden=192, heads=6, mlp=256, weight_std=0.08)


def sampled_kl(run: RunDirectory, toys: Toys, teacher: Path, *, hint: str) -> float:
    """Return the mean over the tokens of step 1 of the sampler's log-prob less that of the unmodified teacher."""
    from transformers import AutoModelForImageTextToText

    builder = PromptBuilder(toys.model, template=TEMPLATES["think_answer"])
    problems = {problem.id: problem for problem in load_set(toys.train)}
    model: Any = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32, attn_implementation="sdpa")
    gaps: list[float] = []
    for row in run.rollouts(1).to_pylist():
        problem = problems[row["prompt_id"]]
        question = problem.question + hint.replace("{answer}", problem.answer)
        prompt = builder.build(type(problem)(**{**_fields(problem), "question": question}))
        tokens = torch.from_numpy(np.concatenate([prompt.ids, row["token_ids"]]).astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None], **own_inputs(model, tokens[None], prompt.vision)).logits[0]
        logits = logits[len(prompt.ids) - 1 : -1] / TEMPERATURE
        logits[:, list(builder.banned_ids)] = -torch.inf
        logp = logits.log_softmax(-1).gather(1, tokens[len(prompt.ids) :, None])[:, 0]
        gaps += (np.array(row["logprobs"]) - logp.numpy()).tolist()
    return float(np.mean(gaps))


def _fields(problem: Any) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in type(problem).__slots__}


@pytest.mark.turn(1, days=2)
def test_a_teacher_s_scores_are_the_unmodified_model_s_and_a_resume_is_exact(toys: Toys, teacher: Path) -> None:
    """With a hint, without rewards. The second step, made again with a teacher that stays loaded, is the same."""
    rule = {"distillation": {"teacher": str(teacher), "rewards": False, "hint": HINT}}
    changes: dict[str, Any] = {"checkpoint": {"every": 1}, "rollout": {"responses_per_prompt": 2}}
    train = {"steps": 2, "mini_batch_prompts": 4}
    whole = toys.train_run("taught", algorithm=rule, train=train, **changes)
    assert_last_step_is_made_again(toys, whole, "algorithm.distillation.offload=false")
    record, rows = whole.metrics()[0], whole.rollouts(1).to_pylist()
    expected = sampled_kl(whole, toys, teacher, hint=HINT)
    assert record["teacher/kl"] == pytest.approx(expected, rel=1e-3)
    assert abs(sampled_kl(whole, toys, teacher, hint="") - expected) > 0.01, "the hint is read"
    assert record["timing/teacher_logprobs"] > 0 and record["grad_norm"] > 0
    assert not any(row["advantage"] for row in rows), "rewards are not trained on"
    assert any(row["reward"] for row in rows), "and they are measured"


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "stage", "shared"), todays([(0, 2, 1), (8, 3, 2)], days=2))
def test_a_teacher_s_gradient_does_not_depend_on_ranks_and_rows(
    toys: Toys, teacher: Path, top_k: int, stage: int, shared: int
) -> None:
    """The first step of one rank, and of two with narrow rows and a frozen vision tower's features.

    With its likeliest ids both ranks compute each row together.
    """
    name = f"teacher-{top_k}-{stage}"
    rule = {"distillation": {"teacher": str(teacher), "top_k": top_k, "hint": HINT}}
    options: dict[str, Any] = {"algorithm": rule, "model": {"path": str(toys.model), "freeze": ["tower", "merger"]}}
    train: dict[str, Any] = {"steps": 1, "mini_batch_prompts": 4}
    one = toys.train_run(f"{name}-one", **options, train=train)
    narrow = {**train, "zero_stage": stage, "micro_batch_tokens": 170, "sequence_parallel": shared}
    result = toys.runner("train", str(toys.config(f"{name}-two", **options, train=narrow)), ranks=2)
    assert result.code == 0, result.output[-3000:]
    (first,), (second,) = one.metrics(), toys.run(f"{name}-two").metrics()
    keys = ["teacher/kl", "loss", "grad_norm", *(["teacher/mass"] if top_k else [])]
    for key in keys:
        assert second[key] == pytest.approx(first[key], rel=1e-3), key
    assert 0 < first["grad_norm"] < math.inf


@pytest.mark.slow
def test_with_adapters_the_model_itself_is_the_teacher(toys: Toys) -> None:
    """It is in memory already. With the answer in its prompt it differs from the policy from the first step on."""
    model = {"path": str(toys.model), "lora": {"rank": 4}}
    rule = {"distillation": {"teacher": str(toys.model), "top_k": 4, "hint": HINT}}
    (record,) = toys.train_run(
        "own-teacher", algorithm=rule, model=model, train={"steps": 1, "mini_batch_prompts": 4}
    ).metrics()
    rule["distillation"] |= {"hint": ""}
    (same,) = toys.train_run(
        "no-hint", algorithm=rule, model=model, train={"steps": 1, "mini_batch_prompts": 4}
    ).metrics()
    assert record["teacher/kl"] > 1e-5 > 1e-6 > abs(same["teacher/kl"])


def test_a_teacher_that_reads_other_tokens_is_refused(toys: Toys, teacher: Path, tmp_path: Path) -> None:
    config = load_config(toys.config("refused"))

    def refusal(folder: Path, *, top_k: int = 0) -> str:
        with pytest.raises(UserError) as caught:
            check_reads_the_same(config, open_config(str(folder)), folder, top_k=top_k, num_banned=7)
        return str(caught.value)

    texts = ["one two three", *SQUARES.tokenizer_texts()]
    other = build_tiny_model(tmp_path / "other", seed=1, tokenizer_texts=texts)
    pixels = shutil.copytree(teacher, tmp_path / "pixels")
    for file in pixels.glob("*processor*.json"):
        file.write_text(file.read_text().replace("0.48145466", "0.5"))
    smaller = shutil.copytree(teacher, tmp_path / "smaller")
    raw = json.loads((smaller / "config.json").read_text())
    raw["text_config"]["vocab_size"] -= 1
    (smaller / "config.json").write_text(json.dumps(raw))
    assert "image_mean" in refusal(pixels) and "it would see other pixels" in refusal(pixels)
    assert "use a teacher whose vocabulary is as large" in refusal(smaller)
    assert "top_k is 4000, and responses have" in refusal(teacher, top_k=4000)
    assert "only in that of" in refusal(other) and "use a teacher of the same family" in refusal(other)

    config_of_run = toys.config("refused", algorithm={"distillation": {"teacher": str(other)}})
    result = toys.runner("train", str(config_of_run))
    message = " ".join(result.output.split())
    assert result.code == 2 and "algorithm.distillation.teacher: " in message, message[-3000:]
    assert "has a different tokenizer than model.path" in message
