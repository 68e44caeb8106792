"""Runs of families as a user makes them: dry run, training, checkpoint, evaluation, a question in the demo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.families import TILED_FAMILIES, VISION_FAMILIES
from tests.helpers.family_rows import WITH_EXPERTS, response_logp
from tests.helpers.groups import load_reference
from tests.helpers.prepared_sets import write_problems
from tests.helpers.rotation import todays
from tests.helpers.toy_runs import Toys, toy_problem
from tests.helpers.videos import SHORT, video_problem
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import load_set
from vlm_rl.demo.live.backends import AskableCheckpoint, load_checkpoint
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

ROUNDING = 1e-5  # of a log-prob in float32
COIN = {"overlong_buffer": 8, "coin": 1.0}  # decides the reward, so that there is something to learn from


@pytest.fixture(scope="module")
def seen(toys: Toys, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return prepared sets of images, and of images and videos."""
    images = [toy_problem(index, "train", 4) for index in range(4)]
    videos = [video_problem(SHORT), video_problem([0, 2], SHORT)]
    folder = tmp_path_factory.mktemp("seen")
    return {
        "images": write_problems(images, folder / "images"),
        "videos": write_problems([*images[:2], *videos], folder / "videos"),
    }


VISION_RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # type -> what it sees, and settings of its model
    "qwen3_vl": ("videos", {"freeze": ["tower", "merger"], "gradient_checkpointing": True}),
    "gemma3": ("images", {"freeze": ["tower"]}),
    "glm4v": ("images", {}),
    "idefics3": ("images", {}),
    "internvl": ("images", {}),
    "qwen3_5": ("images", {"gradient_checkpointing": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", todays(VISION_RUNS, days=3))
def test_a_run_of_a_vision_model(
    model_type: str, toys: Toys, seen: dict[str, Path], family_model: Callable[[str], Path]
) -> None:
    """Videos, and only the language model trained; families that cut images into tiles, whose checkpoints vLLM opens.

    Linear attention, checkpointed. Each run is resumed.
    """
    kind, settings = VISION_RUNS[model_type]
    model, data = family_model(model_type), seen[kind]
    train = {"mini_batch_prompts": 2, "micro_batch_tokens": 300, "lr": 1e-3, "zero_stage": 2}
    changes = {
        "model": {"path": str(model), **settings},
        "data": {"train": [str(data)], "max_prompt_tokens": 300},
        "reward": COIN,
        "checkpoint": {"every": 1},
    }
    planned = toys.runner("train", toys.config(model_type, train={**train, "steps": 1}, **changes), "--dry-run")
    assert planned.code == 0, planned.output[-2000:]
    assert "tower" in planned.output and ("(frozen)" in planned.output) == ("freeze" in settings)
    toys.train_run(model_type, train={**train, "steps": 1}, **changes)
    resumed = toys.runner("train", toys.config(model_type, train={**train, "steps": 2}, **changes), "--resume")
    assert resumed.code == 0, resumed.output[-2000:]
    run = toys.run(model_type)
    assert [record["attempt"] for record in run.metrics()] == [1, 2]
    assert all(0 < record["rollout/logprob_gap"] < ROUNDING for record in run.metrics())

    checkpoint = run.checkpoints()[-1][1]
    before, after = (dict(load_reference(path).named_parameters()) for path in (model, checkpoint))
    parts = {name: SUPPORTED[model_type].part_of(name) for name in before}
    frozen = set(settings.get("freeze", ()))
    assert {parts[name] for name in before if not torch.equal(before[name], after[name])} == {
        *parts.values()
    } - frozen

    out = toys.folder / f"eval-{model_type}"
    engine = "vllm" if model_type in ("glm4v", *TILED_FAMILIES) and find_spec("vllm") else "transformers"
    words = ["eval", "--model", checkpoint, "--data", data, "--out", out, "--sampler", engine]
    scored = toys.runner(*words, "--max-tokens", "8", "--max-prompt-tokens", "300")
    assert scored.code == 0, scored.output[-2000:]
    (result,) = RunDirectory(out).evals()
    rows = result.rows(["question", "image", "image_sizes"]).to_pylist()
    assert [len(row["image"]) for row in rows] == [len(row["image_sizes"]) for row in rows]
    assert any("<image> came [video: frames at 0.5, 0.7, 1 s]" in row["question"] for row in rows) == (
        kind == "videos"
    )

    asked = AskableCheckpoint(model_type, checkpoint, "", TEMPLATES["think_answer"], 3136, 1_003_520)
    loaded = load_checkpoint(asked, engine="transformers", max_tokens=8)
    prompt = loaded.builder.build(load_set(data)[-1])
    greedy = SamplingParams(temperature=0, max_tokens=8, responses=1)
    assert list(loaded.sampler.stream(SampleRequest([prompt], greedy, seed=0, step=0)))
    loaded.close()


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a prepared set of text."""
    problems = [Problem(f"sum-{n}", f"What is {n} + 1?", (), str(n + 1), "integer") for n in range(8)]
    return write_problems(problems, tmp_path_factory.mktemp("sets") / "sums", {})


@pytest.mark.slow
@pytest.mark.parametrize("model_type", todays(["gemma3_text", "qwen3_moe"], days=2))
def test_a_run_of_a_text_model(model_type: str, toys: Toys, sums: Path, family_model: Callable[[str], Path]) -> None:
    """Windows, and experts whose routing is replayed."""
    model = family_model(model_type)
    train = {"steps": 2, "mini_batch_prompts": 4, "micro_batch_tokens": 300, "lr": 1e-3, "zero_stage": 2}
    changes = {"model": {"path": str(model)}, "data": {"train": [str(sums)]}, "reward": COIN, "train": train}
    has_experts = model_type != "gemma3_text"
    if has_experts:
        changes["rollout"] = {"replay_routing": True}
    planned = toys.runner("train", toys.config(model_type, **changes), "--dry-run")
    assert planned.code == 0, planned.output[-2000:]
    assert ("rows       padded" in planned.output) == SUPPORTED[model_type].padded
    run = toys.train_run(model_type, **changes)
    assert all(0 < record["rollout/logprob_gap"] < ROUNDING for record in run.metrics())
    assert all(record.get("router/replaced") == (0 if has_experts else None) for record in run.metrics())

    (_, checkpoint), *_ = run.checkpoints()
    before, after = (dict(load_reference(path).named_parameters()) for path in (model, checkpoint))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)

    out = toys.folder / f"eval-{model_type}"
    words = ["eval", "--model", checkpoint, "--data", sums, "--out", out, "--sampler", "transformers"]
    scored = toys.runner(*words, "--max-tokens", "8", "--max-prompt-tokens", "160")
    assert scored.code == 0, scored.output[-2000:]
    assert (out / "eval" / sums.name).is_dir()


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return prepared sets with responses to learn: for models with a tower, of images too, and for those without."""
    responses = ["<think>one</think>", "\\boxed{3}", "<think>one, two</think>\\boxed{2}", "<answer>4</answer>"]
    texts = [Problem(f"sum-{n}", f"What is {n} + 1?", (), str(n + 1), "integer") for n in range(4)]
    images = [toy_problem(index, "train", 2) for index in range(2)]
    folder = tmp_path_factory.mktemp("answered")
    return {
        sees: write_problems(
            [replace(p, meta={"response": text}) for p, text in zip(problems, responses, strict=True)],
            folder / ("images" if sees else "texts"),
        )
        for sees, problems in ((True, [*images, *texts[2:]]), (False, texts))
    }


def held_out_loss(folder: Path, data: Path) -> float:
    """Return the loss of the unmodified model in a folder on a set's responses, each alone behind its prompt."""
    model: Any = load_reference(folder)
    builder, logps = PromptBuilder(folder, template=TEMPLATES["think_answer"]), []
    for problem in load_set(data):
        response = builder.encode_response(problem.meta["response"])
        with torch.no_grad():
            logps.append(response_logp(model, builder.build(problem), response))
    return -float(torch.cat(logps).mean())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", todays(SUPPORTED, days=4))
def test_every_family_is_fine_tuned_and_exported(
    model_type: str, toys: Toys, answered: dict[bool, Path], family_model: Callable[[str], Path]
) -> None:
    """Transformers' own model of the exported folder has the held-out loss that the run says."""
    model, data, out = family_model(model_type), answered[model_type in VISION_FAMILIES], toys.folder / model_type
    tree = {
        "out": str(out / "sft"),
        "model": {"path": str(model)},
        "data": {"train": [str(data)], "eval": [str(data)], "max_prompt_tokens": 300, "max_response_tokens": 40},
        "train": {"steps": 2, "mini_batch_prompts": 4, "micro_batch_tokens": 400, "lr": 3e-3, "zero_stage": 2},
        "eval": {"every": 2},
    }
    out.mkdir()
    file = out / "sft.yaml"
    file.write_text(yaml.safe_dump(tree))
    learned = toys.runner("sft", file)
    assert learned.code == 0, learned.output[-3000:]
    exported = toys.runner("export", out / "sft", "--out", out / "model")
    assert exported.code == 0, exported.output[-3000:]
    first, last = RunDirectory(out / "sft", config_file=SFT_CONFIG).metrics()
    assert first["loss"] == pytest.approx(held_out_loss(model, data), rel=ROUNDING)
    after = last[f"heldout_loss/{data.name}"]
    assert after < first["loss"] and after == pytest.approx(held_out_loss(out / "model", data), rel=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", todays(SUPPORTED, days=8))
def test_every_family_trains_adapters_in_shards_on_a_gpu(
    model_type: str, toys: Toys, seen: dict[str, Path], sums: Path, family_model: Callable[[str], Path]
) -> None:
    """A pretended one: loaded in shards, adapters, KL to their base, weights streamed and proven, and resumed."""
    data = seen["images"] if model_type in VISION_FAMILIES else sums
    lora: dict[str, Any] = {"rank": 4}
    if model_type in WITH_EXPERTS:
        lora["targets"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    settings: dict[str, Any] = {
        "model": {"path": str(family_model(model_type)), "dtype": "float32", "lora": lora},
        "data": {"train": [str(data)], "max_prompt_tokens": 300},
        "algorithm": {"name": "grpo", "kl_coef": 0.01},
        "reward": COIN,
        "checkpoint": {"every": 1},
    }
    train = {"mini_batch_prompts": 4, "micro_batch_tokens": 500, "lr": 1e-3, "zero_stage": 3}
    name, on_gpu = f"gpu-{model_type}", {"faults": {"pretend_gpu": {}}}
    for steps, more in ((1, ()), (2, ("--resume",))):
        config = toys.config(name, **settings, train={**train, "steps": steps})
        result = toys.runner("train", config, *more, **on_gpu)
        assert result.code == 0, result.output[-3000:]
    records = toys.run(name).metrics()
    assert [record["attempt"] for record in records] == [1, 2]
    assert all(0 < record["rollout/logprob_gap"] < ROUNDING and record["grad_norm"] > 0 for record in records)
