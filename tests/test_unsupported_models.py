"""A model that is not supported gives one message in every command, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from tests.helpers.images import noise_png
from tests.helpers.odd_models import TEXT_MODELS, VISION_MODELS, save_odd
from tests.helpers.prepared_sets import write_problems
from vlm_rl import cli
from vlm_rl.config import TrainConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.demo.live.backends import AskableCheckpoint, load_checkpoint
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import naming_untested
from vlm_rl.learner.sft import warm_start
from vlm_rl.model_files.model_folder import open_config
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return a prepared set of text, and one with images under True."""
    folder = tmp_path_factory.mktemp("sets")
    plain = [Problem(f"p{n}", f"What is {n} + 1?", (), str(n + 1), "integer") for n in range(4)]
    pictures = [Problem(f"p{n}", "<image>How many?", (noise_png(84, 84, n),), "1", "integer") for n in range(4)]
    return {
        False: write_problems(plain, folder / "text", {}),
        True: write_problems(pictures, folder / "images", {}),
    }


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail as a user's mistake, and return its message."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert cli.main([str(argument) for argument in arguments]) == 2
        (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vlm-rl: ")]
        return message

    return run


@pytest.mark.parametrize("model_type", [*TEXT_MODELS, *VISION_MODELS])
def test_an_unsupported_model_gives_one_message(
    model_type: str, tiny_model: Path, sets: dict[bool, Path], tmp_path: Path, refusal: Callable[..., str]
) -> None:
    model = save_odd(tmp_path / "model", model_type, tiny_model)
    data = sets[model_type in VISION_MODELS]
    config = tmp_path / "config.yaml"
    config.write_text(
        f"out: {tmp_path / 'run'}\nmodel: {{path: {model}}}\n"
        f"data: {{train: [{data}], max_prompt_tokens: 256, template: plain}}\n"
        "rollout: {prompts_per_step: 2, responses_per_prompt: 2, max_tokens: 8}\nreward: {overlong_buffer: 4}\n"
        "train: {steps: 1, mini_batch_prompts: 2, micro_batch_tokens: 512}\n"
    )
    asked = f"type '{model_type}'"
    for engine in ("transformers", "vllm"):
        assert asked in refusal("train", config, f"rollout.sampler={engine}")
    dry_run = refusal("train", config, "--dry-run")
    assert asked in dry_run or model_type == "mamba2"  # whose infinite limit of the time step only its file can hold
    if model_type != "gpt2":  # which the samplers can run
        command = ("eval", "--model", model, "--data", data, "--out", tmp_path / "eval", "--template", "plain")
        for engine in ("transformers", "vllm"):
            assert asked in refusal(*command, "--sampler", engine)
    with pytest.raises(UserError, match=asked):
        builder = PromptBuilder(model, template=TEMPLATES["plain"])
        warm_start([], tmp_path / "sft", model_path=model, builder=builder, config=TrainConfig(), batch_size=1)
    assert not (tmp_path / "run").exists() and not (tmp_path / "eval").exists() and not (tmp_path / "sft").exists()


@pytest.mark.parametrize("model_type", ["qwen2_5_omni", "qwen3_omni_moe", "qwen2_audio", "gemma3n"])
def test_a_model_that_reads_audio_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    """Whether audio is beside images, below a part of its own, or all that there is."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"models of type '{model_type}' read audio, which is not supported"):
        open_config(str(tmp_path))


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_what_padded_rows_cannot_compute_gives_one_message(
    model_type: str, tiny_model: Path, sets: dict[bool, Path], tmp_path: Path, refusal: Callable[..., str]
) -> None:
    """Models of states alone, whose classes know neither sdpa nor positions, and which state a context here."""
    model = save_odd(tmp_path / "model", model_type, tiny_model)
    tree = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(tree | {"max_position_embeddings": 512}))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"out: {tmp_path / 'run'}\nmodel: {{path: {model}, rows: padded}}\n"
        f"data: {{train: [{sets[False]}], max_prompt_tokens: 256, template: plain}}\n"
        "rollout: {prompts_per_step: 2, responses_per_prompt: 2, max_tokens: 8, sampler: transformers}\n"
        "reward: {overlong_buffer: 4}\ntrain: {steps: 1, mini_batch_prompts: 2, micro_batch_tokens: 512}\n"
    )
    said = refusal("train", config)
    assert f"a model of type '{model_type}' cannot be trained here" in said and "failed in padded rows" in said


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    config = SimpleNamespace(model_type="qwen2_5_vl")
    with pytest.raises(TypeError), naming_untested(config):
        raise TypeError("ours")


def test_the_demo_refuses_a_model_without_a_context(tiny_model: Path, tmp_path: Path) -> None:
    model = save_odd(tmp_path / "model", "mamba", tiny_model)
    asked = AskableCheckpoint("m", model, key="", template=TEMPLATES["plain"], min_pixels=3136, max_pixels=3136)
    with pytest.raises(UserError, match="type 'mamba'"):
        load_checkpoint(asked, engine="transformers", max_tokens=8)
