"""The schedule of the learning rate against its closed form."""

from __future__ import annotations

from math import sqrt
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.learner.learning_rate import learning_rate_factor

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
