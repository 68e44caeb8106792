"""Whether a plan fits on a card, and the settings that would make it fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.cards import have_cards
from vlm_rl.cli import main
from vlm_rl.config import load_config, load_sft_config
from vlm_rl.errors import UserError
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import (
    ENGINE_OVERHEAD,
    ROLLOUT_SHARE,
    UPDATE_SHARE,
    Card,
    fits,
    responses_at_once,
    server_need,
)
from vlm_rl.planning.page import verdict
from vlm_rl.planning.remedies import (
    any_key,
    fitting_ranks,
    fitting_remedies,
    is_resumable,
    reduced_by,
    remedies,
    with_remedies,
)

RECIPES = Path(__file__).parents[2] / "configs"
RECIPE = RECIPES / "virl39k_luspo_3b.yaml"
LONG_RECIPE = RECIPES / "virl39k_luspo_7b_32k_48gb.yaml"
SHARE = "rollout.vllm.gpu_memory_utilization"


def dry_of(*overrides: str, ranks: int = 8, path: Path = RECIPE) -> DryRun:
    return dry_run(load_config(path, overrides), num_ranks=ranks)


@pytest.fixture(scope="module")
def dry() -> DryRun:
    return dry_of()


def card(size: float) -> Card:
    return Card(size, size)


def test_the_smallest_of_different_cards_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (80 * 2**30, 48 * 2**30, 80 * 2**30)
    have_cards(monkeypatch, len(sizes), 0)
    properties = [SimpleNamespace(total_memory=size) for size in sizes]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    assert Card.here(3, emptied=True).total == min(sizes)


def test_the_limit_of_each_phase(dry: DryRun) -> None:
    """With the engine's share of .45 a card C holds the update up to .9 C, and what the learner keeps up to .5 C."""
    kept = dry.memory.kept / (ROLLOUT_SHARE - 0.45)
    least = max(dry.memory.update / UPDATE_SHARE, kept)
    fit, smaller = fits(dry, card(1.001 * least)), fits(dry, card(0.999 * least))
    assert fit.ok and fit.margin > 0 and not smaller.ok and smaller.margin < 0
    assert fit.margin == pytest.approx(
        0.001 * least * (UPDATE_SHARE if least > kept else ROLLOUT_SHARE - 0.45), rel=0.1
    )
    assert verdict(fit).startswith("fits on a card with ")


def test_an_engine_needs_room_for_one_response(dry: DryRun) -> None:
    """Its weights, 1 GiB beside them, and 8,192 tokens at full length: what vLLM asks for before it starts."""
    engine = dry.memory.engine_weights + ENGINE_OVERHEAD + 8192 * dry.kv_bytes_per_token
    for share, over in ((1.001 * engine / 80e9, []), (0.999 * engine / 80e9, ["engine"])):
        fit = fits(dry_of(f"{SHARE}={share}"), Card.of(80))
        assert [need.part for need in fit.over] == over
    more = fits(dry_of(f"{SHARE}={1.001 * engine / 80e9}"), Card.of(80), responses=2)
    assert [need.part for need in more.over] == ["engine"]
    assert responses_at_once(dry, engine, tokens=8192) == 1
    served = dry_of("rollout.sampler=server", "rollout.servers=[http://a:1]")
    assert server_need(served, Card.of(80)).needed == engine
    assert not {"engine", "share"} & {need.part for need in fits(served, Card.of(80)).needs}


def test_the_range_of_shares_that_is_named_is_right(dry: DryRun) -> None:
    """Both ends of it fit, and a hundredth beyond does not."""
    said = fits(dry_of(f"{SHARE}=0.99"), Card.of(80)).faults
    low, high = (float(word) for word in said.split("must be from ")[1].split(" to "))
    for share, ok in ((low, True), (high, True), (low - 0.01, False), (high + 0.01, False)):
        assert fits(dry_of(f"{SHARE}={share:.2f}"), Card.of(80)).ok == ok


def test_what_others_hold_on_the_card_counts(dry: DryRun) -> None:
    assert fits(dry, Card(80e9, 80e9)).ok
    assert [need.part for need in fits(dry, Card(80e9, 45e9)).over] == ["share"], "vLLM takes its share of the whole"
    assert "update" in [need.part for need in fits(dry, Card(80e9, 20e9)).over]


