"""Models that are loaded in shards, and shards that a different number of ranks wrote: the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.sharding_worker import CHAINS, WAYS, same
from tests.helpers.toy_runs import Runner

WORKER = "tests.helpers.sharding_worker"
Results = dict[str, Any]
# Tied and untied, windows, tiles, experts, linear attention; test_learner.py trains every family in ZeRO 3.
SHAPES = ["qwen2_5_vl", "gemma3_text", "idefics3", "qwen3_vl_moe", "qwen3_5"]


@pytest.fixture(scope="module")
def start(
    runner: Runner, tiny_model: Path, family_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Results]:
    """Return a function that starts ranks and returns what rank 0 wrote down of models of these types."""

    def run(ranks: int, types: Sequence[str], *what: str) -> Results:
        folder = tmp_path_factory.mktemp("sharding")
        (folder / "models").mkdir()
        for model_type in types:
            source = tiny_model if model_type == "qwen2_5_vl" else family_model(model_type)
            (folder / "models" / model_type).symlink_to(source)
        out = folder / "results.pt"
        done = runner(folder / "models", out, *what, module=WORKER, ranks=ranks, deadline=500)
        assert done.code == 0, done.output[-4000:]
        return torch.load(out, weights_only=False)

    return run


@pytest.fixture(scope="module")
def on_two_ranks(start: Callable[..., Results]) -> Results:
    return start(2, SHAPES, "trains")


def check_load(load: dict[str, Any], *, ranks: int) -> None:
    """Compare with the model that was loaded whole: weights, the files saved of them, and constants.

    Constants, such as rotary frequencies, stay float32 beside weights in bfloat16.
    """
    assert load["same_weights"] and load["same_files"] and load["same_buffers"], load
    assert load["share"] == pytest.approx(1 / ranks, rel=0.02)  # shards are padded


def test_a_sharded_load_is_the_same_model(start: Callable[..., Results]) -> None:
    check_load(start(1, ["qwen2_5_vl"])["qwen2_5_vl"], ranks=1)


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", SHAPES)
def test_a_rank_holds_its_share_of_a_model(on_two_ranks: Results, model_type: str) -> None:
    check_load(on_two_ranks[model_type], ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["all weights", "adapters"])
def test_a_sharded_load_passes_the_self_check_and_takes_the_same_step(on_two_ranks: Results, what: str) -> None:
    whole, sharded = on_two_ranks[what]
    assert torch.equal(whole.pop("expected"), sharded.pop("expected"))
    weights = whole.pop("weights"), sharded.pop("weights")
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert whole == sharded and whole["norm"] > 0


@pytest.fixture(scope="module")
def visits(runner: Runner, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Return what two ranks trained and wrote, what one rank read and wrote, and what two ranks read of that."""
    folder = tmp_path_factory.mktemp("visits")
    (folder / "models").mkdir()
    (folder / "models" / "qwen2_5_vl").symlink_to(tiny_model)
    results = []
    for number, ranks in enumerate((2, 1, 2)):
        out = folder / f"{number}.pt"
        done = runner(folder / "models", out, "visit", number, module=WORKER, ranks=ranks, deadline=500)
        assert done.code == 0, done.output[-4000:]
        results.append(torch.load(out, weights_only=False))
    return results


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_then_one_then_two_have_the_same_weights_and_moments(visits: list[Results], way: str) -> None:
    trained, on_one, again = (visit[way] for visit in visits)
    assert [len(trained), len(on_one), len(again)] == [2, 1, 2]
    weights = trained[0][1]
    for state, whole, weights_follow in (*trained, *on_one, *again):
        assert same(whole, weights) and weights_follow
        assert any(key.startswith("exp_avg_sq") and moment.any() for key, moment in state.items())
    for before, after in zip(trained, again, strict=True):
        assert same(after[0], before[0])


@pytest.fixture(scope="module")
def chains(start: Callable[..., Results]) -> Results:
    return start(2, ["qwen2_5_vl"], "chains")


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_every_stage_reads_the_masters_and_moments_of_every_other(chains: Results, name: str) -> None:
    """Bit for bit where a stage comes again, and the same weights in all; a step from there is the same step."""
    stages = CHAINS[name][1]
    *states, last_step, before, step_before = chains[name]
    first_weights = states[0][1]
    of_stage: dict[int, Any] = {}
    for stage, held in zip((*stages, stages[-2]), (*states, before), strict=True):
        for mine, expected in zip(held[0], of_stage.setdefault(stage, held[0]), strict=True):
            assert any(key.startswith("exp_avg_sq") and moment.any() for key, moment in mine.items())
            assert same(mine, expected)
        weights, weights_follow = held[1:]
        assert same(weights, first_weights) and weights_follow
    assert any(not torch.equal(tensor, first_weights[key]) for key, tensor in last_step.items())
    if next(iter(first_weights.values())).dtype == torch.float32:
        for key, tensor in last_step.items():
            torch.testing.assert_close(step_before[key], tensor)
        return
    # Gradients in bfloat16 are summed in another order in each stage, and Adam turns the sign of one near zero into a
    # whole step: steps of equal states are 0 to 2 % apart, by processor, and 76 % where the first moments are lost.
    apart, moved = (
        sum(float((last_step[key].double() - other[key].double()).square().sum()) for key in last_step)
        for other in (step_before, first_weights)
    )
    assert apart < 0.1**2 * moved
