"""The gradient guard's rule, on norms alone; test_learner.py shows that a refused step changes no weight."""

from __future__ import annotations

import math

from vlm_rl.learner.guard import GradientGuard

MILLION, MEDIAN = 1e6, 2.0  # of the norms 1, 2, 3


def guard_after(*norms: float) -> GradientGuard:
    guard = GradientGuard(grad_clip=1.0, max_skipped_in_a_row=5)
    for norm in norms:
        assert guard.allows(norm)
        guard.record(norm, applied=True)
    return guard


def test_a_spike_is_above_a_million_medians() -> None:
    guard = guard_after(3.0, 1.0, 2.0)
    assert guard.allows(MILLION * MEDIAN) and not guard.allows(1.001 * MILLION * MEDIAN)
    for norm in (math.nan, math.inf, -1.0):
        assert not guard.allows(norm) and not guard_after().allows(norm)
    assert guard_after().allows(1e300), "the first norm has nothing to be compared with"


def test_the_median_is_that_of_the_last_20_steps_that_were_applied() -> None:
    """20 norms of 1000 after as many of 1: the earlier ones count no more, and neither does a refused one."""
    guard = guard_after(*[1.0] * 20, *[1000.0] * 10)
    assert guard.allows(MILLION * 500.5) and not guard.allows(MILLION * 501)  # between 1 and 1000
    guard = guard_after(*[1.0] * 20, *[1000.0] * 20)
    guard.record(math.inf, applied=False)
    assert guard.allows(MILLION * 1000) and not guard.allows(1.001 * MILLION * 1000)


def test_a_step_without_a_gradient_says_nothing_of_the_usual_size() -> None:
    guard = guard_after(1.0, 0.0, 0.0)
    assert guard.allows(MILLION) and not guard.allows(1.001 * MILLION)