def test_host_memory_counts_where_it_is_known(dry: DryRun) -> None:
    """8 ranks load the model whole, each 2 bytes for each of its parameters."""
    needed = 2 * dry.num_parameters
    assert [need.part for need in fits(dry, Card(80e9, 80e9, host=needed - 1)).over] == ["host"]
    assert fits(dry, Card(80e9, 80e9, host=needed)).ok
    # With offloading 16 bytes of each parameter are there: nothing is offloaded where the host has no room for it.
    roomy, tight = (Card(16e9, 16e9, host=host) for host in (1e12, 1.1 * needed))
    freely, tightly = (" ".join(map(str, reduced_by(fits(dry, card))[0])) for card in (roomy, tight))
    offloading = "zero_optimization.offload_optimizer"
    assert offloading in freely and offloading not in tightly


@pytest.mark.parametrize("gigabytes", [16, 24])
def test_with_the_settings_that_it_names_it_fits(dry: DryRun, gigabytes: int) -> None:
    fit = fits(dry, Card.of(gigabytes))
    assert not fit.ok
    said, rest = verdict(fit).split("what would, on as many ranks:\n")
    assert said.startswith(f"does not fit on a card with {gigabytes} GB: the update needs ")
    words = [word for line in rest.splitlines() if "  # " in line for word in line.split("  # ")[0].split()]
    assert words and fits(dry_of(*words), Card.of(gigabytes)).ok
    for left_out in words:  # each is needed
        assert not fits(dry_of(*(word for word in words if word != left_out)), Card.of(gigabytes)).ok


def test_where_nothing_helps(dry: DryRun) -> None:
    assert "larger cards" in verdict(fits(dry, Card.of(2)))


