"""An allocation that fails ends in the plan's numbers and the settings that are left to change."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers.cards import have_cards
from vlm_rl.cli import main
from vlm_rl.config import load_config, load_sft_config
from vlm_rl.devices import OutOfMemoryError
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.planning.fits import Card, fits
from vlm_rl.planning.out_of_memory import is_out_of_memory, memory_advice
from vlm_rl.run.configurations import check_unchanged
from vlm_rl.run.directory import RunDirectory

RECIPE = Path(__file__).parents[2] / "configs" / "virl39k_luspo_7b.yaml"


@pytest.fixture(scope="module")
def failure() -> RuntimeError:
    """Return what torch raises where a CPU has not as much memory: here a pebibyte."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50, dtype=torch.uint8)
    return raised.value


def test_what_is_no_memory(failure: RuntimeError) -> None:
    assert is_out_of_memory(failure)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."))
    assert not is_out_of_memory(RuntimeError("the weights disagree"))


@pytest.fixture
def eight_cards(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that makes this a machine with 8 cards of so many GB."""
    monkeypatch.setenv("WORLD_SIZE", "8")

    def become(gigabytes: float) -> None:
        have_cards(monkeypatch, 8, int(gigabytes * 1e9), free=0)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: Namespace(total=2 * 10**12, available=0))

    return become


def settings_in(said: str) -> list[str]:
    return [line.split("  # ")[0].strip() for line in said.splitlines() if "  # " in line]


def test_where_the_plan_fits_each_setting_says_what_it_saves(failure: RuntimeError, eight_cards) -> None:
    """What the plan left out needs more room: any setting may give it, and none may be one that does not fit."""
    eight_cards(80)
    config = load_config(RECIPE)
    said = memory_advice(config, failure)
    dry = dry_run(config, num_ranks=8)
    assert f"in all {dry.memory.update / 2**30:.1f}" in said
    assert "1125899906842624" in said, "the bytes that were asked for"
    settings = settings_in(said)
    for key in ("train.zero_stage=3", "offload_optimizer", "model.lora", "gpu_memory_utilization"):
        assert any(key in setting for setting in settings)
    for setting in settings:
        assert fits(dry_run(load_config(RECIPE, setting.split()), num_ranks=8), Card.of(80)).ok
    lora = dry_run(load_config(RECIPE, ["model.lora.rank=16"]), num_ranks=8)
    saved = f"saves {(dry.memory.update - lora.memory.update) / 2**30:.1f} GiB in the update"
    assert saved in next(line for line in said.splitlines() if "model.lora" in line)
    fixed = [line for line in said.splitlines() if "; in a new run" in line]
    assert all("model.lora" in line or "rollout.max_tokens" in line for line in fixed) and fixed
    assert "16: " in said.splitlines()[-2] and "resumed" in said.splitlines()[-2]


def test_it_ends_in_the_command_that_continues_in_less_memory(
    failure: RuntimeError, eight_cards, tmp_path: Path
) -> None:
    """In half as long rows, but for a longest response, or else in what the plan says; a resume takes every key."""
    eight_cards(80)
    out = tmp_path / "my run"

    def last(*changes: str) -> str:
        return memory_advice(load_config(RECIPE, [f"out={out}", *changes]), failure).splitlines()[-1]

    assert last() == "Nothing is written yet. Start again with train.micro_batch_tokens=8192"
    out.mkdir()
    (out / "config.yaml").touch()
    start = "torchrun ... --shutdown-timeout 1800 -m vlm_rl train"
    here = f"To continue from the newest checkpoint: {start} '{out}' --resume"
    assert last() == f"{here} train.micro_batch_tokens=8192"
    assert last("rollout.max_tokens=10000") == f"{here} train.micro_batch_tokens=10000"
    assert last("rollout.max_tokens=16384", "data.max_prompt_tokens=100").startswith(f"{here} ")
    assert "micro_batch_tokens" not in last("rollout.max_tokens=16384", "data.max_prompt_tokens=100")
    eight_cards(24)
    settings = last().removeprefix(f"{here} ").split()
    assert fits(dry_run(load_config(RECIPE, settings), num_ranks=8), Card.of(24)).ok
    check_unchanged(out, load_config(RECIPE), load_config(RECIPE, settings))


def test_the_command_repeats_what_the_run_does_not_hold_yet(
    failure: RuntimeError, eight_cards, tmp_path: Path
) -> None:
    """Changes of a resume whose memory ended before they were written, and rows that an update has made shorter."""
    eight_cards(80)
    out = tmp_path / "run"
    RunDirectory(out).create(load_config(RECIPE, [f"out={out}"]))
    changes = ["train.zero_stage=3", "rollout.vllm.compilation_config.mode=0"]
    config = load_config(RECIPE, [f"out={out}", *changes])

    def settings(error: RuntimeError) -> set[str]:
        return {*memory_advice(config, error).splitlines()[-1].partition(" --resume ")[2].split()}

    assert settings(failure) == {*changes, "train.micro_batch_tokens=8192"}
    longest = OutOfMemoryError("CUDA out of memory.", row_tokens=4096)
    assert settings(longest) > {*changes, "train.micro_batch_tokens=4096"}, "and what takes less"


def test_a_supervised_run_continues_with_its_own_command(failure: RuntimeError, tmp_path: Path) -> None:
    config = load_sft_config(RECIPE.parent / "sft" / "cold_start_7b.yaml", [f"out={tmp_path}"])
    (tmp_path / "sft.yaml").touch()
    said = memory_advice(config, failure).splitlines()[-1]
    assert said.startswith(f"To continue from the newest checkpoint: vlm-rl sft {tmp_path} --resume ")


def test_where_the_plan_does_not_fit_it_names_what_would(failure: RuntimeError, eight_cards) -> None:
    eight_cards(24)
    said = memory_advice(load_config(RECIPE), failure)
    assert "That does not fit on a card with 24 GB: the update needs 47.3 GiB" in said
    words = [word for setting in settings_in(said) for word in setting.split()]
    assert fits(dry_run(load_config(RECIPE, words), num_ranks=8), Card.of(24)).ok


def test_what_is_set_already_is_not_named(failure: RuntimeError, eight_cards) -> None:
    eight_cards(80)
    said = memory_advice(load_config(RECIPE, ["model.gradient_checkpointing=true", "train.zero_stage=3"]), failure)
    assert "gradient_checkpointing" not in said and "zero_stage" not in said
    served = ["rollout.sampler=server", "rollout.servers=[http://a:1]"]
    assert "gpu_memory" not in memory_advice(load_config(RECIPE, served), failure), "no engine is here"
    first = settings_in(memory_advice(load_config(RECIPE, ["train.zero_stage=1"]), failure))
    assert not any("offload_optimizer" in each and "zero_stage" not in each for each in first), "ZeRO 1 takes none"


def test_every_command_that_loads_a_model_ends_with_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: RuntimeError
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("vlm_rl.session.sft.sft", fail)
    monkeypatch.setattr("vlm_rl.session.preflight.preflight_sft", lambda config, *, resume: config)
    assert main(["sft", str(RECIPE.parent / "sft" / "cold_start_7b.yaml")]) == 2
    said = capsys.readouterr().err
    assert "data.max_response_tokens=" in said and "rollout." not in said
    monkeypatch.setattr("vlm_rl.evaluation.command.evaluate_sets", fail)
    monkeypatch.setattr("vlm_rl.session.preflight.preflight_eval", lambda model, *_, **__: model)
    assert main(["eval", "--model", "m", "--data", "d", "--out", "o"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vlm-rl: out of memory: DefaultCPUAllocator") and "--max-tokens" in said


def test_the_command_ends_with_it(monkeypatch: pytest.MonkeyPatch, capsys, failure: RuntimeError) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("vlm_rl.train.train", fail)
    monkeypatch.setattr("vlm_rl.session.preflight.preflight", lambda config, *, resume: config)
    assert main(["train", str(RECIPE)]) == 2
    assert capsys.readouterr().err.startswith("vlm-rl: out of memory: DefaultCPUAllocator")
