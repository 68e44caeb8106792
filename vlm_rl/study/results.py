"""The numbers of a study: curves with the seeds' band, final values, paired differences.

`collect` reads the runs; everything below it is arithmetic. Only runs that reached their last step count; the others
are named in `StudyResults.missing`. A run is one independent value: seeds are averaged and compared, never steps, and
a difference is taken between runs of the same seed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vlm_rl.algorithms import Algorithm, resolve_algorithm
from vlm_rl.config import Config
from vlm_rl.report.run_curves import RunCurves
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.stability import FIRST, FIRST_LOSSES
from vlm_rl.stats import Estimate, estimate, smooth
from vlm_rl.study.runs import Study, StudyRun

NUM_END_DECILES = 3  # tenths of the responses that count as the shortest and as the longest

# Curves read from metrics.jsonl as they are.
_LOGGED = (
    "reward",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "entropy",
    "grad_norm",
    "length/group_cv",
    "length/sign_gap",
    "length_pull/total",
    "rollout/logprob_gap",
    "visual/dependence",
    "visual/dependence/correct",
    "visual/dependence/wrong",
    "ahead/age_mean",
    "step_time",
)


@dataclass(frozen=True, slots=True, eq=False)
class StepCurve:
    """Values over training steps, float64; NaN where a step has none."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class RunNumbers:
    """The numbers of one finished run."""

    rule: str
    seed: int
    start: str
    config: Config
    curves: Mapping[str, StepCurve]  # only those with a finite value
    finals: Mapping[str, float]  # measure -> value
    contaminated: tuple[str, ...] = ()
    stability: Mapping[str, float] = field(default_factory=dict)  # measure -> value
    logged: Mapping[str, StepCurve] = field(default_factory=dict)  # all of metrics.jsonl, as it is

    @property
    def algorithm(self) -> Algorithm:
        """Return the algorithm with the rule's own factors."""
        return resolve_algorithm(self.config.algorithm)


@dataclass(frozen=True, slots=True)
class MissingRun:
    """A planned run that is not finished."""

    rule: str
    seed: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class StudyResults:
    """The finished runs of a study."""

    rules: tuple[str, ...]  # the baseline first
    seeds: tuple[int, ...]
    num_steps: int
    runs: tuple[RunNumbers, ...]
    missing: tuple[MissingRun, ...]

    @property
    def baseline(self) -> str:
        """Return the rule that the others are compared with."""
        return self.rules[0]

    def of(self, rule: str) -> list[RunNumbers]:
        """Return the rule's finished runs, in the order of the seeds."""
        return sorted((run for run in self.runs if run.rule == rule), key=lambda run: self.seeds.index(run.seed))

    @property
    def measures(self) -> list[str]:
        """Return the names of the final values that at least one run has, held-out ones first."""
        known = list(dict.fromkeys(measure for run in self.runs for measure in run.finals))
        return sorted(known, key=lambda measure: (measure.startswith("train"), not is_share(measure)))

    @property
    def stability_measures(self) -> list[str]:
        """Return the names of what is known of the runs' stability, those of sets first."""
        known = dict.fromkeys(measure for run in self.runs for measure in run.stability)
        return sorted(known, key=lambda measure: "/" not in measure)

    @property
    def benchmarks(self) -> list[str]:
        """Return the names of the evaluated sets."""
        prefix = "heldout_accuracy/"
        names = dict.fromkeys(name for run in self.runs for name in run.curves if name.startswith(prefix))
        return [name.removeprefix(prefix) for name in names]


@dataclass(frozen=True, slots=True, eq=False)
class SeedBand:
    """A rule's curve: the mean over its seeds, and their smallest and largest value."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


# -- reading -------------------------------------------------------------------------------------


def collect(study: Study, runs: Sequence[StudyRun]) -> StudyResults:
    """Read every finished run of a study's plan."""
    reasons = [(run, missing_reason(run)) for run in runs]
    return StudyResults(
        rules=tuple(study.rule_names),
        seeds=tuple(study.seeds),
        num_steps=runs[0].config.train.steps,
        runs=tuple(read_run(run) for run, reason in reasons if not reason),
        missing=tuple(MissingRun(run.rule, run.seed, reason) for run, reason in reasons if reason),
    )


def missing_reason(entry: StudyRun) -> str:
    """Return why some numbers of a run are not recorded yet; empty if all are."""
    run, config = RunDirectory(entry.out), entry.config
    if not (entry.out / "config.yaml").is_file():
        return "not started"
    metrics = run.metrics()
    step = metrics[-1]["step"] if metrics else 0
    if step < config.train.steps:
        return f"at step {step} of {config.train.steps}"
    evaluated = {result.benchmark for result in run.evals() if result.step == config.train.steps}
    lacking = [name for path in config.data.eval if (name := Path(path).resolve().name) not in evaluated]
    if config.eval.every and lacking:
        return f"not evaluated on {', '.join(lacking)} after its last step"
    return ""