def test_more_ranks_are_named_where_they_would_do() -> None:
    """3B on one card of 40 GB: the whole rule is asked of the ranks, not the update alone."""
    fit = fits(dry_of(ranks=1), Card.of(40))
    ranks = fitting_ranks(fit)
    assert ranks is not None and fits(dry_of(ranks=ranks), Card.of(40)).ok
    assert not fits(dry_of(ranks=ranks // 2), Card.of(40)).ok
    assert f"{ranks}" in verdict(fit).splitlines()[-1]


def test_a_resume_is_told_what_it_takes() -> None:
    """Everything but adapters and shorter responses, which would make it a different run."""
    fit = fits(dry_of(ranks=8), Card.of(24))
    every, taken = (
        {key for remedy in remedies(fit, may_change) for key in remedy.values}
        for may_change in (any_key, is_resumable)
    )
    assert every - taken == {"model.lora.rank", "rollout.max_tokens"}
    assert "train.zero_stage=3" in verdict(fit, is_resumable)
    assert "no settings, of those that a resume takes," in verdict(fits(dry_of(ranks=8), Card.of(2)), is_resumable)


def test_a_share_of_the_engine_alone(dry: DryRun) -> None:
    [remedy] = fitting_remedies(fits(dry_of(f"{SHARE}=0.99"), Card.of(80))) or []
    assert str(remedy).startswith(f"{SHARE}=0.")


def test_the_portable_engine_takes_no_share_of_a_card() -> None:
    """It keeps keys and values of all responses beside the learner, and its model in host memory in an update."""
    dry = dry_of("rollout.sampler=transformers")
    at_80 = fits(dry, Card.of(80))
    rollout = dry.memory.kept + dry.memory.engine_weights + dry.memory.kv_cache
    assert {need.needed for need in at_80.needs if need.part == "rollout"} == {rollout}
    assert at_80.shares is None and not any(need.part in ("engine", "share") for need in at_80.needs)
    assert dry.memory.host_engine == dry.memory.engine_weights
    said = verdict(fits(dry, card(0.99 * rollout / ROLLOUT_SHARE)), is_resumable)
    assert "rollout.batch_size=" in said and SHARE not in said
    assert SHARE in verdict(fits(dry_of(f"{SHARE}=0.9"), Card.of(80)))


def test_ranks_that_share_rows_hold_a_part_of_each() -> None:
    """A 7B with responses of 32,768 tokens on cards of 48 GB: 28 layers, 28 heads of 128, 4 of keys."""

    def on(ranks: int) -> DryRun:
        return dry_of(f"train.sequence_parallel={ranks}", path=LONG_RECIPE)

    def kept(tokens: int, outputs: int) -> int:
        """Return the bytes of the layers' inputs, and of one whole layer: two norms, attention and the MLP."""
        layer = 2 * (8 * 3584 + (1 + outputs) * 3584 + 2 * 512 + 4 * 18_944) + 4 * 28
        return tokens * (28 * 3584 * 2 + layer)

    alone, four = on(1), on(4)
    assert alone.memory.activations - four.memory.activations == kept(36_864, 1) - kept(9216, 2)
    assert not fits(alone, Card.of(48)).ok and fits(four, Card.of(48)).ok
    assert "train.sequence_parallel" in {
        key for remedy in remedies(fits(alone, Card.of(48))) for key in remedy.values
    }
    with pytest.raises(UserError, match=r"28 heads of queries and 4 of keys and values: .* one of 1, 2, 4, 28$"):
        on(8)
    with pytest.raises(UserError, match="and there are 6 ranks"):
        dry_of(path=LONG_RECIPE, ranks=6)


def test_an_engine_is_divided_where_its_weights_do_not_fit() -> None:
    """32B: 62 GiB of weights fit beside no learner on 80 GB. Two cards of one machine share them, never of two."""
    path = RECIPES / "virl39k_luspo_32b.yaml"
    whole = dry_of("rollout.sampler=auto", "rollout.tensor_parallel=1", path=path)
    chosen = fitting_remedies(fits(whole, Card.of(80))) or []
    assert "rollout.tensor_parallel=2" in " ".join(map(str, chosen))
    alone = fitting_remedies(fits(whole, Card.of(80, neighbours=1)))
    assert not any("tensor_parallel" in str(remedy) for remedy in alone or [])


@pytest.mark.parametrize("name", ["virl39k_luspo_7b", "virl39k_luspo_7b_lora_24gb", "sft/cold_start_7b"])
def test_each_remedy_saves_memory_where_it_goes_with_the_run(name: str) -> None:
    """On the card or, for what no other phase holds, while the engine samples."""
    path = RECIPES / f"{name}.yaml"
    config = load_sft_config(path) if "sft" in name else load_config(path)
    fit = fits(dry_run(config, num_ranks=8), Card.of(80))
    found = {str(remedy): with_remedies(fit, [remedy]) for remedy in remedies(fit) if SHARE not in remedy.values}
    assert len(found) == len([*remedies(fit)]) - fit.dry.samples
    assert fit.dry.samples or not any("rollout." in name for name in found)
    going = {name: changed.dry.memory for name, changed in found.items() if changed is not None}
    assert len(going) > 3
    before = fit.dry.memory
    assert not [name for name, m in going.items() if m.update >= before.update and m.rollout >= before.rollout]


def test_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**13))
    assert main(["train", str(RECIPE), "--dry-run", "--ranks", "8", "--gpu-memory", "80"]) == 0
    assert capsys.readouterr().out.startswith("fits on a card with 80 GB: of 74.5 GiB")
    assert main(["train", str(RECIPE), "--dry-run", "--gpu-memory", "0"]) == 2
    assert "--gpu-memory 0" in capsys.readouterr().err


def test_weights_that_are_here_are_planned_for_the_card_that_is_named(tiny_model: Path, capsys) -> None:
    """On a machine without a GPU: float32 for its own memory, bfloat16 for a card."""
    words = ["train", str(RECIPES / "toy.yaml"), f"model.path={tiny_model}", "--dry-run"]
    assert main(words) == 0
    here = capsys.readouterr().out
    assert "float32" in here and here.startswith("fits on this machine: of ") and "keys and values included" in here
    assert main([*words, "--gpu-memory", "80"]) == 0
    assert "bfloat16" in capsys.readouterr().out
