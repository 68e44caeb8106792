"""Runs whose responses are episodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.resumed import assert_last_step_is_made_again
from tests.helpers.toy_runs import Toys, rollouts_of
from vlm_rl.run.turn_record import read_turns

OWN: dict[str, Any] = {"allow_class": True, "options": {"most": 2}, "max_pixels": 6272}
BEGINNING: dict[str, Any] = OWN | {
    "name": "tests.helpers.own_environment.Beginning",
    "max_observed_tokens": 250,
}
ROWS: dict[str, Any] = {"train": {"micro_batch_tokens": 500}, "rollout": {"max_tokens": 42}}


@pytest.mark.turn(0, days=2)
def test_a_run_of_episodes_resumes_bit_for_bit(toys: Toys) -> None:
    """The second step, made again, begins where Adam, the order and the weights of the first left off.

    A picture is shown before the first turn, and wrong answers are told to be wrong, up to twice.
    """
    how: dict[str, Any] = {"environment": BEGINNING, "data": {"max_prompt_tokens": 512}, **ROWS}
    how |= {"train": ROWS["train"] | {"steps": 2}, "checkpoint": {"every": 1}}
    whole = toys.train_run("episodes", **how)
    assert_last_step_is_made_again(toys, whole)
    rows = [row for step in rollouts_of(whole) for row in step]
    episodes = [read_turns(row["turns"]) for row in rows]
    assert max(map(len, episodes)) == 1 + 3
    starts: dict[str, set[tuple[str, tuple[bytes, ...]]]] = {}
    for row, (start, *turns) in zip(rows, episodes, strict=True):
        assert start.is_start and start.answer.startswith("welcome <image> <|im_end|>: ") and len(start.images) == 1
        starts.setdefault(row["prompt_id"], set()).add((start.answer, start.images))
        assert row["length"] == len(row["token_ids"]) == sum(turn.num_tokens for turn in turns)
        assert row["text"] == turns[-1].text
        if row["verdict"] == "correct":
            assert turns[-1].ending == "done"
        assert all("wrong" in turn.answer for turn in turns[:-1])
    assert len(starts) > 1 and all(len(shown) == 1 for shown in starts.values()), "a problem begins alike every time"
    for record in whole.metrics():
        assert record["episode/turns"] > 1.5 and record["episode/observed_tokens"] > 5
        assert record["rollout/logprob_gap"] < 1e-5


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_observed_pictures_train_alike_on_one_rank_and_two(toys: Toys) -> None:
    """Narrow rows, ZeRO 2 and a frozen tower, whose features of observed pictures are computed once. One is shown
    before the first turn, to both ranks alike."""
    model = {"path": str(toys.model), "freeze": ["tower", "merger"]}
    options: dict[str, Any] = {
        "environment": BEGINNING | {"name": "tests.helpers.own_environment.Throughout"},
        "data": {"max_prompt_tokens": 512},
        "model": model,
        "rollout": ROWS["rollout"],
    }
    train: dict[str, Any] = {"steps": 2, "mini_batch_prompts": 4}
    one = toys.train_run("pictures-one", **options, train=train | ROWS["train"])
    narrow = {**train, "zero_stage": 2, "micro_batch_tokens": 320}
    config = toys.config("pictures-two", **options, train=narrow)
    result = toys.runner("train", str(config), ranks=2)
    assert result.code == 0, result.output[-3000:]
    (first, _), (second, _) = one.metrics(), toys.run("pictures-two").metrics()
    assert first["episode/images"] > 1
    for key in ("loss", "grad_norm", "reward", "rollout/logprob_gap", "episode/observed_tokens"):
        assert second[key] == pytest.approx(first[key], rel=1e-3, abs=1e-5), key