def read_run(entry: StudyRun) -> RunNumbers:
    """Read the numbers of one finished run."""
    run = RunCurves(RunDirectory(entry.out))
    curves = {name: curve for name, curve in _curves(run, entry).items() if np.isfinite(curve.values).any()}
    finals = {
        measure: stretch_mean(curves[name], entry.config.train.steps, early=False)
        for measure, name in (("train_accuracy", "accuracy"), ("train_length", "completions/mean_length"))
        if name in curves
    }
    if "completions/mean_length" in curves:
        early, late = stretch_means(curves["completions/mean_length"], entry.config.train.steps)
        finals["train_length_change"] = late - early
    finals |= {name: float(curve.values[-1]) for name, curve in curves.items() if name.startswith("heldout_")}
    logged = {name: StepCurve(*run.metric(name)) for name in run.every_metric}
    return RunNumbers(
        entry.rule,
        entry.seed,
        entry.start,
        entry.config,
        curves,
        finals,
        contaminated=tuple(run.run.contaminated()),
        stability=_stability(run),
        logged=logged,
    )


def _stability(run: RunCurves) -> dict[str, float]:
    """Return how steady a run was, by measure; only what its files say."""
    values = {}
    for benchmark, moved in run.steadiness.items():
        values[f"drop/{benchmark}"] = moved.drop
        values[f"between_std/{benchmark}"] = moved.between_std
    if len(run.spikes.norms) > FIRST:
        values["norm_spikes"] = float(len(run.spikes.norm_steps))
    if len(run.spikes.losses) > FIRST_LOSSES:
        values["loss_spikes"] = float(len(run.spikes.loss_steps))
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _curves(run: RunCurves, entry: StudyRun) -> dict[str, StepCurve]:
    curves = {name: StepCurve(*run.metric(name)) for name in _LOGGED}
    steps, part = run.metric("rewards/accuracy/mean")
    weight = entry.config.reward.accuracy
    scaled = part / weight if weight else part * math.nan
    curves["accuracy"] = _either(StepCurve(steps, scaled), lambda: run.rollouts.accuracy, run)
    for name, stored in (
        ("completions/mean_length", lambda: run.rollouts.mean),
        ("length/correct_mean", lambda: run.rollouts.mean_correct),
        ("length/wrong_mean", lambda: run.rollouts.mean_wrong),
    ):
        curves[name] = _either(StepCurve(*run.metric(name)), stored, run)
    for sign in ("positive", "negative"):
        for name, tenths in (
            ("shortest", range(1, 1 + NUM_END_DECILES)),
            ("longest", range(11 - NUM_END_DECILES, 11)),
        ):
            deciles = [run.metric(f"gradient_mass/{sign}/decile_{decile}") for decile in tenths]
            curves[f"gradient_mass/{sign}/{name}"] = StepCurve(deciles[0][0], np.sum([v for _, v in deciles], axis=0))
    for benchmark, scores in run.scores.items():
        at = np.array([score.step for score in scores], dtype=np.float64)
        curves[f"heldout_accuracy/{benchmark}"] = StepCurve(at, np.array([score.accuracy for score in scores]))
        curves[f"heldout_length/{benchmark}"] = StepCurve(at, np.array([score.mean_length for score in scores]))
    return curves


def _either(logged: StepCurve, stored: Callable[[], np.ndarray], run: RunCurves) -> StepCurve:
    """Return the logged curve, or the one counted from the stored responses where nothing was logged."""
    return logged if np.isfinite(logged.values).any() else StepCurve(run.rollouts.steps, stored())


# -- curves --------------------------------------------------------------------------------------


def seed_band(curves: Sequence[StepCurve], *, smoothed: bool = True) -> SeedBand | None:
    """Return mean, smallest and largest of the seeds' smoothed curves, step by step; None for no curve.

    Evaluations need no smoothing: they are few, and each covers many problems.
    """
    if not curves:
        return None
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    table = np.full((len(curves), len(steps)), math.nan)
    for row, curve in zip(table, curves, strict=True):
        row[np.searchsorted(steps, curve.steps)] = smooth(curve.values) if smoothed else curve.values
    known = np.isfinite(table).any(axis=0)
    steps, table = steps[known], table[:, known]
    return SeedBand(steps, np.nanmean(table, axis=0), np.nanmin(table, axis=0), np.nanmax(table, axis=0))


def thinned(band: SeedBand, limit: int) -> SeedBand:
    """Return a band of at most `limit` steps: neighbours become one, with their mean step, mean and extremes."""
    if len(band.steps) <= limit:
        return band
    parts = np.array_split(np.arange(len(band.steps)), limit)
    joined = [
        (band.steps[part].mean(), band.mean[part].mean(), band.low[part].min(), band.high[part].max())
        for part in parts
    ]
    return SeedBand(*np.array(joined).T)


