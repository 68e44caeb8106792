"""Rows whose tokens are divided over ranks: the numbers and gradients of one rank that has the whole row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests.helpers.sequence_worker import WAYS
from tests.helpers.toy_runs import Runner
from vlm_rl.config import parse_config
from vlm_rl.errors import UserError
from vlm_rl.learner.sequence_parallel import check_heads, check_ranks

WORKER = "tests.helpers.sequence_worker"
TOLERANCE = 1e-5  # of a log-prob in nats, and of a gradient's or a step's distance over its norm; float32
Results = dict[str, Any]


@pytest.fixture(scope="module")
def start(
    runner: Runner, tiny_model: Path, family_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Results]:
    """Return a function that starts ranks and returns what rank 0 wrote down of models of these types."""

    def run(ranks: int, types: Sequence[str], *what: object) -> Results:
        folder = tmp_path_factory.mktemp("sequence")
        (folder / "models").mkdir()
        for model_type in types:
            source = tiny_model if model_type == "qwen2_5_vl" else family_model(model_type)
            (folder / "models" / model_type).symlink_to(source)
        out = folder / "results.pt"
        done = runner(folder / "models", out, *what, module=WORKER, ranks=ranks, deadline=300)
        assert done.code == 0, done.output[-4000:]
        return torch.load(out, weights_only=False)

    return run


def distance(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """||ours - wanted|| / ||wanted||, over tensors of the same names."""
    assert ours.keys() == wanted.keys()
    apart, whole = (
        sum(float(one.double().square().sum()) for one in each)
        for each in ([ours[name] - wanted[name] for name in wanted], wanted.values())
    )
    assert whole > 0
    return (apart / whole) ** 0.5


def check_rows(of_ranks: Sequence[Results]) -> None:
    """Compare each rank's row with the same row computed by that rank alone."""
    for found in of_ranks:
        alone = found["alone"]
        for ours in (found[way] for way in WAYS):
            for name in ("logp", "entropy", "top", "again", "kept", "loss"):
                torch.testing.assert_close(ours[name], alone[name], atol=TOLERANCE, rtol=0)
            assert torch.equal(ours["ids"], alone["ids"])
            assert distance(ours["grads"], alone["grads"]) < TOLERANCE
            for kind in ("sums", "routing"):
                assert ours[kind].keys() == alone[kind].keys()
                for name, value in alone[kind].items():
                    torch.testing.assert_close(ours[kind][name], value, atol=1e-6, rtol=1e-4)


def test_a_row_on_two_ranks_is_the_row_on_one(start: Callable[..., Results]) -> None:
    """Log-probs, entropies and gradients of a loss of whole responses, with images and without."""
    found = start(2, ["qwen2_5_vl"], 2)
    assert "there are 2 ranks" in found["refused"]
    check_rows(found["qwen2_5_vl"])
    assert found["qwen2_5_vl"][0]["tokens"] % 2, "shares of one length show less"


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_groups_of_ranks_compute_rows_of_every_kind(start: Callable[..., Results]) -> None:
    """Four ranks in two groups: deepstack features, windows, experts with replayed routing."""
    types = ["gemma3_text", "qwen3", "qwen3_vl", "qwen3_vl_moe"]
    found = start(4, types, 2)
    for model_type in types:
        check_rows(found[model_type])
        lengths = [of_rank["tokens"] for of_rank in found[model_type]]
        assert lengths[0] == lengths[1] > lengths[2] == lengths[3]
    assert found["qwen3_vl_moe"][0]["alone"]["routing"]["router_replaced"] > 0


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_a_step_of_ranks_that_share_rows_is_the_step_of_one_rank(start: Callable[..., Results]) -> None:
    """Through ZeRO 2 and 3, on four ranks with two copies of each head of keys, and in two groups of two ranks."""
    variants = ("all weights", "frozen tower", "adapters")
    alone = start(1, ["qwen2_5_vl"], 1, 0, *variants)
    ways = {
        "2 ranks, ZeRO 2": start(2, ["qwen2_5_vl"], 2, 2, *variants),
        "2 ranks, ZeRO 3": start(2, ["qwen2_5_vl"], 2, 3, *variants),
        "4 ranks, ZeRO 2": start(4, ["qwen2_5_vl"], 4, 2, variants[0]),
        "2 groups, ZeRO 3": start(4, ["qwen2_5_vl"], 2, 3, variants[0]),
    }
    for way, results in ways.items():
        for name, found in results.items():
            if name == "refused":
                continue
            wanted = alone[name]
            assert distance(found["delta"], wanted["delta"]) < TOLERANCE, (way, name)
            assert found["logp"].keys() == wanted["logp"].keys()
            for member, logp in wanted["logp"].items():
                torch.testing.assert_close(found["logp"][member], logp, atol=TOLERANCE, rtol=0)
            assert found["sums"] == pytest.approx(wanted["sums"], rel=1e-4), (way, name)
            assert [found["loss"], found["norm"]] == pytest.approx([wanted["loss"], wanted["norm"]], rel=TOLERANCE)


def test_heads_that_no_rank_gets_whole_are_refused_with_the_sizes_that_do() -> None:
    model = AutoConfig.for_model("qwen2", num_attention_heads=28, num_key_value_heads=4)
    for size in (1, 2, 4, 28):
        check_heads(model, size, is_padded=False)
    for size in (7, 8):  # 7 divides the queries, and neither divides 4 nor is a multiple of it
        with pytest.raises(UserError, match=r"28 heads of queries and 4 of keys and values: .* one of 1, 2, 4, 28$"):
            check_heads(model, size, is_padded=False)
    check_heads(model, 1, is_padded=True)
    with pytest.raises(UserError, match="rows of this qwen2 model are padded"):
        check_heads(model, 2, is_padded=True)
    with pytest.raises(UserError, match="this qwen3_5 model has layers of linear attention"):
        check_heads(AutoConfig.for_model("qwen3_5"), 2, is_padded=False)


def test_what_has_no_rows_of_ours_or_would_be_asked_twice_is_refused() -> None:
    tree: dict[str, Any] = {"out": "run", "model": {"path": "m"}, "data": {"train": ["d"]}}
    tree["train"] = {"sequence_parallel": 2}
    parse_config(tree)
    with pytest.raises(UserError, match=r"train\.sequence_parallel is 2, and model\.rows is padded"):
        parse_config({**tree, "model": {"path": "m", "rows": "padded"}})
    teacher = {"distillation": {"teacher": "t", "servers": ["http://localhost:8000"]}}
    with pytest.raises(UserError, match=r"train\.sequence_parallel is 2, and algorithm\.distillation\.servers are"):
        parse_config({**tree, "algorithm": teacher})


def test_ranks_that_form_no_groups_are_refused() -> None:
    check_ranks(4, 8)
    with pytest.raises(UserError, match=r"train\.sequence_parallel is 4, and there is 1 rank: "):
        check_ranks(4, 1)
