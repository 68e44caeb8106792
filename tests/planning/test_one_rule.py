"""Init, the dry run and doctor give one answer on every card, that of `vlm_rl.planning.fits`."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.cards import have_cards
from tests.helpers.recipes import RECIPES
from tests.helpers.rotation import todays
from vlm_rl.cli import main
from vlm_rl.config import Config, load_config, parse_config
from vlm_rl.doctor.recipe import RecipeUnderTest, rollout, update
from vlm_rl.errors import UserError
from vlm_rl.model_files.model_folder import is_shipped
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import Card, fits
from vlm_rl.planning.init import _FIXED, _RESPONSE_TOKENS, DataFacts, Machine, _recipe, fitting_recipe
from vlm_rl.planning.page import print_dry_run
from vlm_rl.planning.remedies import reduced_by

CARDS, RANKS = (16, 24, 40, 48, 80, 141), (1, 2, 4, 8, 16)
CASES = [(gigabytes, ranks) for gigabytes in CARDS for ranks in RANKS]
CONFIGS = {path.stem: config for path in RECIPES if is_shipped((config := load_config(path)).model.path)}


def trained(config: Config) -> tuple[str, bool]:
    """Return the model, and whether it gets adapters."""
    return config.model.path, config.model.lora is not None


MODELS = {trained(CONFIGS[name]): name for name in reversed(CONFIGS)}.values()  # a recipe for each
QUICK = ("virl39k_luspo_7b_servers", "virl39k_luspo_32b")


def what_fits(shown: str) -> bool:
    """Tell what a dry run printed: whether the run fits on a card."""
    [said] = re.findall(r"^(fits|does not fit) on a card with", shown, re.MULTILINE)
    return said == "fits"


def cases(names: Iterable[str]) -> list[Any]:
    """Return test cases, each a recipe and the cards and ranks to walk.

    Of a quick recipe they are a third. Among the slow tests are all of a quick one's, and a third of another's; a
    third of these tests has its turn each day.
    """
    names = [*names]
    thirds = {name: CASES[sum(name.encode()) % 3 :: 3] for name in names}
    slow = [
        pytest.param(n, CASES if n in QUICK else thirds[n], id=f"{n}-slow", marks=pytest.mark.slow) for n in names
    ]
    return [*(pytest.param(name, thirds[name], id=name) for name in names if name in QUICK), *todays(slow, days=3)]


def dry_on(config: Config, ranks: int) -> DryRun | None:
    """Return the plan; None where the ranks form no whole engines."""
    try:
        return dry_run(config, num_ranks=ranks)
    except UserError:
        return None


@pytest.mark.parametrize(("name", "walked"), cases([*MODELS, "virl39k_luspo_7b_servers"]))
def test_doctor_finds_on_a_machine_what_the_dry_run_says_of_its_cards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, walked: Iterable[tuple[int, int]]
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Namespace(total=10**14, available=10**14))
    path = next(path for path in RECIPES if path.stem == name)
    for gigabytes, ranks in walked:
        if (dry := dry_on(CONFIGS[name], ranks)) is None:
            continue
        have_cards(monkeypatch, ranks, int(gigabytes * 1e9))
        subject = RecipeUnderTest(path, num_ranks=ranks)
        off = [check for check in (update(subject), rollout(subject)) if check.outcome == "off"]
        fit = fits(dry, Card.of(gigabytes))
        assert fit.ok == (not off), (gigabytes, ranks, off, fit.faults)
        assert main(["train", str(path), "--dry-run", "--ranks", f"{ranks}", "--gpu-memory", f"{gigabytes}"]) == 0
        shown = capsys.readouterr().out
        assert what_fits(shown) == fit.ok and fit.faults in shown, (gigabytes, ranks, shown)
        for check in off:
            assert check.detail.split("; ")[0] in fit.faults, (gigabytes, ranks)


def init_for(config: Config, gigabytes: float, ranks: int) -> tuple[DryRun | None, str, list[DryRun]]:
    """Ask init for a recipe for the configuration's model and prompts.

    Return the plan of what it writes, or none and why, and the plans of what it begins with.
    """
    options = Namespace(
        model=config.model.path,
        folder=config.model.path,
        lora=config.model.lora is not None,
        data=[Path("data/virl39k")],
        eval=[],
        gpus=ranks,
    )
    facts = DataFacts(38_000, config.data.max_prompt_tokens, config.data.min_pixels, config.data.max_pixels)
    machine = Machine(ranks, gigabytes, nodes=max(1, ranks // 8))

    def dry_of(tree: dict[str, Any]) -> DryRun:
        return dry_run(parse_config({"out": "runs/x", **tree}), num_ranks=ranks, on_gpu=True)

    begun = [dry_of(_recipe(options, machine, facts, tokens).tree) for tokens in _RESPONSE_TOKENS]
    try:
        recipe, _ = fitting_recipe(options, machine, facts, out="runs/x")
    except UserError as error:
        return None, str(error), begun
    return dry_of(recipe.tree), "", begun


def is_free(key: str) -> bool:
    """Allow the keys that init may set by itself."""
    return not key.startswith(_FIXED)


@pytest.mark.parametrize(("name", "walked"), cases(MODELS))
def test_init_and_the_dry_run_agree(
    capsys: pytest.CaptureFixture[str], name: str, walked: Iterable[tuple[int, int]]
) -> None:
    """What init writes fits. Where it refuses, the dry run finds no settings either, and says why in the same words.

    Nor does it accept a shipped recipe of that model.
    """
    rivals = [config for config in CONFIGS.values() if trained(config) == trained(CONFIGS[name])]
    rivals = [config for config in rivals if config.rollout.sampler != "server"]
    for gigabytes, ranks in walked:
        card = Card.of(gigabytes, neighbours=min(ranks, 8))
        dry, refusal, begun = init_for(CONFIGS[name], gigabytes, ranks)
        if dry is not None:
            print_dry_run(dry, card=card)
            shown = capsys.readouterr().out
            assert what_fits(shown) and fits(dry, card).ok, (gigabytes, ranks, shown)
            continue
        reduced = [reduced_by(fits(dry, card), is_free)[1] for dry in begun]
        assert not any(fit.ok for fit in reduced), (gigabytes, ranks, refusal)
        assert any(fit.faults in refusal for fit in reduced), (gigabytes, ranks, refusal)
        for rival in rivals:
            rival_dry = dry_on(rival, ranks)
            assert rival_dry is None or not fits(rival_dry, card).ok, (gigabytes, ranks, refusal)
