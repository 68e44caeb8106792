"""The numbers of the page: lengths, their changes in pairs, and what they cost or bring. Pure arithmetic.

Lengths are tokens by the model's own tokenizer. A response that was cut at the limit has the length at
which it was cut, so every length comes with the share that was cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlm_rl.demo.library import Drawn, OpenRun, drawn_of
from vlm_rl.demo.table import DIFFICULTIES, Table
from vlm_rl.report.run_curves import RunCurves
from vlm_rl.stats import Estimate, estimate, running_mean, score_interval, sign_test


@dataclass(frozen=True, slots=True)
class Summary:
    """One checkpoint on the kept problems; scores in [0, 1], lengths in tokens, NaN over nothing."""

    num_problems: int
    num_responses: int
    accuracy: float
    interval: tuple[float, float]  # 95 %, over problems
    median: float
    p90: float
    mean: float
    cut: float  # share of responses
    tokens: Estimate  # change against the baseline, paired by problem
    score: Estimate  # change against the baseline, paired by problem
    won: int  # problems with a higher score than the baseline's
    lost: int

    @property
    def p_value(self) -> float:
        """Exact sign test on won against lost."""
        return sign_test(self.won, self.lost)


def summarise(table: Table, keep_P: np.ndarray) -> list[Summary]:
    """One summary per checkpoint of the table."""
    return [_summary(table, index, keep_P) for index in range(len(table.checkpoints))]


def _summary(table: Table, index: int, keep_P: np.ndarray) -> Summary:
    responses = table.checkpoints[index].responses
    inside = table.inside(index, keep_P)
    length, cut = responses.length_R[inside], responses.cut_R[inside]
    score = table.score_CP[index, keep_P]
    change = score - table.score_CP[0, keep_P]
    accuracy = float(score.mean()) if len(score) else math.nan
    return Summary(
        num_problems=len(score),
        num_responses=len(length),
        accuracy=accuracy,
        interval=score_interval(score),
        median=quantile(length, 0.5),
        p90=quantile(length, 0.9),
        mean=float(length.mean()) if len(length) else math.nan,
        cut=float(cut.mean()) if len(cut) else math.nan,
        tokens=estimate((table.length_CP[index] - table.length_CP[0])[keep_P]),
        score=estimate(change, bounds=(-1, 1)),
        won=int((change > 0).sum()),
        lost=int((change < 0).sum()),
    )


@dataclass(frozen=True, slots=True)
class Duel:
    """Two checkpoints, neither of them the baseline, on the kept problems; indices into the table's."""

    index: int
    against: int
    tokens: Estimate  # change, paired by problem
    score: Estimate


def duels(table: Table, keep_P: np.ndarray) -> list[Duel]:
    """The last shown checkpoint of each run against that of each run before it, the baseline's own column aside."""
    last = {one.runs: index for index, one in enumerate(table.checkpoints) if index}
    columns = sorted(last.values())
    length, score = table.length_CP[:, keep_P], table.score_CP[:, keep_P]
    return [
        Duel(b, a, estimate(length[b] - length[a]), estimate(score[b] - score[a], bounds=(-1, 1)))
        for place, b in enumerate(columns)
        for a in columns[:place]
    ]


def quantile(values: np.ndarray, share: float) -> float:
    """NaN for no values."""
    return float(np.quantile(values, share)) if len(values) else math.nan


# -- distributions -------------------------------------------------------------------------------


def ecdf(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x, y): the distinct lengths, ascending, and the share of responses of at most that length."""
    x, count = np.unique(lengths, return_counts=True)
    return x, np.cumsum(count) / max(1, len(lengths))


def bin_edges(lengths: Sequence[np.ndarray], *, target: int = 24) -> np.ndarray:
    """Common edges for several distributions: whole tokens, of a round width, about `target` bins at most.

    A bin holds its lower edge and not its upper one.
    """
    known = [one for one in lengths if len(one)]
    if not known:
        return np.array([0, 1])
    low, high = min(int(one.min()) for one in known), max(int(one.max()) for one in known)
    width = round_up((high - low + 1) / target)
    start = low // width * width
    return np.arange(start, high + width + 1, width)


def round_up(value: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least `value`."""
    power = 10 ** max(0, math.floor(math.log10(max(value, 1))))
    return next(int(step * power) for step in (1, 2, 5, 10) if step * power >= value - 1e-9)


