"""Whole runs that train adapters: their checkpoints, what opens them, a resume, and `vlm-rl export`."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.helpers.prepared_sets import write_problems
from tests.helpers.toy_runs import Toys, assert_equal_runs, assert_sound
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import load_set
from vlm_rl.demo.live.backends import AskableCheckpoint, load_checkpoint
from vlm_rl.model_files.adapters import load_merged
from vlm_rl.model_files.weights import weights_sha256
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.fingerprint import fingerprint
from vlm_rl.templates import TEMPLATES

ADAPTERS = {"lora": {"rank": 4, "alpha": 8}, "gradient_checkpointing": True}
OF_PROCESSOR = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "processor_config.json"}
OF_ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "base_model.json"}


pytestmark = pytest.mark.slow  # tests/learner/test_lora.py has the quick ones


@pytest.fixture(scope="module")
def base(toys: Toys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the toy policy, which tests may change and change back."""
    return shutil.copytree(toys.model, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def changes(toys: Toys, base: Path) -> dict[str, Any]:
    """Return a run's settings: adapters, a KL term, evaluations and checkpoints at 2 and 4."""
    return {
        "model": {"path": str(base), **ADAPTERS},
        "algorithm": {"name": "grpo", "kl_coef": 0.05},
        "data": {"eval": [str(toys.heldout)]},
        "eval": {"every": 2},
        "train": {"lr": 1e-2},
    }


@pytest.fixture(scope="module")
def run(toys: Toys, changes: dict[str, Any]) -> RunDirectory:
    return toys.train_run("lora", **changes)


@pytest.fixture(scope="module")
def checkpoint(run: RunDirectory) -> Path:
    return run.checkpoints()[-1][1]


@contextmanager
def changed_weights(base: Path) -> Iterator[None]:
    """Change one weight of the base model, and change it back."""
    weights = base / "model.safetensors"
    before = weights.read_bytes()
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    model.save_pretrained(base)
    try:
        yield
    finally:
        weights.write_bytes(before)


def checksum(folder: Path) -> str:
    """Return the checksum of a whole model's weights, as an evaluation notes the one of the sync before it."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return f"{fingerprint(model.named_parameters()).checksum:016x}"


def test_a_checkpoint_holds_the_adapters_alone(run: RunDirectory, checkpoint: Path, base: Path) -> None:
    assert {path.name for path in checkpoint.iterdir()} == OF_ADAPTER | OF_PROCESSOR | {
        "MANIFEST.json",
        "config.json",
        "generation_config.json",
        "learner",
    }
    said = json.loads((checkpoint / "base_model.json").read_text())
    assert said == {"path": str(base.resolve()), "weights_sha256": weights_sha256(base)}
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.suffix in (".safetensors", ".pt"))
    assert size < 0.2 * (base / "model.safetensors").stat().st_size
    assert (checkpoint / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()


def test_every_step_trains_and_syncs(run: RunDirectory) -> None:
    """Every sync proved that the sampler had the merged weights, and every update that both give these log-probs."""
    records = run.metrics()
    assert all(record["grad_norm"] > 0 for record in records)
    assert all(record["rollout/logprob_gap"] < 1e-5 for record in records)
    assert records[0]["kl"] < records[-1]["kl"]
    weights = [result.summary["weights"] for result in run.evals()]
    assert len(set(weights)) == 3


def test_killed_in_an_evaluation_and_resumed(toys: Toys, changes: dict[str, Any], run: RunDirectory) -> None:
    """SIGKILL after two answers of the evaluation at step 2; resumed, it equals the whole run bit for bit."""
    config = toys.config("lora-killed", **changes)
    killed = toys.runner("train", str(config), faults={"kill_after_answers": {"number": 4 + 2}})
    assert killed.code == -signal.SIGKILL, killed.output[-3000:]
    assert [step for step, _ in toys.run("lora-killed").checkpoints()] == [2]
    resumed = toys.runner("train", str(config), "--resume")
    assert resumed.code == 0, resumed.output[-3000:]
    assert "(step 3 of 4 is next)" in resumed.output
    assert_equal_runs(toys.run("lora-killed"), run)
    assert_sound(toys.run("lora-killed"))


def test_eval_gives_the_numbers_of_the_training(toys: Toys, run: RunDirectory, checkpoint: Path) -> None:
    out = toys.folder / "lora-eval"
    words = ["--model", checkpoint, "--data", toys.heldout, "--out", out, "--seed", 3, "--max-tokens", 14]
    result = toys.runner("eval", *words, "--sampler", "transformers", "--max-prompt-tokens", "160")
    assert result.code == 0, result.output[-3000:]
    (again,) = RunDirectory(out).evals()
    assert again.rows().to_pylist() == run.evals()[-1].rows().to_pylist()


def test_the_demo_opens_a_checkpoint(run: RunDirectory, checkpoint: Path) -> None:
    asked = AskableCheckpoint("lora 4", checkpoint, "lora-4", TEMPLATES["think_answer"], 3136, 1_003_520)
    loaded = load_checkpoint(asked, engine="transformers", max_tokens=8)
    try:
        held = f"{loaded.sampler.fingerprint({}).checksum:016x}"
    finally:
        loaded.close()
    assert held == run.evals()[-1].summary["weights"]


def test_another_base_model_is_refused_by_name(
    toys: Toys, changes: dict[str, Any], run: RunDirectory, checkpoint: Path, base: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    with changed_weights(base):
        resumed = toys.runner("train", str(run.path), "--resume")
        exported = toys.runner("export", checkpoint, "--merge", "--out", toys.folder / "never")
    for result in (resumed, exported):
        assert result.code == 2, result.output[-3000:]
        assert f"{checkpoint.name} was trained on the weights {weights_sha256(base)[:12]} of {base}" in result.output
        assert "Traceback" not in result.output
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    assert not (toys.folder / "never").exists()


def test_training_does_not_start_from_an_adapter(toys: Toys, checkpoint: Path) -> None:
    result = toys.runner("train", str(toys.config("from-adapter", model={"path": str(checkpoint)})))
    assert result.code == 2, result.output[-3000:]
    assert f"{checkpoint} holds an adapter, and training starts from a whole model: merge it first" in result.output
    assert not toys.run("from-adapter").path.exists()


# -- export ----------------------------------------------------------------------------------------


def test_a_merged_export_has_the_learners_weights(toys: Toys, run: RunDirectory, base: Path) -> None:
    out = toys.folder / "merged"
    result = toys.runner("export", run.path / "4", "--merge", "--out", out)
    assert result.code == 0, result.output[-3000:]
    assert {path.name for path in out.iterdir()} == OF_PROCESSOR | {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert checksum(out) == run.evals()[-1].summary["weights"]  # of the learner's stream at step 4
    assert (out / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    card = (out / "README.md").read_text()
    accuracy = run.evals()[-1].summary["accuracy"]
    for line in ("# lora, step 4", "- train", "| algorithm | grpo |", f"| heldout | 4 | 4 | {accuracy:.3f} |"):
        assert line in card
    assert "CONTAMINATED" not in card and str(toys.folder) not in card


def test_an_export_without_merge_is_the_adapter(toys: Toys, run: RunDirectory, checkpoint: Path) -> None:
    out = toys.folder / "adapter"
    result = toys.runner("export", checkpoint, "--out", out)
    assert result.code == 0, result.output[-3000:]
    assert {path.name for path in out.iterdir()} == OF_ADAPTER | OF_PROCESSOR | {
        "README.md",
        "config.json",
        "generation_config.json",
    }
    for name in OF_ADAPTER | OF_PROCESSOR:
        assert (out / name).read_bytes() == (checkpoint / name).read_bytes()
    assert "library_name: peft" in (out / "README.md").read_text()


@pytest.fixture(scope="module")
def whole_run(toys: Toys) -> RunDirectory:
    """Return a run of one step without adapters, marked as trained on a benchmark."""
    run = toys.train_run("whole-weights", train={"steps": 1})
    run.stamp_contaminated(["MathVista"])
    return run


def test_a_full_checkpoint_is_copied(toys: Toys, whole_run: RunDirectory) -> None:
    out = toys.folder / "copied"
    result = toys.runner("export", whole_run.path, "--merge", "--out", out)
    assert result.code == 0, result.output[-3000:]
    ((_, folder),) = whole_run.checkpoints()
    for name in OF_PROCESSOR | {"model.safetensors"}:
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert {path.name for path in out.iterdir()} == OF_PROCESSOR | {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert "use_cache" not in json.loads((out / "config.json").read_text())
    assert "**CONTAMINATED: trained on rows of MathVista;" in (out / "README.md").read_text()


def test_what_cannot_be_exported_is_refused(toys: Toys, run: RunDirectory) -> None:
    taken = toys.folder / "taken"
    taken.mkdir()
    (taken / "file").touch()
    for words, message in (
        ((run.path / "7", "--out", toys.folder / "x"), "has no checkpoint of step 7: it has 2, 4"),
        ((toys.folder / "nowhere", "--out", toys.folder / "x"), f"no run directory at {toys.folder / 'nowhere'}"),
        ((run.path, "--out", taken), f"{taken} exists and is not an empty folder"),
    ):
        result = toys.runner("export", *words)
        assert result.code == 2 and message in result.output, result.output[-3000:]
    assert not (toys.folder / "x").exists()


# -- the fast engine, several ranks -------------------------------------------------------------------


@pytest.mark.turn(0, days=2)
def test_two_ranks_with_sharded_weights_feed_the_fast_engine(toys: Toys, changes: dict[str, Any]) -> None:
    """ZeRO 3: each merged weight is gathered, streamed, and proved to be what vLLM computes with.

    The engines of the two ranks have unequal work: three problems of an evaluation, and responses of any length.
    """
    pytest.importorskip("vllm")
    three = write_problems(load_set(toys.heldout)[:3], toys.folder / "three", {})
    settings = changes | {"rollout": {"sampler": "vllm"}, "train": {"lr": 1e-2, "zero_stage": 3, "steps": 2}}
    config = toys.config("lora-vllm", **settings | {"data": {"eval": [str(three)]}})
    done = toys.runner("train", config, ranks=2)
    assert done.code == 0, done.output[-3000:]
    run = toys.run("lora-vllm")
    assert all(record["rollout/logprob_gap"] < 1e-5 for record in run.metrics())
    (_, folder) = run.checkpoints()[-1]
    out = toys.folder / "lora-vllm-merged"
    assert toys.runner("export", folder, "--merge", "--out", out).code == 0
    assert checksum(out) == run.evals()[-1].summary["weights"]


def test_vllm_opens_the_adapter(run: RunDirectory, checkpoint: Path, base: Path) -> None:
    """By its own LoRA it gives the log-probs of the merged model, and without the adapter those of the base model."""
    vllm = pytest.importorskip("vllm")
    from vllm.lora.request import LoRARequest

    builder = PromptBuilder(base, template=TEMPLATES["think_answer"])
    options = {"enable_lora": True, "max_lora_rank": 8}
    sampler: Any = make_sampler(
        "vllm",
        EngineSettings(
            model_path=str(base),
            builder=builder,
            max_model_len=256,
            batch_size=2,
            dtype=torch.float32,
            vllm_options=options,
        ),
    )
    ids = builder.tokenizer.encode("How many red squares are there? Think first.")
    params = vllm.SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    models = {None: AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)}
    models[LoRARequest("lora", 1, str(checkpoint))] = load_merged(checkpoint)
    given = []
    try:
        for request, model in models.items():
            (output,) = sampler._llm.generate({"prompt_token_ids": ids}, params, lora_request=request, use_tqdm=False)
            tokens = list(output.outputs[0].token_ids)
            given.append(
                [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
            )
            with torch.no_grad():
                logits_RV = model(input_ids=torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
            logits_RV[:, builder.banned_ids] = -torch.inf  # as the engine's model has them
            expected = logits_RV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(given[-1]), expected, atol=1e-4, rtol=0)
    finally:
        sampler.close()
    assert given[0] != given[1]


def test_eval_merges_a_checkpoint_into_the_fast_engine(toys: Toys, checkpoint: Path) -> None:
    """It starts only if the engine then holds the merged weights, by their checksum."""
    pytest.importorskip("vllm")
    out = toys.folder / "lora-eval-vllm"
    words = ["--model", checkpoint, "--data", toys.heldout, "--out", out, "--max-tokens", 14]
    result = toys.runner("eval", *words, "--sampler", "vllm", "--max-prompt-tokens", "160")
    assert result.code == 0, result.output[-3000:]
    assert len(RunDirectory(out).evals()) == 1
