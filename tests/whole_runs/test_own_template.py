"""A run with a prompt template of the user's own: trained, evaluated, scored, read by the demo, and resumed."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.helpers.toy_runs import Toys
from vlm_rl.data.sets import load_set
from vlm_rl.demo.numbers.library import Library
from vlm_rl.run.directory import RunDirectory
from vlm_rl.templates import TEMPLATES

FORM = r"<think>.+</think><answer>\\boxed\{[0-4]\}</answer>"  # of the right form is only a number below 5
ANSWER = r"<answer>\\boxed\{(?P<answer>[^{}]*)\}</answer>"


@pytest.mark.turn(1, days=2)
def test_a_run_asks_rewards_and_is_read_by_its_own_template(toys: Toys) -> None:
    """Every verdict and every format reward is what Python's own expressions say of the text."""
    system = TEMPLATES["think_answer"].system  # words that the toy policy knows
    example = r"<think>{reasoning}</think><answer>\boxed{{answer}}</answer>"
    file = toys.folder / "mine.yaml"
    tree = {"system": system, "suffix": " guess", "answer": ANSWER, "form": FORM, "example": example}
    file.write_text(yaml.safe_dump(tree))
    data = {"eval": [str(toys.heldout)], "template": "mine.yaml", "max_prompt_tokens": 200}  # beside the recipe
    config = toys.config("mine", data=data, eval={"every": 1}, train={"steps": 1}, checkpoint={"every": 1})
    result = toys.runner("train", config)
    assert result.code == 0, result.output[-3000:]
    run = toys.run("mine")

    golds = {problem.id: problem.answer for problem in load_set(toys.train)}
    rows = run.rollouts(1).to_pylist()
    form, right = [], []
    for row in rows:
        found = re.findall(ANSWER, row["text"].rpartition("</think>")[2])
        form.append(float(bool(re.fullmatch(FORM, row["text"].strip(), re.DOTALL))))
        right.append(float(found[-1:] == [golds[row["prompt_id"]]]))
    (metrics,) = run.metrics()
    assert metrics["rewards/accuracy/mean"] == sum(right) / len(rows)
    assert metrics["rewards/format/mean"] == 0.5 * sum(form) / len(rows)
    assert 0 < sum(form) < len(rows) and any(right), "the toy policy guesses numbers from 0 to 8"

    first, *_ = run.evals()
    asked = first.rows(["prompt_text", "question"]).to_pylist()
    assert all(row["question"].split("\n")[-1] + " guess<|im_end|>" in row["prompt_text"] for row in asked)
    file.unlink()
    assert first.template is not None and first.template.form == FORM
    assert first.summary["template"] == "mine"
    for shown in Library([run.path]).checkpoints["heldout"].values():
        texts = shown.responses.texts["response"].to_pylist()
        faults = [re.fullmatch(FORM, text.strip(), re.DOTALL) is None for text in texts]
        assert [*shown.responses.format_fault_R] == faults

    checkpoint = run.path / "checkpoints" / "step-000001"
    out = toys.folder / "mine-eval"
    words = ["eval", "--model", checkpoint, "--data", toys.heldout, "--out", out, "--sampler", "transformers"]
    result = toys.runner(*words, "--temperature", "0", "--max-tokens", "14")
    assert result.code == 0 and "template mine (the run's data.template)" in result.output, result.output[-3000:]
    (measured,) = RunDirectory(out).open().evals()
    assert json.loads(json.dumps(measured.summary["template_record"]))["suffix"] == " guess"

    resumed = toys.runner("train", run.path, "--resume", "train.steps=2")  # from the text in the run
    assert resumed.code == 0, resumed.output[-3000:]
    file.write_text(yaml.safe_dump(tree | {"suffix": " check"}))
    changed = toys.runner("train", config, "--resume", "train.steps=2")
    assert changed.code == 2 and "different data.template.suffix: the run has ' guess'" in changed.output