def histogram(lengths: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of the responses in each bin."""
    place = np.searchsorted(edges, lengths, side="right") - 1
    return np.bincount(place, minlength=len(edges) - 1)[: len(edges) - 1] / max(1, len(lengths))


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of some lengths; NaN where there are none."""

    num: int
    p10: float
    p25: float
    median: float
    p75: float
    p90: float


def spread(lengths: np.ndarray) -> Spread:
    """The five numbers that are drawn."""
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


def by_difficulty(table: Table, index: int, keep_P: np.ndarray) -> list[DifficultyPoint]:
    """Length and accuracy within each class of the pass rate before training; empty classes are left out."""
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
class Pair:
    """One problem at the baseline and at another checkpoint."""

    problem_id: str
    before: float  # mean tokens
    after: float
    moved: int  # +1: a higher score than the baseline's, -1: a lower one

    @property
    def change(self) -> float:
        return self.after - self.before


def pairs(table: Table, index: int, keep_P: np.ndarray, *, limit: int = 600) -> list[Pair]:
    """The kept problems by their change in length; of more than `limit` an even selection with both ends."""
    kept = np.flatnonzero(keep_P)
    change = (table.length_CP[index] - table.length_CP[0])[kept]
    order = kept[np.argsort(change, kind="stable")]
    if len(order) > limit:
        order = order[np.linspace(0, len(order) - 1, limit).round().astype(int)]
    moved = np.sign(table.score_CP[index] - table.score_CP[0]).astype(int)
    return [
        Pair(table.ids[p], float(table.length_CP[0, p]), float(table.length_CP[index, p]), int(moved[p]))
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


def length_curve(runs: Sequence[OpenRun], benchmark: str) -> LengthCurve | None:
    """From the rollouts of each step, of all these runs together; from the evaluations where none are stored.

    Smoothed over about a twentieth of the steps; None without either.
    """
    found: dict[int, list[Drawn]] = {}
    for run in runs:
        for step, drawn in run.rollout_lengths().items():
            found.setdefault(step, []).append(drawn)
    sampled = bool(found)
    if not sampled:
        for run in runs:
            for one in run.directory.evals(benchmark):
                found.setdefault(one.step, []).append(drawn_of(one.rows(["length", "stop_reason"])))
    rows = []
    for step, parts in sorted(found.items()):
        length, cut = (np.concatenate(column) for column in zip(*parts, strict=True))
        if len(length):
            rows.append([step, *np.quantile(length, [0.25, 0.5, 0.75, 0.9]), cut.mean()])
    if not rows:
        return None
    steps, *values = np.array(rows, dtype=np.float64).T
    window = len(steps) // 20 * 2 + 1 if sampled else 1
    p25, median, p75, p90 = (running_mean(one, window) for one in values[:4])
    return LengthCurve(steps, p25, median, p75, p90, values[4], sampled)


def gradient_mass(runs: Sequence[RunCurves], *, columns: int = 30) -> tuple[np.ndarray, np.ndarray] | None:
    """(first step of each column, mass [10, columns]): the share of each length decile, both signs together.

    The mean over the runs that logged it, over the steps that all of them have; neighbouring steps are averaged to at
    most `columns`. None where no run logged it.
    """
    tables = [found for one in runs if (found := _mass(one))]
    if not tables:
        return None
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    if not steps:
        return None
    mass = np.mean([[table[step] for step in steps] for table in tables], axis=0).T
    chunks = np.array_split(np.arange(len(steps)), min(columns, len(steps)))
    first = np.array([steps[chunk[0]] for chunk in chunks])
    return first, np.stack([mass[:, chunk].mean(axis=1) for chunk in chunks], axis=1)


def _mass(curves: RunCurves) -> dict[float, np.ndarray]:
    """step -> the shares of the ten deciles; empty where they were not logged."""
    names = [[f"gradient_mass/{sign}/decile_{d}" for d in range(1, 11)] for sign in ("positive", "negative")]
    if not curves.metric(names[0][0])[1].size or not curves.metric(names[1][0])[1].size:
        return {}
    positive, negative = (np.stack([curves.metric(name)[1] for name in sign]) for sign in names)
    mass = positive + negative
    steps = curves.metric(names[0][0])[0]
    return {float(step): mass[:, i] for i, step in enumerate(steps) if np.isfinite(mass[:, i]).all()}
