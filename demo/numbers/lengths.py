"""Compute the numbers of the page: lengths, their changes problem by problem, and what they cost or bring.

Lengths are tokens of the model's own tokenizer. A response that was cut at the limit has the length at which it was
cut, so every length comes with the share that was cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlm_rl.demo.numbers.library import OpenRun, ResponseLengths, response_lengths
from vlm_rl.demo.numbers.problem_table import DIFFICULTIES, ProblemTable
from vlm_rl.report.run_curves import RunCurves
from vlm_rl.stats import Estimate, estimate, score_interval, smooth

_CURVE_POINTS = 200  # of a cumulative distribution
_BINS = 24


@dataclass(frozen=True, slots=True)
class Summary:
    """One checkpoint on the kept problems; scores in [0, 1], lengths in tokens, NaN over nothing."""

    num_problems: int
    accuracy: float
    interval: tuple[float, float]  # 95 %, over problems, or their clusters
    mean: float  # of a response's tokens
    median: float
    p90: float
    cut: float  # share of responses
    tokens: Estimate  # change against the baseline, paired by problem
    score: Estimate  # change against the baseline, paired by problem
    won: int  # problems with a higher score than the baseline's
    lost: int


def checkpoint_summaries(table: ProblemTable, keep_P: np.ndarray) -> list[Summary]:
    """Return one summary per checkpoint of the table, over the kept problems."""
    return [_summary(table, index, keep_P) for index in range(len(table.checkpoints))]


def _summary(table: ProblemTable, index: int, keep_P: np.ndarray) -> Summary:
    responses = table.checkpoints[index].responses
    inside = table.inside(index, keep_P)
    length, cut = responses.length_R[inside], responses.cut_R[inside]
    score = table.score_CP[index, keep_P]
    change = score - table.score_CP[0, keep_P]
    clusters = table.cluster_P[keep_P]
    accuracy = float(score.mean()) if len(score) else math.nan
    return Summary(
        num_problems=len(score),
        accuracy=accuracy,
        interval=score_interval(score, clusters),
        mean=float(length.mean()) if len(length) else math.nan,
        median=quantile(length, 0.5),
        p90=quantile(length, 0.9),
        cut=float(cut.mean()) if len(cut) else math.nan,
        tokens=estimate((table.length_CP[index] - table.length_CP[0])[keep_P], clusters=clusters),
        score=estimate(change, clusters=clusters, bounds=(-1, 1)),
        won=int((change > 0).sum()),
        lost=int((change < 0).sum()),
    )


def quantile(values: np.ndarray, share: float) -> float:
    """Return the quantile at `share` in [0, 1]; NaN for no values."""
    return float(np.quantile(values, share)) if len(values) else math.nan


# -- distributions -------------------------------------------------------------------------------


def ecdf(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cumulative distribution as (x, y): lengths, ascending, and the share of responses up to each.

    Of more than 200 distinct lengths an even selection by share is taken, both ends included; every returned
    point is exact.
    """
    x, count = np.unique(lengths, return_counts=True)
    y = np.cumsum(count) / max(1, len(lengths))
    if len(x) > _CURVE_POINTS:
        chosen = np.unique(np.searchsorted(y, np.linspace(y[0], 1, _CURVE_POINTS)).clip(max=len(x) - 1))
        x, y = x[chosen], y[chosen]
    return x, y


def bin_edges(lengths: Sequence[np.ndarray]) -> np.ndarray:
    """Return common edges for several distributions: whole tokens, a round width, about 24 bins at most.

    A bin holds its lower edge and not its upper one.
    """
    known = np.concatenate(lengths) if lengths else np.array([])
    if not len(known):
        return np.array([0, 1])
    low, high = int(known.min()), int(known.max())
    width = round_up((high - low + 1) / _BINS)
    start = low // width * width
    return np.arange(start, high + width + 1, width)


