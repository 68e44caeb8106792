"""Supervised fine-tuning: the loss against transformers' own, and runs of `vlm-rl sft`."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.helpers.prepared_sets import write_problems
from tests.helpers.toy_runs import Toys, assert_sound, metrics_of, state_of, toy_problem
from vlm_rl.config import load_sft_config
from vlm_rl.data.prompts import PromptBuilder, PromptCache
from vlm_rl.data.sets import load_set
from vlm_rl.errors import EXIT_STOPPED, UserError
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.sft import Example, pack_examples
from vlm_rl.losses import supervised_loss
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.planning.fits import Card
from vlm_rl.planning.page import print_dry_run
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.types import Problem

COLD_START = Path(__file__).resolve().parents[2] / "configs" / "sft" / "cold_start_7b.yaml"


def with_response(problem: Problem, response: str) -> Problem:
    return replace(problem, meta={**problem.meta, "response": response})


def text_problem(index: int) -> Problem:
    return Problem(f"text-{index}", f"How many red squares? ({index})", (), "3", "integer")


# -- the loss ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Return examples of different lengths, with an image and without."""
    long, short = "<think>one red, two red</think><answer>\\boxed{2}</answer>", "\\boxed{3}"
    return [
        Example(toy_problem(0, "train", 2), long),
        Example(text_problem(0), short),
        Example(toy_problem(1, "train", 2), short),
        Example(text_problem(1), long),
    ]


def labels_loss(model: Any, examples: list[Example], builder: PromptBuilder) -> Tensor:
    """Return the loss that transformers computes from labels, on rows padded to the longest."""
    prompts = [builder.build(example.problem) for example in examples]
    rows = [
        (prompt, builder.encode_response(example.response)) for prompt, example in zip(prompts, examples, strict=True)
    ]
    size = (len(rows), max(len(prompt.ids) + len(ids) for prompt, ids in rows))
    inputs, labels = torch.zeros(size, dtype=torch.int64), torch.full(size, -100)
    for row, (prompt, ids) in enumerate(rows):
        end = len(prompt.ids) + len(ids)
        inputs[row, :end] = torch.from_numpy(np.concatenate([prompt.ids, ids]).astype(np.int64))
        labels[row, len(prompt.ids) : end] = inputs[row, len(prompt.ids) : end]
    vision = [prompt.vision for prompt in prompts if prompt.vision]
    attended = torch.arange(size[1]) < torch.tensor([[len(prompt.ids) + len(ids)] for prompt, ids in rows])
    return model(
        input_ids=inputs,
        attention_mask=attended.long(),
        labels=labels,
        pixel_values=torch.cat([images["pixel_values"] for images in vision]).double(),
        image_grid_thw=torch.cat([images["image_grid_thw"] for images in vision]),
        mm_token_type_ids=(inputs == model.config.image_token_id).int(),
    ).loss


def test_the_loss_is_transformers_own_for_labels(tiny_model: Path, examples: list[Example]) -> None:
    """In float64, whose logits both round to float32; gradients of every weight too, over several rows."""
    builder = PromptBuilder(tiny_model, template=TEMPLATES["think_answer"])
    reference: Any = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float64)
    expected = labels_loss(reference, examples, builder)
    expected.backward()
    # patched: transformers' own norms compute in float32, the padded rows' too; the tolerance holds their rounding
    policy = Policy(load_model(tiny_model, dtype=torch.float64), banned_ids=(), temperature=1.0, layer_patches=False)
    lengths = [len(builder.build(example.problem).ids) for example in examples]
    rows = pack_examples(examples, lengths, builder, PromptCache(builder), policy, 200)
    assert len(rows) > 1
    losses = []
    for row in rows:
        if row.vision:
            row.vision["pixel_values"] = row.vision["pixel_values"].double()
        loss, _ = supervised_loss(*policy(row), row.loss)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(
        torch.stack(losses).sum(), expected.detach().double(), rtol=1e-6, atol=0, check_dtype=False
    )
    ours = dict(policy.model.named_parameters())
    for name, parameter in reference.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=0, atol=1e-5 * max(scale, 1e-3))


# -- runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnable(toys: Toys) -> Path:
    """Return a prepared set with responses, one of them too long."""
    rng = np.random.default_rng(0)
    problems = SQUARES.make_problems(12, seed=0, split="train")
    rows = [
        with_response(toy_problem(index, "train", 12), SQUARES.trace(problem, "guess", rng))
        for index, problem in enumerate(problems)
    ]
    rows[5] = with_response(rows[5], "red " * 60)
    return write_problems(rows, toys.folder / "learnable", {"min_pixels": 3136, "max_pixels": 1_003_520})


def sft_file(toys: Toys, learnable: Path, name: str, **changes: Any) -> tuple[Path, RunDirectory]:
    out = toys.folder / "sft" / name
    tree: dict[str, Any] = {
        "seed": 3,
        "out": str(out),
        "model": {"path": str(toys.random_model)},
        "data": {"train": [str(learnable)], "max_prompt_tokens": 160, "max_response_tokens": 40},
        "train": {"steps": 4, "mini_batch_prompts": 4, "micro_batch_tokens": 300, "lr": 3e-3, "zero_stage": 0},
        "checkpoint": {"every": 2},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    path = toys.folder / f"sft-{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path, RunDirectory(out, config_file=SFT_CONFIG)


def run_sft(toys: Toys, learnable: Path, name: str, **changes: Any) -> RunDirectory:
    path, run = sft_file(toys, learnable, name, **changes)
    result = toys.runner("sft", path)
    assert result.code == 0, result.output[-3000:]
    return run


@pytest.fixture(scope="module")
def whole(toys: Toys, learnable: Path) -> RunDirectory:
    return run_sft(toys, learnable, "whole")


def test_a_run_learns_and_counts_what_it_leaves_out(whole: RunDirectory, learnable: Path) -> None:
    records = whole.metrics()
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    last = records[-1]
    assert last["data/trained"] == 16 and last["data/skipped/too_long"] >= 1
    assert last["data/drawn"] == last["data/trained"] + last["data/skipped"]
    assert last["epoch"] == last["data/drawn"] / 12
    assert [step for step, _ in whole.checkpoints()] == [2, 4]
    assert load_sft_config(whole.path / SFT_CONFIG).data.train == [str(learnable)]


def test_the_held_out_loss_is_that_of_a_batch_of_the_same_rows(toys: Toys, learnable: Path) -> None:
    """A batch has all 11 rows that fit, so its loss before a step is the held-out one after the step before."""
    path, run = sft_file(
        toys, learnable, "held-out",
        data={"eval": [str(learnable)]}, train={"steps": 3, "mini_batch_prompts": 11}, eval={"every": 2},
    )  # fmt: skip
    result = toys.runner("sft", path)
    assert result.code == 0, result.output[-3000:]
    first, second, third = run.metrics()
    name = f"heldout_loss/{learnable.name}"
    assert name not in first and third["loss"] == pytest.approx(second[name], rel=1e-5)
    assert third[name] < second[name] < first["loss"]  # measured after the last step too
    said = " ".join(result.output.split())
    untrained = re.search(r"step 0: loss ([\d.]+) on learnable, 11 held-out responses", said)
    assert untrained is not None and float(untrained[1]) == pytest.approx(first["loss"], abs=1e-3)
    assert "1 of 12 rows of learnable are too long" in said
    assert "11 of 12 rows of learnable have the id of a row that is trained on" in said


@pytest.mark.slow
def test_held_out_losses_are_of_the_shorter_rows_once_memory_has_ended(toys: Toys, learnable: Path) -> None:
    """As in a resume, which begins with them: its last step, made again, is the same bit for bit."""
    path, run = sft_file(
        toys, learnable, "memory",
        data={"eval": [str(learnable)]}, train={"steps": 2}, eval={"every": 1}, checkpoint={"every": 1},
    )  # fmt: skip
    result = toys.runner("sft", path, faults={"end_memory": {"where": "backward", "rows": [1]}})
    assert result.code == 0 and "repeating it with 150" in " ".join(result.output.split()), result.output[-3000:]
    before, (_, last) = metrics_of(run), run.checkpoints()[-1]
    shutil.rmtree(last)
    again = toys.runner("sft", run.path, "--resume")
    assert again.code == 0, again.output[-3000:]
    assert metrics_of(run) == before


@pytest.mark.slow
def test_training_starts_from_its_checkpoint(toys: Toys, whole: RunDirectory) -> None:
    (_, folder) = whole.checkpoints()[-1]
    train = {"steps": 1}
    run = toys.train_run("after-sft", model={"path": str(folder)}, train=train, checkpoint={"every": 1})
    assert run.metrics()[0]["rollout/logprob_gap"] < 1e-5


def test_a_stopped_run_resumes_bit_for_bit(toys: Toys, learnable: Path, whole: RunDirectory) -> None:
    """SIGTERM arrives during the save after step 2, and ends the run once that is complete."""
    path, run = sft_file(toys, learnable, "stopped")
    result = toys.runner("sft", path, faults={"terminate_in": {"phase": "save", "step": 1}})
    assert result.code == 75 and f"resume with: vlm-rl sft {run.path} --resume" in result.output, result.output[
        -3000:
    ]
    assert [step for step, _ in run.checkpoints()] == [2] and len(run.metrics()) == 2
    result = toys.runner("sft", run.path, "--resume")
    assert result.code == 0, result.output[-3000:]
    steps = whole.metrics()[-1]["step"]
    assert f"resuming {run.path} from step-000002 (step 3 of {steps} is next)" in " ".join(result.output.split())
    assert metrics_of(run) == metrics_of(whole)
    assert state_of(run) == state_of(whole)
    for line in ("checkpoints: 14.5 MB each, every 2 steps, at most 2 at a time", "step 4: saving", "step 4: saved"):
        assert line in result.output


def test_a_disk_without_room_is_refused_before_anything_is_written(toys: Toys, learnable: Path) -> None:
    """Two saves need 28.9 MB: weights, DeepSpeed's copy of them and two moments, .9 M parameters in float32 each."""
    path, run = sft_file(toys, learnable, "no-room")
    result = toys.runner("sft", path, faults={"leave_free": {"size": 28_000_000}})
    assert result.code == 2 and "2 checkpoints at a time take 28.9 MB" in result.output, result.output[-3000:]
    assert not run.path.exists()


def test_ctrl_c_saves_and_ends_a_run_after_its_step(toys: Toys, learnable: Path, whole: RunDirectory) -> None:
    path, run = sft_file(toys, learnable, "interrupted", checkpoint={"every": 1})
    result = toys.runner("sft", path, faults={"press_ctrl_c_in": {"phase": "save", "step": 1}})
    assert result.code == EXIT_STOPPED, result.output[-3000:]
    assert "Ctrl-C: waiting for what is in progress (save);" in result.output and "Ctrl-C again" in result.output
    assert f"stopped by Ctrl-C after step 1; resume with: vlm-rl sft {run.path} --resume\n" in result.output
    assert [step for step, _ in run.checkpoints()] == [1] and metrics_of(run) == metrics_of(whole)[:1]
    assert_sound(run)


def test_ctrl_c_twice_ends_a_run_at_once_even_where_python_drops_it(toys: Toys, learnable: Path) -> None:
    """In the save after step 2 a destructor swallows the KeyboardInterrupt; the next check raises it again."""
    path, run = sft_file(toys, learnable, "interrupted-twice", checkpoint={"every": 1})
    fault = {"press_ctrl_c_in": {"phase": "save", "step": 2, "presses": 2}}
    result = toys.runner("sft", path, faults=fault)
    assert result.code == 130, result.output[-3000:]
    assert "Ctrl-C again stops at once and loses 1 step." in result.output
    to_resume = f"to resume from step 2: vlm-rl sft {run.path} --resume\n"
    assert f"stopped at once: nothing lost but the step in progress; {to_resume}" in (result.output)
    assert "vlm-rl: interrupted" not in result.output, "the line above says more"


@pytest.mark.slow
def test_adapters_are_trained_exported_and_trained_further(toys: Toys, learnable: Path) -> None:
    lora = {"path": str(toys.random_model), "lora": {"rank": 4}}
    run = run_sft(toys, learnable, "lora", model=lora, train={"steps": 2, "lr": 3e-2})
    (_, folder) = run.checkpoints()[-1]
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "model.safetensors").exists()
    result = toys.runner("sft", run.path, "train.steps=4", "--resume")
    assert result.code == 0, result.output[-3000:]
    losses = [record["loss"] for record in run.metrics()]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.3
    merged = toys.folder / "sft-merged"
    result = toys.runner("export", run.path, "--merge", "--out", merged)
    assert result.code == 0, result.output[-3000:]
    assert "supervised fine-tuning" in (merged / "README.md").read_text()
    toys.train_run("after-sft-lora", model={"path": str(merged)}, train={"steps": 1}, checkpoint={"every": 1})


@pytest.mark.slow
@pytest.mark.parametrize("shared", [1, 2])
def test_two_ranks_take_the_same_steps(toys: Toys, learnable: Path, whole: RunDirectory, shared: int) -> None:
    """Each with rows of its own, and both with a part of each row."""
    train = {"zero_stage": 2, "sequence_parallel": shared}
    path, run = sft_file(toys, learnable, f"two-ranks-{shared}", train=train)
    result = toys.runner("sft", path, ranks=2)
    assert result.code == 0, result.output[-3000:]
    for ours, theirs in zip(run.metrics(), whole.metrics(), strict=True):
        for key in ("loss", "grad_norm", "tokens", "entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key
        assert ours["data/drawn"] == theirs["data/drawn"]


# -- mistakes, and the plan ----------------------------------------------------------------------------


def test_mistakes_are_one_message_each(toys: Toys, learnable: Path, whole: RunDirectory) -> None:
    path, _ = sft_file(toys, learnable, "mistakes")
    for words, message in (
        ([f"data.train=[{toys.train}]"], "has no response to learn: prepare its set again and name the column with"),
        ([f"data.eval=[{toys.heldout}]"], "has no response to learn"),
        (["data.max_response_tokens=3"], "no row of"),
        ([f"out={whole.path}"], "already holds a run; resume it with --resume"),
        ([f"out={whole.path}", "--resume", "train.lr=1.0"], "cannot resume with a different train.lr"),
    ):
        result = toys.runner("sft", path, *words)
        assert result.code == 2 and message in result.output, result.output[-3000:]
        assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.micro_batch_tokens=30", "train.micro_batch_tokens (30) is below data.max_response_tokens (40)"),
        ("rollout.max_tokens=30", "unknown key rollout"),
    ],
)
def test_mistakes_in_the_file_are_seen_as_it_is_read(toys: Toys, learnable: Path, change: str, message: str) -> None:
    path, _ = sft_file(toys, learnable, "mistakes-in-the-file")
    with pytest.raises(UserError, match=re.escape(message)):
        load_sft_config(path, [change])


