"""Runs whose tokens have a credit, and whose baseline has a history."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.helpers.resumed import assert_last_step_is_made_again
from tests.helpers.toy_runs import Toys
from vlm_rl.report.run_report import write_report

CREDIT: dict[str, Any] = {
    "credit": "top_visual",
    "aggregation": "variance",
    "advantage": "ebpo",
    "blind_image": "noise",
}


@pytest.mark.turn(0, days=2)
def test_a_run_with_credit_and_a_history_resumes_bit_for_bit(toys: Toys) -> None:
    """The second step, made again, has the history of the first. All mini-batches have both passes."""
    whole = toys.train_run("credit", algorithm=CREDIT, train={"steps": 2}, checkpoint={"every": 1})
    assert_last_step_is_made_again(toys, whole)
    for record in whole.metrics():
        assert 0.4 <= record["visual/credited"] < 0.5  # ceil(.4 L) of L tokens
        assert record["visual/dependence"] > 0 and record["timing/blind_logprobs"] > 0
        assert 0 <= record["ebpo/shrinkage"] <= 0.51 and math.isfinite(record["ebpo/mean_reward"])
    for step in whole.rollout_steps():
        rows = whole.rollouts(step).to_pylist()
        known = [row for row in rows if row["visual_dependence"] is not None]
        assert {row["prompt_id"] for row in known} == {row["prompt_id"] for row in rows}  # four problems a step
        assert {(row["prompt_id"], row["verdict"] == "correct") for row in known} == {
            (row["prompt_id"], row["verdict"] == "correct") for row in rows
        }, "a right and a wrong response of each"
        for row in known:
            assert len(row["visual_dependence"]) == len(row["tokens"]) == row["length"]
            assert "".join(row["tokens"]) == row["text"] and min(row["visual_dependence"]) >= 0
    page = write_report([whole], toys.folder / "credit.html").read_text(encoding="utf-8")
    assert 'id="looking"' in page and "Mean S by tenth of the response" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "shared"),
    [
        ({"credit": "top_visual", "aggregation": "balanced"}, 1),
        ({"credit": "visual", "name": "luspo", "blind_image": "masked", "perception_coef": 0.02}, 2),
    ],
)
@pytest.mark.turn(0, days=2)
def test_credit_does_not_depend_on_ranks_and_rows(toys: Toys, rule: dict[str, Any], shared: int) -> None:
    """The first step of one rank, and of two in ZeRO 2 with narrow rows and a frozen vision tower's features.

    The second time both ranks compute each row together.
    """
    name = rule["credit"]
    options: dict[str, Any] = {"algorithm": rule, "model": {"path": str(toys.model), "freeze": ["tower", "merger"]}}
    train: dict[str, Any] = {"steps": 1, "mini_batch_prompts": 4}
    one = toys.train_run(f"{name}-one", **options, train=train)
    narrow = {**train, "zero_stage": 2, "micro_batch_tokens": 170, "sequence_parallel": shared}
    config = toys.config(f"{name}-two", **options, train=narrow)
    assert toys.runner("train", str(config), ranks=2).code == 0
    (first,), (second,) = one.metrics(), toys.run(f"{name}-two").metrics()
    for key in first:
        if key.startswith(("visual/", "gradient_mass/", "length_pull/", "loss", "grad_norm")) and math.isfinite(
            first[key]
        ):
            assert second[key] == pytest.approx(first[key], rel=1e-3, abs=1e-6), key


@pytest.mark.slow
def test_credit_with_the_sampler_s_log_probs_and_one_mini_batch(toys: Toys) -> None:
    """The ratio is then over what the sampler reported, and both passes are made all the same."""
    rule = {"credit": "visual", "mask_truncated": True, "kl_coef": 0.1, "perception_coef": 0.02}
    run = toys.train_run(
        "credit-sampler", algorithm=rule, train={"steps": 1, "mini_batch_prompts": 4, "old_logprobs": "sampler"}
    )
    (record,) = run.metrics()
    assert record["timing/old_logprobs"] > 0 and record["timing/blind_logprobs"] > 0
    assert record["visual/kl"] == pytest.approx(record["visual/dependence"], rel=1e-3), "before any step S_t is k3"
    assert record["rollout/logprob_gap"] < 1e-3 and 0 < record["grad_norm"] < math.inf
