"""`vlm-rl init`: a recipe that agrees with its set, fits the cards, and trains as it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.images import plain_png
from tests.helpers.prepared_sets import write_problems
from vlm_rl import cli
from vlm_rl.config import Config, load_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.planning.init import _longest_prompt
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

SEVEN_B = "models/Qwen2.5-VL-7B-Instruct"
PIXELS = {"min_pixels": 3136, "max_pixels": 401_408}


def problems(count: int, name: str = "p") -> list[Problem]:
    image = plain_png(84, 84)
    return [Problem(f"{name}{n}", f"<image>\nHow many {n}?", (image,), str(n), "integer") for n in range(count)]


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Config]:
    """Return a function that runs `vlm-rl init` on a set of 300 problems and loads the recipe."""
    write_problems(problems(300), tmp_path / "mine", PIXELS)
    write_problems(problems(4, "held"), tmp_path / "held_out", PIXELS)

    def run(*arguments: str) -> Config:
        file = tmp_path / "recipe.yaml"
        code = cli.main(["init", "--data", str(tmp_path / "mine"), "--out", str(file), *arguments])
        assert code == 0, capsys.readouterr().err
        return load_config(file)

    return run


@pytest.mark.parametrize(
    ("gpus", "gigabytes", "options"), [(8, 80, []), (4, 80, []), (1, 48, ["--lora"]), (1, 24, ["--lora"])]
)
def test_a_recipe_for_7b_fits_the_cards(written, gpus: int, gigabytes: int, options: list[str]) -> None:
    """The same bounds as for the shipped recipes, in tests/planning/test_dry_run.py."""
    config = written("--model", SEVEN_B, "--gpus", str(gpus), "--gpu-memory", str(gigabytes), *options)
    dry, card = dry_run(config, num_ranks=gpus), gigabytes * 1e9
    engine = config.rollout.vllm["gpu_memory_utilization"] * card
    assert dry.memory.update < 0.9 * card
    assert dry.memory.kept + engine < 0.95 * card
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    assert dry.memory.engine_weights + 2**30 + 8 * longest * dry.kv_bytes_per_token < engine
    assert (config.model.lora is not None) == bool(options)


def test_its_sizes_are_the_sets(written, tmp_path: Path, tiny_model: Path, capsys) -> None:
    config = written("--model", str(tiny_model), "--eval", str(tmp_path / "held_out"), "--gpus", "0")
    assert (config.data.min_pixels, config.data.max_pixels) == (3136, 401_408)
    assert config.data.eval and config.eval.every >= 1
    # 300 problems, 8 prompts a step: 38 steps are one pass
    assert (config.rollout.prompts_per_step, config.train.steps, config.train.mini_batch_prompts) == (8, 38, 8)
    # 3 x 3 visual tokens of 28 pixels and the text: counted, not guessed from the largest image, of 512 tokens
    assert 64 < config.data.max_prompt_tokens <= 256
    assert cli.main(["train", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 0


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "internvl", "idefics3"])
def test_the_longest_prompt_is_as_long_as_a_run_builds_it(
    family_model: Callable[[str], Path], model_type: str
) -> None:
    """Also where a model cuts its images into tiles."""
    builder = PromptBuilder(family_model(model_type), template=TEMPLATES["think_answer"], **PIXELS)
    sizes = [(84, 84), (252, 84), (336, 168)]
    some = [Problem(f"p{n}", "<image>\nWhat?", (plain_png(*size),), "1", "integer") for n, size in enumerate(sizes)]
    longest = max(len(builder.build(problem).ids) for problem in some)
    factor = 2 * (builder.patch_size or 14)
    assert _longest_prompt(some, builder, PIXELS["min_pixels"], PIXELS["max_pixels"], factor) == longest


def test_a_dry_run_of_the_recipe_for_7b_passes(written, tmp_path: Path, capsys) -> None:
    written("--model", SEVEN_B, "--gpus", "8")
    said = capsys.readouterr().out
    text = (tmp_path / "recipe.yaml").read_text()
    assert f"#   hf download Qwen/Qwen2.5-VL-7B-Instruct --local-dir {SEVEN_B}\n" in text
    for line in ("--dry-run --ranks 8\n", "torchrun --nproc-per-node 8"):
        assert line in text and line in said
    assert cli.main(["train", str(tmp_path / "recipe.yaml"), "--dry-run", "--ranks", "8"]) == 0


def test_a_recipe_for_four_nodes_starts_on_each_of_them(written, tmp_path: Path, capsys) -> None:
    """An update has two prompts for each of the 32 ranks, as one of 16 has for eight."""
    config = written("--model", SEVEN_B, "--gpus", "32", "--gpu-memory", "80", "--nodes", "4")
    said = capsys.readouterr().out
    command = "torchrun --nproc-per-node 8 --shutdown-timeout 3600 --nnodes 4 --rdzv-backend c10d "
    for text in (said, (tmp_path / "recipe.yaml").read_text()):
        assert command in text and "--dry-run --ranks 32\n" in text and "32 GPUs with 80 GB on 4 nodes" in text
    assert (config.rollout.prompts_per_step, config.train.mini_batch_prompts) == (128, 64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", SEVEN_B, "--gpus", "1", "--gpu-memory", "24"], ["does not fit on 1 GPU with 24 GB", "--lora"]),
        (["--model", "models/Nobody-9B", "--gpus", "1"], ["models/Nobody-9B", "download the model there first"]),
        (["--model", SEVEN_B, "--data", "nowhere"], ["nowhere", "vlm-rl prepare"]),
        (["--model", SEVEN_B, "--gpus", "-1"], ["--gpus -1"]),
        (["--model", SEVEN_B, "--gpus", "30", "--nodes", "4"], ["--nodes 4 --gpus 30"]),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, capsys, arguments: list[str], words: list[str]) -> None:
    write_problems(problems(4), tmp_path / "mine", PIXELS)
    file = tmp_path / "recipe.yaml"
    code = cli.main(["init", "--data", str(tmp_path / "mine"), "--out", str(file), *arguments])
    said = capsys.readouterr().err
    assert code == 2 and all(word in said for word in words), said
    assert not file.exists()


def test_a_recipe_is_not_overwritten(tmp_path: Path, capsys) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    data = write_problems(problems(1), tmp_path / "set", PIXELS)
    arguments = ["--model", SEVEN_B, "--data", str(data), "--out", str(tmp_path / "recipe.yaml")]
    assert cli.main(["init", *arguments]) == 2 and "exists already" in capsys.readouterr().err
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
