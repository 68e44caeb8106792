"""Whether a plan fits on a card, and the settings that would make it fit."""

from pathlib import Path

import pytest

from vlm_rl.cli import main
from vlm_rl.config import load_config
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import ROLLOUT_SHARE, UPDATE_SHARE, fitting_settings, misfits, verdict

RECIPES = Path(__file__).parents[2] / "configs"
RECIPE = RECIPES / "virl39k_luspo_3b.yaml"


@pytest.fixture(scope="module")
def plan() -> DryRun:
    return dry_run(load_config(RECIPE), num_ranks=8)


def test_the_limit_of_each_phase(plan: DryRun) -> None:
    """With the engine's share of .45 a card C holds the update up to .9 C, and what the learner keeps up to .5 C."""
    kept = plan.memory.kept / (ROLLOUT_SHARE - 0.45)
    least = max(plan.memory.update / UPDATE_SHARE, kept)
    assert misfits(plan, 1.001 * least) == []
    assert misfits(plan, 0.999 * least) != []
    assert verdict(plan, 1.001 * least).startswith("fits on a card with ")


def test_with_the_settings_that_it_names_it_fits(plan: DryRun) -> None:
    assert misfits(plan, 24e9)
    said, settings = verdict(plan, 24e9).split("what would, on as many ranks:\n")
    assert said.startswith("does not fit on a card with 24 GB: the update needs ")
    changed = load_config(RECIPE, [line.strip() for line in settings.splitlines()])
    assert misfits(dry_run(changed, num_ranks=8), 24e9) == []


def test_where_nothing_helps(plan: DryRun) -> None:
    assert "larger cards" in verdict(plan, 2e9)


def test_a_share_of_the_engine_alone(plan: DryRun) -> None:
    config = load_config(RECIPE, ["rollout.vllm.gpu_memory_utilization=0.99"])
    [setting] = fitting_settings(dry_run(config, num_ranks=8), 80e9) or []
    assert setting.startswith("rollout.vllm.gpu_memory_utilization=0.")


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(RECIPE), "--dry-run", "--ranks", "8", "--gpu-memory", "80"]) == 0
    assert "\nfits on a card with 80 GB: of 74.5 GiB" in capsys.readouterr().out
    assert main(["train", str(RECIPE), "--dry-run", "--gpu-memory", "0"]) == 2
    assert "--gpu-memory 0" in capsys.readouterr().err