def test_a_response_without_the_prompts_start_is_named(toys: Toys, learnable: Path) -> None:
    """The chat template opens the reasoning, which a single row of the set does not do."""
    model = toys.folder / "opens-reasoning"
    shutil.copytree(toys.random_model, model)
    chat = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(chat.replace(r"assistant\n' -}}", r"assistant\n<think>\n' -}}"))
    (odd,) = [problem for problem in load_set(learnable) if not problem.meta["response"].startswith("<think>")]
    path, run = sft_file(toys, learnable, "no-start", model={"path": str(model)})
    result = toys.runner("sft", path)
    assert result.code == 2 and "Traceback" not in result.output and not run.path.exists()
    assert rf"problem {odd.id!r}: {model} starts every response with '<think>\n'" in " ".join(result.output.split())


def test_the_shipped_recipe_fits_eight_cards(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_sft_config(COLD_START)
    dry = dry_run(config, num_ranks=8)
    print_dry_run(dry, card=Card.of(80))
    page = " ".join(capsys.readouterr().out.split())
    assert "supervised, 64 responses a step" in page
    needed = dry.memory.update / 2**30
    assert dry.memory.update < 0.9 * 80e9
    assert f"fits on a card with 80 GB: of 74.5 GiB the plan takes {needed:.1f}" in page
    print_dry_run(dry, card=Card.of(24))
    page = capsys.readouterr().out
    assert f"does not fit on a card with 24 GB: a step needs {needed:.1f} GiB" in " ".join(page.split())
    smaller = [line.split("  # ")[0].strip() for line in page.splitlines() if "  # " in line]
    assert smaller
    for setting in smaller:
        assert load_sft_config(COLD_START, [setting]) != config


def test_the_dry_run_counts_no_engine(toys: Toys, learnable: Path) -> None:
    path, run = sft_file(toys, learnable, "dry")
    result = toys.runner("sft", path, "--dry-run", "-v")
    assert result.code == 0 and not run.path.exists()
    assert "supervised, 4 responses a step" in result.output and "optimizer  4 steps" in result.output
    assert "engine" not in result.output and "key-value" not in result.output
    assert "each, every 2 steps, at most 2 at a time (keep_last 2, and the one being written)" in result.output
    block = json.loads(result.output[result.output.index("DeepSpeed block:") + len("DeepSpeed block:") :])
    assert block["zero_optimization"]["stage"] == 0
