"""SmolLM2-135M-Instruct, a pretrained language model, through every command: learner, vLLM, training, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.family_rows import packed_row
from tests.helpers.groups import WeighedGroup, load_reference, padded_logps
from tests.helpers.toy_runs import Runner, assert_equal_runs, metrics_of, rollouts_of
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.word_sets import StyledSets
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.model_files.adapters import load_merged
from vlm_rl.run.directory import RunDirectory
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Rollout

ROUNDING = 5e-5  # of a log-prob in float32, through 30 layers
DEADLINE = 600.0  # seconds for a command, which takes up to one minute


def command(runner: Runner, *words: object) -> str:
    """Run `vlm-rl WORDS`, which must succeed, and return what it prints."""
    result = runner(*words, deadline=DEADLINE)
    assert result.code == 0, result.output[-3000:]
    return result.output


def test_the_doctor_finds_nothing(smollm: Path, runner: Runner) -> None:
    page = command(runner, "doctor", "--model", smollm)
    outcomes = [line.split()[0] for line in page.splitlines() if line[:4].strip() in ("ok", "OFF", "?")]
    assert outcomes == ["ok"] * 7, page
    assert "vllm holds the synced weights" in " ".join(page.split())


def test_packed_rows_equal_the_unmodified_model(smollm: Path, words: StyledSets) -> None:
    """Two prompts with four real responses each in one row, against each response in a padded row."""
    builder, reference = PromptBuilder(smollm, template=TEMPLATES["think_answer"]), load_reference(smollm)
    problems = load_set(words.traces)[:4]
    texts = [problem.meta["response"] for problem in problems]
    encoded = [builder.encode_response(text) for text in texts]
    groups = []
    for problem in problems[:2]:
        rollouts = [
            Rollout(problem.id, index, ids, np.zeros(len(ids), np.float32), text, "stop", 0)
            for index, (ids, text) in enumerate(zip(encoded, texts, strict=True))
        ]
        groups.append(WeighedGroup(builder.build(problem), rollouts, np.ones(4), np.ones(4)))
    policy = Policy(load_model(smollm, dtype=torch.float32), banned_ids=(), temperature=1.0)
    logp_K, _ = policy(packed_row(policy, groups))
    expected_K = torch.cat([logp_R for group in padded_logps(reference, groups) for logp_R in group])
    torch.testing.assert_close(logp_K, expected_K, atol=ROUNDING, rtol=0)
    logp_K.mean().backward()
    expected_K.mean().backward()
    ours = dict(policy.model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        gradient = ours[name].grad
        assert gradient is not None and (gradient - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name


def test_sft_learns_and_what_it_writes_opens(started: RunDirectory, smollm: Path) -> None:
    losses = [float(row["loss"]) for row in metrics_of(started)]
    assert len(losses) == 6 and losses[-1] < 0.6 * losses[0], losses
    ((_, folder),) = started.checkpoints()
    model, base = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, smollm))
    assert model.state_dict().keys() == base.state_dict().keys()
    assert not torch.equal(model.lm_head.weight, base.lm_head.weight)


def test_adapters_are_trained_and_merged(smollm: Path, words: StyledSets, runner: Runner, tmp_path: Path) -> None:
    config = tmp_path / "lora.yaml"
    config.write_text(
        f"""
out: {tmp_path / "run"}
model: {{path: {smollm}, lora: {{rank: 8, alpha: 16}}}}
data: {{train: [{words.traces}], max_prompt_tokens: 256, max_response_tokens: 256}}
train: {{steps: 3, mini_batch_prompts: 4, lr: 1e-3}}
checkpoint: {{keep_last: 1}}
"""
    )
    command(runner, "sft", config)
    losses = [float(row["loss"]) for row in metrics_of(RunDirectory(tmp_path / "run"))]
    assert losses[-1] < losses[0], losses
    command(runner, "export", tmp_path / "run", "--merge", "--out", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ((_, checkpoint),) = RunDirectory(tmp_path / "run").checkpoints()
    expected = load_merged(checkpoint, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.state_dict().items())
    base = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32).state_dict()
    moved = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, base[name])}
    assert moved and all("_proj" in name for name in moved), moved


def rollout_of(row: dict[str, Any]) -> Rollout:
    """Return a response as it was stored."""
    ids, logprobs = np.array(row["token_ids"], np.int32), np.array(row["logprobs"], np.float32)
    name, index, version = row["prompt_id"], row["response_index"], row["policy_version"]
    return Rollout(name, index, ids, logprobs, row["text"], row["stop_reason"], version)


class TestReinforcement:
    """Three steps of LUSPO with vLLM, the third of them taken again from the checkpoint before it."""

    @pytest.fixture(scope="class")
    def run(
        self, started: RunDirectory, words: StyledSets, runner: Runner, tmp_path_factory: pytest.TempPathFactory
    ) -> RunDirectory:
        folder = tmp_path_factory.mktemp("runs")
        ((_, model),) = started.checkpoints()
        config = folder / "run.yaml"
        config.write_text(
            f"""
seed: 3
out: {folder / "run"}
model: {{path: {model}}}
data: {{train: [{words.train}], max_prompt_tokens: 256}}
algorithm: {{name: luspo}}
reward: {{coin: 1.0, overlong_buffer: 16}}
rollout: {{prompts_per_step: 2, responses_per_prompt: 4, max_tokens: 32}}
train: {{steps: 3, mini_batch_prompts: 1, lr: 1e-5}}
checkpoint: {{every: 2, keep_last: 2}}
log: {{samples_every: 0}}
"""
        )
        command(runner, "train", config)
        return RunDirectory(folder / "run")

    def test_responses_have_the_log_probs_of_the_unmodified_model(
        self, run: RunDirectory, started: RunDirectory, words: StyledSets
    ) -> None:
        """Those of step 1, which were drawn with the weights that the run began with."""
        ((_, model),) = started.checkpoints()
        builder, reference = PromptBuilder(model, template=TEMPLATES["think_answer"]), load_reference(model)
        problems = {problem.id: problem for problem in load_set(words.train)}
        rows, *_ = rollouts_of(run)
        groups = []
        for name in {row["prompt_id"]: None for row in rows}:
            drawn = [rollout_of(row) for row in rows if row["prompt_id"] == name]
            assert len(drawn) == 4
            groups.append(WeighedGroup(builder.build(problems[name]), drawn, np.ones(4), np.ones(4)))
        assert len(groups) == 2
        with torch.no_grad():
            expected = padded_logps(reference, groups, banned=builder.banned_ids)
        for group, logps in zip(groups, expected, strict=True):
            for rollout, logp_R in zip(group.rollouts, logps, strict=True):
                torch.testing.assert_close(torch.from_numpy(rollout.logprobs), logp_R, atol=ROUNDING, rtol=0)

    def test_sampler_and_learner_agree(self, run: RunDirectory) -> None:
        rows = metrics_of(run)
        assert len(rows) == 3
        for row in rows:
            assert float(row["rollout/logprob_gap"]) < ROUNDING and float(row["grad_norm"]) > 0

    def test_a_step_taken_again_is_the_same(self, run: RunDirectory, runner: Runner, tmp_path: Path) -> None:
        whole = RunDirectory(tmp_path / "whole")
        shutil.copytree(run.path, whole.path)
        assert [step for step, _ in run.checkpoints()] == [2, 3]
        shutil.rmtree(run.checkpoints()[-1][1])
        page = command(runner, "train", run.path, "--resume")
        assert "step 3 of 3 is next" in page and run.metrics()[-1]["attempt"] == 2
        assert_equal_runs(run, whole)

    def test_a_checkpoint_is_evaluated(
        self, run: RunDirectory, words: StyledSets, runner: Runner, tmp_path: Path
    ) -> None:
        _, model = run.checkpoints()[-1]
        words_of_eval = ("--model", model, "--data", words.heldout, "--out", tmp_path / "eval", "--max-tokens", 48)
        command(runner, "eval", *words_of_eval, "--sampler", "transformers")
        (summary,) = (tmp_path / "eval").rglob("*.json")
        assert json.loads(summary.read_text())["num_problems"] == 4

    def test_an_export_opens_in_transformers(self, run: RunDirectory, runner: Runner, tmp_path: Path) -> None:
        command(runner, "export", run.path, "--out", tmp_path / "model")
        _, checkpoint = run.checkpoints()[-1]
        exported, expected = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
            for path in (tmp_path / "model", checkpoint)
        )
        assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())
