"""How steady a run was: how far it ended below its best, how much its evaluations waver, and where an update jumped.

    drop         accuracy of the best evaluation less that of the last, of one set
    between_std  sqrt(sum_k (a_k+1 - a_k)^2 / (2 (n - 1))) over its n evaluations in order (von Neumann, 1941)
    norm spike   a step whose gradient norm is above GROWTH times the median of all before it
    loss spike   a step whose loss is further from the median of all before it than GROWTH times the median of their
                 own distances from it

Differences of neighbours are taken for between_std because learning itself would dominate the plain standard
deviation: a run that climbs steadily has hardly any. The noise of the set itself is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

GROWTH = 10.0
FIRST = 5
"""Gradient norms that are looked at before any is compared with them."""
FIRST_LOSSES = 20
"""More than FIRST: the median distance of a few losses is sometimes next to 0."""
FEWEST = 3
"""Evaluations between which there is a standard deviation; of two it would be what the run learned."""
ROUNDING = 1e-6  # on the first step after the sampling the loss of many rules is 0 up to rounding


@dataclass(slots=True)
class Spikes:
    """The spikes among the steps that were given so far."""

    norms: list[float] = field(default_factory=list)  # the finite ones so far
    losses: list[float] = field(default_factory=list)
    norm_steps: list[int] = field(default_factory=list)
    loss_steps: list[int] = field(default_factory=list)
    norm_ratio: float = math.nan  # of the last step, to the median before it; NaN if it is not compared

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare a step with those before it, by grad_norm and loss. What is not finite is not compared."""
        norm, loss = (metrics.get(name, math.nan) for name in ("grad_norm", "loss"))
        self.norm_ratio = math.nan
        if math.isfinite(norm):
            if len(self.norms) >= FIRST and (usual := median(self.norms)) > 0:
                self.norm_ratio = norm / usual
                if self.norm_ratio > GROWTH:
                    self.norm_steps.append(step)
            self.norms.append(norm)
        if math.isfinite(loss):
            if len(self.losses) >= FIRST_LOSSES:
                middle = median(self.losses)
                usual = median(abs(value - middle) for value in self.losses)
                if usual > 0 and abs(loss - middle) > max(GROWTH * usual, ROUNDING):
                    self.loss_steps.append(step)
            self.losses.append(loss)

    def metrics(self) -> dict[str, float]:
        """Return the number of spikes so far, and the last step's norm over the median before it, if known."""
        counts = {
            "stability/norm_spikes": float(len(self.norm_steps)),
            "stability/loss_spikes": float(len(self.loss_steps)),
        }
        return counts | ({"stability/norm_ratio": self.norm_ratio} if math.isfinite(self.norm_ratio) else {})


def spikes_of(records: Iterable[Mapping[str, float]]) -> Spikes:
    """Return the spikes among the metrics of a run's steps, ascending, each with its `step`."""
    spikes = Spikes()
    for record in records:
        spikes.add(int(record["step"]), record)
    return spikes


@dataclass(frozen=True, slots=True)
class Steadiness:
    """How one set's evaluations moved; accuracies in [0, 1]."""

    num_evaluations: int
    best: float
    last: float
    between_std: float  # NaN for fewer than FEWEST evaluations

    @property
    def drop(self) -> float:
        """Return how far the last evaluation is below the best; 0 if it is the best."""
        return self.best - self.last


def steadiness(accuracies: Sequence[float]) -> Steadiness | None:
    """Return how the evaluations of one set moved, from their accuracies in order; None for fewer than two."""
    if len(accuracies) < 2:
        return None
    between = math.nan
    if len(accuracies) >= FEWEST:
        between = float(np.sqrt(np.mean(np.diff(accuracies) ** 2) / 2))
    return Steadiness(len(accuracies), max(accuracies), accuracies[-1], between)
