"""What goes wrong while a run looks alive: an evaluation that falls, gradients that jump, entropy that collapses.

A line says so when it begins, not in every step. Steps that teach nothing are seen where groups are collected
(vlm_rl.rollouts.no_signal).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from vlm_rl.run.best import best_result, paired_change
from vlm_rl.run.eval_result import EvalResult
from vlm_rl.run.stability import FIRST, GROWTH, spikes_of

COLLAPSE = 0.1
"""Entropy below this share of the first steps' mean has collapsed, unless accuracy has risen by RISE."""
RISE = 0.1

_ACCURACY = "rewards/accuracy/mean"


class Alarms:
    """Compares each step with those before it."""

    def __init__(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Look at what is logged already, and say nothing of it.

        Args:
            metrics: of the steps before a resume, ascending, each with its `step`.
        """
        self.spikes = spikes_of([])
        self._first: list[Mapping[str, float]] = []
        self._is_high = self._is_collapsed = False
        for record in metrics:
            self.after_step(int(record["step"]), record)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return a line for each alarm that this step begins."""
        self.spikes.add(step, metrics)
        lines = [line for line in (self._norm(metrics), self._entropy(metrics)) if line]
        if _ACCURACY in metrics and math.isfinite(metrics.get("entropy", math.nan)) and len(self._first) < FIRST:
            self._first.append(metrics)
        return lines

    def _norm(self, metrics: Mapping[str, float]) -> str | None:
        norm, ratio = metrics.get("grad_norm", math.nan), self.spikes.norm_ratio
        if not math.isfinite(norm):
            return None
        is_high, was_high = ratio > GROWTH, self._is_high
        self._is_high = is_high
        if was_high or not is_high:
            return None
        return (
            f"warning: the gradient norm is {norm:.3g}, {ratio:.0f} times its median so far: updates "
            "may be noise; if the next evaluation falls, lower train.lr or set train.schedule=cosine"
        )

    def _entropy(self, metrics: Mapping[str, float]) -> str | None:
        if len(self._first) < FIRST or self._is_collapsed or not {"entropy", _ACCURACY} <= metrics.keys():
            return None
        begun = fmean(first["entropy"] for first in self._first)
        before = fmean(first[_ACCURACY] for first in self._first)
        if not (metrics["entropy"] < COLLAPSE * begun and metrics[_ACCURACY] < before + RISE):  # NaN too
            return None
        self._is_collapsed = True
        return (
            f"warning: entropy fell to {metrics['entropy']:.3g} from {begun:.3g} in the first steps, and accuracy "
            f"did not rise ({before:.2f} to {metrics[_ACCURACY]:.2f}): responses become alike and teach less; lower "
            "train.lr, or raise algorithm.clip_high or algorithm.entropy_coef"
        )


def evaluation_fell(results: Sequence[EvalResult]) -> str | None:
    """Return a line where the last evaluation is lower than the best before it, beyond its paired interval.

    Args:
        results: of one set, ascending by step.
    """
    if len(results) < 2 or (best := best_result(results[:-1])) is None:
        return None
    change = paired_change(best, results[-1])
    if change is None or change.interval[1] >= 0:
        return None
    low, high = (-100 * bound for bound in reversed(change.interval))
    return (
        f"warning: accuracy on {best.benchmark} is {-100 * change.difference:.1f} points [{low:.1f}, {high:.1f}] "
        f"below that of step {best.step} ({change.won} won, {change.lost} lost)"
    )