def stretch_width(num_steps: int) -> int:
    """Return how many steps the first and the last tenth of a run have; at least one."""
    return max(1, num_steps // 10)


def stretch_mean(curve: StepCurve, num_steps: int, *, early: bool) -> float:
    """Return the mean over the first or the last tenth of the run's steps; NaN where none of them has a value."""
    width = stretch_width(num_steps)
    inside = curve.steps <= width if early else curve.steps > num_steps - width
    values = curve.values[inside & np.isfinite(curve.values)]
    return float(values.mean()) if len(values) else math.nan


def stretch_means(curve: StepCurve, num_steps: int) -> tuple[float, float]:
    """Return the means over the first and over the last tenth of the run's steps."""
    return stretch_mean(curve, num_steps, early=True), stretch_mean(curve, num_steps, early=False)


def curve_ends(curve: StepCurve, name: str, num_steps: int) -> tuple[float, float]:
    """Return where a curve begins and ends: means over a tenth of the steps, evaluations as they are."""
    if name.startswith("heldout_"):
        return float(curve.values[0]), float(curve.values[-1])
    return stretch_means(curve, num_steps)


# -- final values --------------------------------------------------------------------------------


def measure_title(measure: str) -> str:
    """Return a measure's name on the page."""
    kind, _, benchmark = measure.partition("/")
    if kind == "train_length_change":
        return "change of training length"
    what = "accuracy" if is_share(measure) else "length"
    return f"{what} on {benchmark}" if benchmark else f"training {what}"


def is_share(measure: str) -> bool:
    """Return whether a measure is in [0, 1] and shown in percent; the others are tokens."""
    return "accuracy" in measure.partition("/")[0]  # what follows is the name of a set


def final_values(results: StudyResults, rule: str, measure: str) -> dict[int, float]:
    """Return seed -> final value of the rule's runs that have one."""
    values = {run.seed: run.finals.get(measure, math.nan) for run in results.of(rule)}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def final_estimate(results: StudyResults, rule: str, measure: str) -> Estimate:
    """Return the rule's mean over its seeds with its 95 % t interval."""
    bounds = (0, 1) if is_share(measure) else (-math.inf, math.inf)
    return estimate(list(final_values(results, rule, measure).values()), bounds=bounds)


def stability_estimate(results: StudyResults, rule: str, measure: str) -> Estimate:
    """Return the mean over the rule's seeds of how steady they were, with its 95 % t interval."""
    values = [run.stability[measure] for run in results.of(rule) if measure in run.stability]
    return estimate(values, bounds=(0, 1 if "/" in measure else math.inf))


def difference(results: StudyResults, rule: str, other: str, measure: str) -> Estimate:
    """Return the mean of rule minus other over the seeds that both have finished, with its 95 % t interval.

    Args:
        results: of the study.
        rule: one rule.
        other: the rule that is taken off.
        measure: a key of a run's `finals`.
    """
    ours, theirs = (final_values(results, name, measure) for name in (rule, other))
    bounds = (-1, 1) if is_share(measure) else (-math.inf, math.inf)
    return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs], bounds=bounds)


# -- what is published ---------------------------------------------------------------------------


def as_json(results: StudyResults, findings: Sequence[str]) -> dict[str, Any]:
    """Return every number of the page's tables, without paths; null where a number does not exist."""
    rules = results.rules
    return {
        "baseline": results.baseline,
        "rules": list(rules),
        "seeds": list(results.seeds),
        "steps": results.num_steps,
        "missing": [{"rule": run.rule, "seed": run.seed, "reason": run.reason} for run in results.missing],
        "runs": [
            {
                "rule": run.rule,
                "seed": run.seed,
                "start": run.start,
                "final": _plain(run.finals),
                "stability": dict(run.stability),
                "first_and_last": {
                    name: [
                        float(f"{end:.4g}") if math.isfinite(end) else None
                        for end in curve_ends(curve, name, results.num_steps)
                    ]
                    for name, curve in run.curves.items()
                },
            }
            for run in results.runs
        ],
        "final": {
            measure: {rule: _estimate_json(final_estimate(results, rule, measure)) for rule in rules}
            for measure in results.measures
        },
        "difference_to_baseline": {
            measure: {
                rule: _estimate_json(difference(results, rule, results.baseline, measure)) for rule in rules[1:]
            }
            for measure in results.measures
        },
        "stability": {
            measure: {rule: _estimate_json(stability_estimate(results, rule, measure)) for rule in rules}
            for measure in results.stability_measures
        },
        "words": list(findings),
    }


def as_csv(results: StudyResults) -> str:
    """Return the unsmoothed curves of every finished run: rule, seed, step, metric, value; gaps are left out."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["rule", "seed", "step", "metric", "value"])
    for run in results.runs:
        for name, curve in run.curves.items():
            for step, value in zip(curve.steps, curve.values, strict=True):
                if math.isfinite(value):
                    writer.writerow([run.rule, run.seed, int(step), name, f"{value:.6g}"])
    return text.getvalue()


def _estimate_json(estimate: Estimate) -> dict[str, float | int | None]:
    return _plain(
        {
            "num_seeds": estimate.num,
            "mean": estimate.mean,
            "std": estimate.std,
            "low": estimate.low,
            "high": estimate.high,
            "detectable": estimate.detectable,
        }
    )


def _plain(values: Mapping[str, float | int]) -> dict[str, float | int | None]:
    return {key: value if math.isfinite(value) else None for key, value in values.items()}
