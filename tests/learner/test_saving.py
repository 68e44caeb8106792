"""A checkpoint that is written while the training continues is the one that is written while it waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.saving_worker import WAYS
from tests.helpers.toy_runs import Runner
from vlm_rl.config import TrainConfig
from vlm_rl.learner.checkpoint_files import host_copy
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.model_files.weights import check_weights

WORKER = "tests.helpers.saving_worker"
FAST = "ZeRO 2"
ON_TWO_RANKS = [pytest.param(2, way, marks=pytest.mark.slow) for way in WAYS]


@pytest.fixture(scope="module")
def saved(runner: Runner, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """Return a function that starts ranks, once for each number of them, and returns what each wrote down."""
    results: dict[int, list[Any]] = {}

    def run(ranks: int) -> list[Any]:
        if ranks not in results:
            out = tmp_path_factory.mktemp("saving") / "results.pt"
            ways = [FAST] if ranks == 1 else list(WAYS)
            done = runner(tiny_model, out, *ways, module=WORKER, ranks=ranks, deadline=500)
            assert done.code == 0, done.output[-4000:]
            results[ranks] = [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(ranks)]
        return results[ranks]

    return run


@pytest.mark.parametrize(("ranks", "way"), [(1, FAST), *ON_TWO_RANKS])
def test_later_steps_do_not_leak_into_it(saved: Callable[[int], list[Any]], ranks: int, way: str) -> None:
    """Every file has the bytes of the synchronous save, although the weights have moved before it was written."""
    for result in saved(ranks):
        result = result[way]
        assert result["moved"] and result["early"] == []
        synchronous, asynchronous = result["files"]
        assert len(synchronous) > 5 and asynchronous == synchronous
        assert result["info"] == [{"step": 1, "counts": [1]}] * 2


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_for_the_thread_of_one_rank_is_an_error_on_all(
    saved: Callable[[int], list[Any]], ranks: int
) -> None:
    for result in saved(ranks):
        message = result["refused"]["message"]
        assert "the checkpoint of step 2 could not be written: " in message
        assert "step-000001 is untouched" in message
        assert result["refused"]["left"] == ["latest", "step-000001"]


@pytest.mark.parametrize("model_type", ["gemma4", "glm4v_moe"])
def test_a_saved_model_has_its_buffers(model_type: str, family_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Gemma 4 scales each layer by one, and GLM-4.5V's routers choose by one; no optimizer knows either."""
    folder = family_model(model_type)
    learner = object.__new__(Learner)
    learner.policy = Policy(load_model(folder, dtype=torch.float32), banned_ids=[], temperature=1.0)
    learner.config = TrainConfig(zero_stage=0)
    learner.save_model(tmp_path)
    check_weights(tmp_path)
    saved, started = (load_model(path, dtype=torch.float32).state_dict() for path in (tmp_path, folder))
    assert saved.keys() == started.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in started.items())


def test_a_host_copy_shares_what_its_source_shares() -> None:
    flat = torch.arange(6.0)
    tree = {"flat": flat, "parts": [flat[:2], (flat[2:].view(2, 2).T,)], "lr": 0.1}
    copied = host_copy(tree)
    flat += 10
    assert copied["flat"].tolist() == [0, 1, 2, 3, 4, 5] and copied["lr"] == 0.1
    assert copied["parts"][1][0].tolist() == [[2, 4], [3, 5]]
    copied["flat"][0] = 7.0
    assert copied["parts"][0].tolist() == [7, 1]