def round_up(value: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least `value`."""
    power = 10 ** max(0, math.floor(math.log10(max(value, 1))))
    return next(int(step * power) for step in (1, 2, 5, 10) if step * power >= value - 1e-9)


def histogram(lengths: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the share of the responses in each bin."""
    place = np.searchsorted(edges, lengths, side="right") - 1
    return np.bincount(place, minlength=len(edges) - 1)[: len(edges) - 1] / max(1, len(lengths))


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of some lengths; NaN if there are none."""

    num: int
    p10: float
    p25: float
    median: float
    p75: float
    p90: float


def spread(lengths: np.ndarray) -> Spread:
    """Return the five quantiles that are drawn."""
    if not len(lengths):
        return Spread(0, *[math.nan] * 5)
    return Spread(len(lengths), *(float(v) for v in np.quantile(lengths, [0.1, 0.25, 0.5, 0.75, 0.9])))


@dataclass(frozen=True, slots=True)
class DifficultyPoint:
    """One checkpoint on the problems of one difficulty class."""

    difficulty: str
    num_problems: int
    length: float  # mean tokens over problems
    accuracy: float
    cut: float


def by_difficulty(table: ProblemTable, index: int, keep_P: np.ndarray) -> list[DifficultyPoint]:
    """Return length and accuracy within each class of the pass rate before training, without empty classes."""
    cut_P = table.checkpoints[index].responses.mean_P(table.checkpoints[index].responses.cut_R)[table.row_CP[index]]
    points = []
    for name in DIFFICULTIES:
        inside = keep_P & (table.difficulty_P == name)
        if inside.any():
            length, score = table.length_CP[index, inside].mean(), table.score_CP[index, inside].mean()
            points.append(
                DifficultyPoint(name, int(inside.sum()), float(length), float(score), float(cut_P[inside].mean()))
            )
    return points


@dataclass(frozen=True, slots=True)
class LengthBand:
    """The lengths of one checkpoint's responses to the problems of one difficulty class."""

    difficulty: str
    rate: float  # mean pass rate of its problems, in [0, 1]
    lengths: Spread


def length_bands(table: ProblemTable, index: int, keep_P: np.ndarray) -> list[LengthBand]:
    """Return the quantiles of length within each class of the pass rate before training, without empty classes."""
    bands = []
    for name in DIFFICULTIES:
        members = keep_P & (table.difficulty_P == name)
        if members.any():
            lengths = table.checkpoints[index].responses.length_R[table.inside(index, members)]
            bands.append(LengthBand(name, float(table.base_rate_P[members].mean()), spread(lengths)))
    return bands


@dataclass(frozen=True, slots=True)
class ProblemChange:
    """One problem at the baseline and at a different checkpoint."""

    problem_id: str
    before: float  # mean tokens
    after: float
    moved: int  # +1: a higher score than the baseline's, -1: a lower one

    @property
    def change(self) -> float:
        """Return the change of the mean length, in tokens."""
        return self.after - self.before


def problem_changes(table: ProblemTable, index: int, keep_P: np.ndarray, *, limit: int = 600) -> list[ProblemChange]:
    """Return the kept problems by their change in length.

    Args:
        table: of the page.
        index: the checkpoint that is compared with the baseline.
        keep_P: bool, the problems that pass the filters.
        limit: the most problems; of more an even selection with both ends is returned.
    """
    kept = np.flatnonzero(keep_P)
    change = (table.length_CP[index] - table.length_CP[0])[kept]
    order = kept[np.argsort(change, kind="stable")]
    if len(order) > limit:
        order = order[np.linspace(0, len(order) - 1, limit).round().astype(int)]
    moved = np.sign(table.score_CP[index] - table.score_CP[0]).astype(int)
    return [
        ProblemChange(table.ids[p], float(table.length_CP[0, p]), float(table.length_CP[index, p]), int(moved[p]))
        for p in order.tolist()
    ]


# -- over training -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LengthCurve:
    """Quantiles of the lengths over steps, float64 [steps]."""

    steps: np.ndarray
    p25: np.ndarray
    median: np.ndarray
    p75: np.ndarray
    p90: np.ndarray
    cut: np.ndarray
    sampled: bool  # from every training response; else from the stored evaluations
    smoothed: bool


def length_curve(runs: Sequence[OpenRun], benchmark: str) -> LengthCurve | None:
    """Return the lengths of each step's rollouts, of all these runs together, as quantiles; None without any.

    Where no rollouts are stored, the evaluations on `benchmark` take their place. The quantiles of rollouts are
    smoothed.
    """
    by_step: dict[int, list[ResponseLengths]] = {}
    for run in runs:
        for step, lengths in run.rollout_lengths().items():
            by_step.setdefault(step, []).append(lengths)
    sampled = bool(by_step)
    if not sampled:
        for result in (result for run in runs for result in run.directory.evals(benchmark)):
            by_step.setdefault(result.step, []).append(response_lengths(result.rows(["length", "stop_reason"])))
    rows = []
    for step, parts in sorted(by_step.items()):
        length, cut = (np.concatenate(column) for column in zip(*parts, strict=True))
        if len(length):
            rows.append([step, *np.quantile(length, [0.25, 0.5, 0.75, 0.9]), cut.mean()])
    if not rows:
        return None
    steps, *quantiles, cut = np.array(rows, dtype=np.float64).T
    p25, median, p75, p90 = (smooth(values) if sampled else values for values in quantiles)
    return LengthCurve(steps, p25, median, p75, p90, cut, sampled, smoothed=median is not quantiles[1])


def mass_over_training(runs: Sequence[RunCurves], *, columns: int = 30) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (first step of each column, mass [10, columns]): the share of each length decile, both signs together.

    It is the mean over the runs that logged it, for the steps that all of them have. Neighbouring steps are averaged
    into at most `columns` columns. None where no run logged it.
    """
    tables = [table for run in runs if (table := _mass_by_step(run))]
    if not tables:
        return None
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    if not steps:
        return None
    mass = np.mean([[table[step] for step in steps] for table in tables], axis=0).T
    chunks = np.array_split(np.arange(len(steps)), min(columns, len(steps)))
    first = np.array([steps[chunk[0]] for chunk in chunks])
    return first, np.stack([mass[:, chunk].mean(axis=1) for chunk in chunks], axis=1)


def _mass_by_step(curves: RunCurves) -> dict[float, np.ndarray]:
    """Return the shares of the ten deciles by step; nothing if they were not logged."""
    names = [[f"gradient_mass/{sign}/decile_{d}" for d in range(1, 11)] for sign in ("positive", "negative")]
    if not curves.metric(names[0][0])[1].size or not curves.metric(names[1][0])[1].size:
        return {}
    positive, negative = (np.stack([curves.metric(name)[1] for name in of_sign]) for of_sign in names)
    mass = positive + negative
    steps = curves.metric(names[0][0])[0]
    return {float(step): mass[:, i] for i, step in enumerate(steps) if np.isfinite(mass[:, i]).all()}
