"""Under ZeRO 3 a model is loaded in shards, and is the same model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy_runs import Runner
from vlm_rl.learner.architectures import SUPPORTED

WORKER = "tests.helpers.sharding_worker"
Results = dict[str, Any]


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
    return start(2, list(SUPPORTED), "trains")


def check_load(load: dict[str, Any], *, ranks: int) -> None:
    """Compare with the model that was loaded whole: weights, the files saved of them, and constants.

    Constants, such as rotary frequencies, stay float32 beside weights in bfloat16.
    """
    assert load["same_weights"] and load["same_files"] and load["same_buffers"], load
    assert load["share"] == pytest.approx(1 / ranks, rel=0.02)  # shards are padded


def test_a_sharded_load_is_the_same_model(start: Callable[..., Results]) -> None:
    check_load(start(1, ["qwen2_5_vl"])["qwen2_5_vl"], ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SUPPORTED)
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
