"""An allocation that fails ends in the plan's numbers and the settings that are left to change."""

from pathlib import Path

import pytest
import torch

from vlm_rl.cli import main
from vlm_rl.config import load_config
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.planning.out_of_memory import is_out_of_memory, memory_advice

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


def test_the_plan_and_what_is_left_to_change(failure: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = load_config(RECIPE, ["model.gradient_checkpointing=true", "train.zero_stage=3"])
    said = memory_advice(config, failure)
    assert f"in all {dry_run(config, num_ranks=8).memory.update / 2**30:.1f}" in said
    assert "1125899906842624" in said, "the bytes that were asked for"
    assert "gradient_checkpointing" not in said and "zero_stage" not in said, "both are set"
    for setting in [line.split("  # ")[0].strip() for line in said.splitlines() if "  # " in line]:
        assert load_config(RECIPE, [setting]) != load_config(RECIPE)
    first = memory_advice(load_config(RECIPE, ["train.zero_stage=1"]), failure)
    assert "train.zero_stage=2" in first and "offload_optimizer" not in first, "which ZeRO 1 does not take"
    for key in ("offload_optimizer", "model.lora", "gpu_memory_utilization", "rollout.max_tokens="):
        assert key in said
    served = ["rollout.sampler=server", "rollout.servers=[http://a:1]"]
    assert "gpu_memory" not in memory_advice(load_config(RECIPE, served), failure), "no engine is here"


def test_every_command_that_loads_a_model_ends_with_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: RuntimeError
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("vlm_rl.learner.sft_run.sft", fail)
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
