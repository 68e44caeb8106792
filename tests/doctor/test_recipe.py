"""`vlm-rl doctor --config`: a recipe's plan against what the machine has."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import psutil
import pytest
import yaml

from tests.helpers.cards import have_cards
from vlm_rl import cli
from vlm_rl.planning.dry_run import DryRun

RECIPES = Path(__file__).resolve().parents[2] / "configs"
GIB = 2**30


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Check a recipe on a machine of so many GiB without a GPU: exit code, outcomes, and the page."""

    def run(*arguments: str, memory: int, disk: int = 4096) -> tuple[int, dict[str, str], str]:
        state = type("Memory", (), {"available": memory * GIB, "total": memory * GIB})
        monkeypatch.setattr(psutil, "virtual_memory", lambda: state)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Disk", (), {"free": disk * GIB}))
        try:
            code = cli.main(["doctor", "--config", *arguments])
        except SystemExit as stopped:
            code = stopped.code
        page = capsys.readouterr().out
        lines = [line for line in page.splitlines()[:-2] if not line.startswith(" ")]
        return code, {line[5:21].strip(): line.split()[0] for line in lines}, " ".join(page.split())

    return run


def test_a_recipe_that_fits_and_one_that_does_not(outcomes) -> None:
    recipe = str(RECIPES / "virl39k_luspo_7b.yaml")
    names = ["recipe", "update", "rollout", "host memory", "checkpoints"]
    code, known, page = outcomes(recipe, "--ranks", "8", memory=8 * 200)
    assert (code, known) == (0, dict.fromkeys(names, "ok")), page
    code, known, page = outcomes(recipe, "--ranks", "8", memory=8 * 20, disk=100)
    assert (code, known) == (1, dict.fromkeys(names, "OFF") | {"recipe": "ok", "host memory": "ok"}), page
    assert "train.zero_stage=3" in page and "checkpoint.keep_last" in page
    assert outcomes(recipe, "--ranks", "8", memory=50)[1]["host memory"] == "OFF"


def test_an_optimizer_that_deepspeed_keeps_on_the_host_is_counted(outcomes) -> None:
    """32B on 8 ranks, 33,452,718,336 parameters: 20 bytes each, master, moments, the float32 sum of the gradients and
    what the step takes of it."""
    recipe = str(RECIPES / "virl39k_luspo_32b.yaml")
    needed = 20 * 33_452_718_336 / 2**30
    assert outcomes(recipe, "--ranks", "8", memory=needed + 1)[1]["host memory"] == "ok"
    page = outcomes(recipe, "--ranks", "8", memory=needed - 1)[2]
    assert "train.deepspeed.zero_optimization.offload_optimizer.device=none" in page
    assert "async_save" not in page, "it is not set"


def test_the_host_needs_less_where_the_model_is_loaded_in_shards(outcomes, tmp_path: Path) -> None:
    """7B on 8 ranks, each 15.4 GiB whole; in shards an eighth of it, and the largest matrix of 1.02."""
    whole = RECIPES / "virl39k_luspo_7b.yaml"
    shards, copies = tmp_path / "shards.yaml", tmp_path / "copies.yaml"
    shards.write_text(whole.read_text().replace("zero_stage: 2", "zero_stage: 3"))
    copies.write_text(whole.read_text().replace("checkpoint:", "checkpoint:\n  async_save: true"))
    for file, memory, outcome in ((whole, 60, "OFF"), (shards, 60, "ok"), (shards, 20, "OFF")):
        assert outcomes(str(file), "--ranks", "8", memory=memory)[1]["host memory"] == outcome
    assert "2.9 GiB a rank while it loads" in outcomes(str(shards), "--ranks", "8", memory=60)[2]
    page = outcomes(str(copies), "--ranks", "8", memory=60)[2]
    assert "15.4 for what is kept, moved or copied there later" in page and "checkpoint.async_save=false" in page


def test_what_is_said_of_the_host_cannot_contradict_the_verdict(outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    """7B on 8 ranks, of which one or two are here: a rank loads 15.4 GiB, and it is for one or two to share 20."""
    recipe = str(RECIPES / "virl39k_luspo_7b.yaml")
    for cards, free, outcome in ((1, "20.0", "ok"), (2, "10.0", "OFF")):
        have_cards(monkeypatch, cards, 80 * GIB)
        _, known, page = outcomes(recipe, "--ranks", "8", memory=20)
        assert known["host memory"] == outcome, page
        needed, left = re.findall(r"\d+\.\d", page.split("host memory ")[1].split(" free")[0])
        assert (float(needed) > float(left)) == (outcome == "OFF"), page
        assert (needed, left) == ("15.4", free)
        assert ("train.zero_stage=3" in page) == (outcome == "OFF"), "what is short is what the advice is about"


def test_the_numbers_are_those_of_the_dry_run(outcomes, dry: DryRun) -> None:
    _, _, page = outcomes(str(RECIPES / "virl39k_luspo_7b.yaml"), "--ranks", "8", memory=800)
    assert f"{dry.memory.update / GIB:.1f} GiB planned, 100.0 free for each rank" in page
    size = 2 * 2 * dry.num_parameters + 12 * dry.num_parameters  # two bfloat16 copies, master and moments
    assert f"{size / 1e9:.0f} GB each" in page and f"= {4 * size / 1e9:.0f} GB; " in page  # two, the best, a new one


@pytest.fixture(scope="module")
def dry() -> DryRun:
    from vlm_rl.config import load_config
    from vlm_rl.planning.dry_run import dry_run

    return dry_run(load_config(RECIPES / "virl39k_luspo_7b.yaml"), num_ranks=8)


@pytest.mark.parametrize(("card", "update", "rollout"), [(80, "ok", "ok"), (48, "OFF", "OFF"), (24, "OFF", "OFF")])
def test_on_eight_cards(outcomes, monkeypatch: pytest.MonkeyPatch, card: int, update: str, rollout: str) -> None:
    """With 1 GiB taken on each: the update needs 47 GiB; weights and optimizer 27, and the engine .45 of the card."""
    have_cards(monkeypatch, 8, card * GIB, free=(card - 1) * GIB)
    _, known, page = outcomes(str(RECIPES / "virl39k_luspo_7b.yaml"), memory=400)
    assert "on 8 ranks" in page and f"{card - 1}.0 free on each GPU" in page
    assert (known["update"], known["rollout"]) == (update, rollout), page


def test_a_recipe_that_training_would_refuse(outcomes, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text((RECIPES / "virl39k_luspo_7b.yaml").read_text().replace("zero_stage: 2", "zero_stage: 0"))
    code, known, page = outcomes(str(file), memory=200)
    assert (code, known["recipe"], known["update"]) == (1, "OFF", "?"), page
    assert "train.zero_stage" in page


def test_a_disk_is_full_for_the_doctor_where_a_run_would_be_refused(
    outcomes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five milestones, of which four may be moved away."""
    file = tmp_path / "recipe.yaml"
    keys = {
        "out": str(tmp_path / "run"),
        "checkpoint": {"every": 20, "keep_every": 40},
        "eval": {"every": 0},
        "train": {"steps": 200},
    }
    file.write_text(yaml.safe_dump({"extends": str(RECIPES / "virl39k_luspo_7b.yaml"), **keys}))
    seen = set()
    for disk in range(120, 1000, 120):  # GiB, of 133 GB a checkpoint
        _, known, page = outcomes(str(file), "--ranks", "8", memory=800, disk=disk)
        cli.main(["train", str(file), "--dry-run", "--ranks", "8"])
        first = capsys.readouterr().out.splitlines()[0]
        assert (known["checkpoints"] == "OFF") == first.startswith("does not fit on the disk"), (disk, page, first)
        assert ("warning: " in page) == first.startswith("warning: ")
        seen.add((known["checkpoints"], "warning: " in page))
    assert seen == {("OFF", False), ("ok", True), ("ok", False)}
