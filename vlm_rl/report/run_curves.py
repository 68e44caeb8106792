"""What a run's files say over time, as arrays: the numbers behind the report and the README picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vlm_rl.config import Config
from vlm_rl.run.difficulty import DifficultyScores, by_difficulty
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.eval_record import cluster_labels
from vlm_rl.run.eval_result import EvalResult
from vlm_rl.run.run_log import LOG
from vlm_rl.run.stability import Spikes, Steadiness, spikes_of, steadiness
from vlm_rl.stats import estimate, score_interval


@dataclass(frozen=True, slots=True, eq=False)
class RolloutCurves:
    """Per stored step, over all its responses; float64 [steps], NaN where there is no such response."""

    steps: np.ndarray
    mean: np.ndarray  # tokens
    p10: np.ndarray
    p90: np.ndarray
    mean_correct: np.ndarray
    mean_wrong: np.ndarray  # everything that was not judged correct
    truncated: np.ndarray  # share that met the token limit
    accuracy: np.ndarray  # share judged correct


@dataclass(frozen=True, slots=True)
class Score:
    """One evaluation in numbers; NaN over nothing."""

    step: int
    accuracy: float  # mean over the problems of the share of right samples
    low: float  # ends of its 95 % interval over problems, or their clusters
    high: float
    mean_length: float  # tokens
    length_low: float  # ends of its 95 % interval, as above
    length_high: float
    truncated: float
    num_problems: int


def holds_training(run: RunDirectory) -> bool:
    """Say whether a folder is of a training run, which logs before its first step, and not of evaluations alone."""
    return any((run.path / name).exists() for name in ("metrics.jsonl", LOG))


class RunCurves:
    """One run, read once; `name` is how pages call it."""

    def __init__(self, run: RunDirectory, name: str = "") -> None:
        self.run = run
        self.name = name or run.name
        self.metrics = run.metrics()
        self.evals: dict[str, list[EvalResult]] = {}
        for result in run.evals():
            self.evals.setdefault(result.benchmark, []).append(result)

    @cached_property
    def config(self) -> Config:
        """Read the run's configuration, once."""
        return self.run.config()

    @cached_property
    def rollouts(self) -> RolloutCurves:
        """Read the curves of length and accuracy from the stored responses, once."""
        return _rollout_curves(self.run)

    @cached_property
    def scores(self) -> dict[str, list[Score]]:
        """Return the scores of each benchmark, in the order of the steps."""
        return {name: [score_of(result) for result in results] for name, results in self.evals.items()}

    def difficulty(self, benchmark: str) -> list[tuple[int, dict[str, DifficultyScores]]]:
        """Return (step, scores by difficulty) of each evaluation of a set but the first, which sorts the problems."""
        results = self.evals.get(benchmark, [])
        return [(result.step, by_difficulty(results[0], result)) for result in results[1:]]

    @cached_property
    def spikes(self) -> Spikes:
        """Return the steps whose gradient norm or loss jumped."""
        return spikes_of(self.metrics)

    @property
    def steadiness(self) -> dict[str, Steadiness]:
        """Return how the evaluations of each set moved; only those with two evaluations or more."""
        moved = {name: steadiness([score.accuracy for score in scores]) for name, scores in self.scores.items()}
        return {name: known for name, known in moved.items() if known is not None and math.isfinite(known.last)}

    @property
    def num_steps(self) -> int:
        """Return how many steps were trained; rollouts may be stored of some only, and metrics may be missing."""
        return max(len(self.metrics), len(self.run.rollout_steps()))

    def metric(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of a logged metric, NaN where a step lacks it; empty if no step has it."""
        if not any(name in record for record in self.metrics):
            return np.array([]), np.array([])
        steps = np.array([record["step"] for record in self.metrics], dtype=np.float64)
        return steps, np.array([record.get(name, math.nan) for record in self.metrics], dtype=np.float64)

    def curve(self, name: str, counted: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a logged metric, or what was counted from the stored responses where the run did not log it.

        Args:
            name: of the metric.
            counted: of RolloutCurves.

        The metric covers every step, while responses may be stored of some only.
        """
        steps, values = self.metric(name)
        if np.isfinite(values).any():
            return steps, values
        return self.rollouts.steps, getattr(self.rollouts, counted)

    def training_accuracy(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, share of the training responses that are right)."""
        part = self.config.reward.accuracy
        steps, values = self.metric("rewards/accuracy/mean")
        if part and np.isfinite(values).any():  # the part is worth so much where it is right
            return steps, values / part
        return self.rollouts.steps, self.rollouts.accuracy

    @property
    def every_metric(self) -> list[str]:
        """Return the names of all metrics, without the numbers that tell the lines of the file apart."""
        return [name for name in self.metric_names("") if name not in ("step", "attempt", "time")]

    def metric_names(self, prefix: str) -> list[str]:
        """Return the logged names that start with `prefix`, in the order in which they first appear."""
        return list(dict.fromkeys(key for record in self.metrics for key in record if key.startswith(prefix)))

    def last(self, name: str) -> float:
        """Return the metric's last finite value, NaN if there is none."""
        values = self.metric(name)[1]
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else math.nan


def score_of(result: EvalResult) -> Score:
    """Count an evaluation's numbers, all of them from its records."""
    rows = result.rows(["problem_id", "verdict", "length", "stop_reason", "cluster"])
    correct = rows["verdict"].to_numpy() == "correct"
    problem = rows["problem_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    score_P = np.bincount(problem, weights=correct) / np.bincount(problem)
    length_P = np.bincount(problem, weights=rows["length"].to_numpy()) / np.bincount(problem)
    clusters = cluster_labels(rows.take(np.unique(problem, return_index=True)[1]))
    low, high = score_interval(score_P, clusters)
    length = estimate(length_P, clusters=np.array(clusters))
    return Score(
        step=result.step,
        accuracy=_mean(score_P),
        low=low,
        high=high,
        mean_length=_mean(rows["length"].to_numpy()),
        length_low=length.low,
        length_high=length.high,
        truncated=_mean(rows["stop_reason"].to_numpy() == "length"),
        num_problems=len(score_P),
    )


def _rollout_curves(run: RunDirectory) -> RolloutCurves:
    steps = run.rollout_steps()
    rows = [_step_row(run, step) for step in steps]
    table = np.array(rows, dtype=np.float64).reshape(len(steps), 7)
    return RolloutCurves(np.array(steps, dtype=np.float64), *table.T)


def _step_row(run: RunDirectory, step: int) -> list[float]:
    table = run.rollouts(step, ["length", "verdict", "stop_reason"])
    length = table["length"].to_numpy().astype(np.float64)
    correct = table["verdict"].to_numpy() == "correct"
    cut = table["stop_reason"].to_numpy() == "length"
    if not len(length):
        return [math.nan] * 7
    p10, p90 = np.quantile(length, [0.1, 0.9])
    parts = [_mean(length[correct]), _mean(length[~correct]), _mean(cut), _mean(correct)]
    return [_mean(length), float(p10), float(p90), *parts]


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan
