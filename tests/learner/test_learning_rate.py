"""The schedule of the learning rate against its closed form."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.config import TrainConfig, load_config
from vlm_rl.learner.learning_rate import learning_rate_factor, moved_cosine

Schedule = Literal["constant", "cosine"]


def factors(schedule: Schedule, *, warmup: int, total: int, steps: int) -> list[float]:
    return [
        learning_rate_factor(step, warmup_steps=warmup, schedule=schedule, total_steps=total) for step in range(steps)
    ]


def test_a_warm_up_rises_by_equal_steps_to_the_whole_rate() -> None:
    assert factors("constant", warmup=4, total=100, steps=7) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert factors("constant", warmup=0, total=3, steps=5) == [1.0] * 5
    assert factors("constant", warmup=10, total=3, steps=3) == [0.1, 0.2, 0.3]  # training ends within it


def test_a_cosine_falls_from_one_to_zero() -> None:
    # T - W = 6: angles 0, 30, 60, 90, 120, 150 degrees, and 180 from step 8 on
    cosines = [1, sqrt(3) / 2, 1 / 2, 0, -1 / 2, -sqrt(3) / 2, -1, -1]
    expected = [0.5, 1.0, *[(1 + cosine) / 2 for cosine in cosines]]
    assert factors("cosine", warmup=2, total=8, steps=10) == pytest.approx(expected, abs=1e-15)


def test_a_cosine_of_no_steps_is_over_after_one() -> None:
    assert factors("cosine", warmup=3, total=3, steps=6) == pytest.approx([1 / 3, 2 / 3, 1, 1, 0, 0], abs=1e-15)
    assert factors("cosine", warmup=0, total=1, steps=2) == pytest.approx([1, 0], abs=1e-15)


@given(st.integers(0, 50), st.integers(1, 200))
def test_a_cosine_never_rises_and_is_symmetric_about_its_middle(warmup: int, length: int) -> None:
    fall = factors("cosine", warmup=warmup, total=warmup + length, steps=warmup + length + 1)[warmup:]
    assert fall[0] == 1 and fall == sorted(fall, reverse=True)
    assert [a + b for a, b in zip(fall, reversed(fall), strict=True)] == pytest.approx([1.0] * len(fall))


@pytest.mark.parametrize(
    ("schedule", "steps", "step", "rates"),
    [
        ("cosine", 8, 4, ("0.5", "0")),  # the middle of the longer run, and the end of the shorter one
        ("cosine", 8, 2, ("0.854", "0.5")),  # (1 + cos 45 degrees) / 2
        ("cosine", 4, 2, None),
        ("cosine", 8, 0, None),  # both begin with the whole rate
        ("constant", 8, 4, None),
    ],
)
def test_a_resume_says_how_more_steps_move_the_cosine(
    schedule: Schedule, steps: int, step: int, rates: tuple[str, str] | None
) -> None:
    own = TrainConfig(steps=4, lr=1.0, schedule=schedule, warmup_steps=0)
    now = own.model_copy(update={"steps": steps})
    line = moved_cosine(own, now, step=step, updates_per_step=3)
    if rates is None:
        assert line is None
    else:
        assert line is not None and line.endswith(
            f"ends at step 8: the learning rate of the next step is {rates[0]}, and would have been {rates[1]}"
        )


def test_a_warm_up_in_rollout_steps_is_all_their_optimizer_steps() -> None:
    """The LUSPO paper: 20 rollout steps of 128 prompts in mini-batches of 16 are 160 optimizer steps."""
    config = load_config(Path(__file__).resolve().parents[2] / "configs" / "virl39k_luspo_7b.yaml")
    updates = -(-config.rollout.prompts_per_step // config.train.mini_batch_prompts)
    assert config.train.warmup_updates(updates) == 160
    assert TrainConfig(warmup_steps=5).warmup_updates(8) == 5
    with pytest.raises(ValueError, match="leave one of them out"):
        TrainConfig(warmup_steps=5, warmup_rollout_steps=2)
