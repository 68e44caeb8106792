"""The sections of the report that show curves: each a heading, how to read it, and its charts.

A section whose metrics a run did not log says so in words; there is no empty plot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from markupsafe import Markup

from vlm_rl.report.charts.frame import BAD, GOOD, PALETTE
from vlm_rl.report.charts.lines import Series
from vlm_rl.report.charts.shares import decile_bars
from vlm_rl.report.figures import CurveFigure, card, figure_grid, metric_section
from vlm_rl.report.html import PageSection, macros
from vlm_rl.report.run_curves import RunCurves, Score
from vlm_rl.report.vega import embed
from vlm_rl.run.difficulty import DIFFICULTIES
from vlm_rl.stats import score_interval

_PARTS = macros("vlm_rl.report", "parts.html")
_REPORT = macros("vlm_rl.report", "report.html")
_PARTS_OF_EVERY_RUN = ("accuracy", "format", "overlong")


def reward_section(runs: Sequence[RunCurves]) -> PageSection:
    """Return the curves of the mean reward, of its parts, and of functions whose value is in no sum."""
    total = _metric_figure(runs, "reward", "Mean reward of a response")
    logged = [name for run in runs for name in run.metric_names("rewards/") if name.endswith("/mean")]
    names = dict.fromkeys([*_PARTS_OF_EVERY_RUN, *(name.split("/")[1] for name in logged)])
    summed = {name.removeprefix("length_pull/") for run in runs for name in run.metric_names("length_pull/")}
    parts = summed.union(_PARTS_OF_EVERY_RUN)
    figures = [
        _metric_figure(runs, f"rewards/{name}/mean", f"{'Part' if name in parts else 'Value'}: {name}")
        for name in names
    ]
    return PageSection(
        "Reward",
        "Mean over the responses of each training step, and its parts apart; a value is in no sum. "
        "Thin: each step; bold: a running mean.",
        total.html() + figure_grid(figures, columns=3),
    )


def overview_section(runs: Sequence[RunCurves]) -> PageSection:
    """Return accuracy and length side by side: training as curves, the evaluations as points with intervals."""
    curves: dict[str, list[Series]] = {"accuracy": [], "length": []}
    points: dict[str, list[Series]] = {"accuracy": [], "length": []}
    for color, run in _colored(runs):
        label = curve_label(runs, run, "training responses")
        curves["accuracy"].append(Series(label, *run.training_accuracy(), color, smooth=True))
        length = run.curve("completions/mean_length", "mean")
        curves["length"].append(Series(label, *length, color, smooth=True))
        for benchmark, scores in run.scores.items():
            for what, series in points.items():
                series.append(_score_series(scores, what, curve_label(runs, run, benchmark), color))
    if len(runs) == 1:  # a colour per benchmark; with several runs a colour per run
        for what, series in points.items():
            points[what] = [replace(s, color=PALETTE[(1 + i) % len(PALETTE)]) for i, s in enumerate(series)]
    titles = {"accuracy": "Share of correct answers", "length": "Length of a response, mean"}
    options = {"accuracy": {"percent": True}, "length": {"y_title": "tokens", "from_zero": True}}
    needs = "no rollouts, no evaluation"
    figures = [
        CurveFigure(title, curves[what] + points[what], needs, _who(runs), options[what])
        for what, title in titles.items()
    ]
    return PageSection(
        "Accuracy and length",
        "Curve: responses sampled for training. Points: the stored evaluations, with their 95 % interval.",
        figure_grid(figures),
    )


def _score_series(scores: Sequence[Score], what: str, label: str, color: str) -> Series:
    rows = [
        (s.step, s.accuracy, s.low, s.high)
        if what == "accuracy"
        else (s.step, s.mean_length, s.length_low, s.length_high)
        for s in scores
    ]
    x, y, low, high = np.array(rows, dtype=np.float64).T
    return Series(label, x, y, color, low=low, high=high, points=True)


def length_section(runs: Sequence[RunCurves]) -> PageSection:
    """Return response length: its range, that of correct and wrong responses, and the share cut off."""
    spread, split, cut = [], [], []
    for color, run in _colored(runs):
        (x, mean), (low_x, low), (high_x, high) = (
            run.curve(name, counted)
            for name, counted in (
                ("completions/mean_length", "mean"), ("length/p10", "p10"), ("length/p90", "p90"),
            )
        )  # fmt: skip
        is_known = np.array_equal(x, low_x) and np.array_equal(x, high_x)
        ends = (low, high) if is_known else (None, None)
        spread.append(Series(run.name, x, mean, color, low=ends[0], high=ends[1]))
        right, wrong = (GOOD, BAD) if len(runs) == 1 else (color, color)
        correct = run.curve("length/correct_mean", "mean_correct")
        split.append(Series(curve_label(runs, run, "correct"), *correct, right, smooth=True))
        others = run.curve("length/wrong_mean", "mean_wrong")
        split.append(Series(curve_label(runs, run, "not correct"), *others, wrong, dashed=True, smooth=True))
        cut.append(Series(run.name, *run.curve("completions/clipped_ratio", "truncated"), color, smooth=True))
    tokens = {"y_title": "tokens", "from_zero": True}
    share = {"percent": True, "from_zero": True}
    figures = [
        CurveFigure("Length of correct and of other responses", split, runs=_who(runs), options=tokens),
        CurveFigure("Length of a response: mean, and p10 to p90", spread, runs=_who(runs), options=tokens),
        CurveFigure("Share cut at the token limit", cut, runs=_who(runs), options=share),
    ]
    return PageSection(
        "Length",
        "Generated tokens of a training response, the end-of-sequence token included.",
        figure_grid(figures, columns=3),
    )


def gradient_mass_section(runs: Sequence[RunCurves]) -> PageSection:
    """Return the share of the update that each tenth by length has, early and late in each run."""
    figures = []
    for run in runs:
        stretches = _decile_stretches(run, "gradient_mass")
        if stretches is not None:
            early, late, labels = stretches
            title = "Gradient mass by length and sign of the advantage" + (f": {run.name}" if len(runs) > 1 else "")
            figures.append(card(title, embed(decile_bars(early, late, labels=labels), title)))
    absent = [] if figures else [_PARTS.not_logged("Gradient mass", ["gradient_mass/…"], _who(runs))]
    return PageSection(
        "Gradient mass",
        "Which responses drive the update: the share of the summed |token weight × advantage| that falls on "
        "each tenth of the responses by length. If every response counted alike, each tenth would hold about 10 %.",
        _PARTS.grid(figures, absent, ""),
    )


def _decile_stretches(
    run: RunCurves, prefix: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], tuple[str, str]] | None:
    """Return the mean shares over the first and the last quarter of the steps, with a label for each.

    They are those of the metrics PREFIX/positive/decile_1 to PREFIX/negative/decile_10; None if none is logged.
    """
    steps = np.array([record["step"] for record in run.metrics], dtype=np.float64)
    shares = {
        sign: np.array(
            [[record.get(f"{prefix}/{sign}/decile_{d}", math.nan) for record in run.metrics] for d in range(1, 11)]
        )
        for sign in ("positive", "negative")
    }
    logged = np.isfinite(np.concatenate([*shares.values()])).any(0)
    if not logged.any():
        return None
    steps = steps[logged]
    width = max(1, len(steps) // 4)
    early = {sign: _known_means(table[:, logged][:, :width]) for sign, table in shares.items()}
    late = {sign: _known_means(table[:, logged][:, -width:]) for sign, table in shares.items()}
    labels = tuple(f"steps {part[0]:.0f}–{part[-1]:.0f}" for part in (steps[:width], steps[-width:]))
    return early, late, (labels[0], labels[1])


def _known_means(table: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each row [rows, n]; NaN for a row without any."""
    known = np.isfinite(table)
    counts = known.sum(axis=1)
    return np.where(counts > 0, np.where(known, table, 0.0).sum(axis=1) / np.maximum(counts, 1), np.nan)


def difficulty_section(runs: Sequence[RunCurves]) -> PageSection | None:
    """Return accuracy by difficulty, and HA-DW's belief and weights where a run uses it; None without any of them."""
    figures, captions = [], []
    if sorted_at_first := _by_difficulty(runs):
        figures += sorted_at_first
        captions.append(
            "The first evaluation sorts the problems by whether none, some or all of their samples were right; it is "
            "not drawn, since it says nothing else. Part of the change to the second is chance: what was right by "
            "luck is sorted as right. Bars: 95 % intervals."
        )
    if weighted := _weighted_difficulty(runs):
        figures += weighted
        captions.append(
            "HA-DW calls a prompt hard where its pass rate is below the belief, and easy otherwise. The belief "
            "should follow the accuracy within a few steps; where the two weights drift apart, it lags behind."
        )
    return PageSection("Difficulty", " ".join(captions), figure_grid(figures, columns=3)) if figures else None


def _by_difficulty(runs: Sequence[RunCurves]) -> list[CurveFigure]:
    """Return accuracy by difficulty: of one run a figure for each set, of several one for each set and difficulty."""
    figures: dict[str, list[Series]] = {}
    colors = dict(zip(DIFFICULTIES, (BAD, PALETTE[0], GOOD), strict=True))
    for color, run in _colored(runs):
        for benchmark in run.evals:
            later = run.difficulty(benchmark)
            for kind in DIFFICULTIES:
                found = [(step, scores[kind]) for step, scores in later if kind in scores]
                if not found:
                    continue
                what = f"{kind} right at first ({len(found[-1][1].scores_P):,})"
                ends = [score_interval(scores.scores_P, scores.clusters) for _, scores in found]
                title = f"Accuracy by difficulty: {benchmark}"
                label, own = what, colors[kind]
                if len(runs) > 1:
                    title = f"Problems {kind} right at first: {benchmark}"
                    label, own = f"{run.name} ({len(found[-1][1].scores_P):,})", color
                figures.setdefault(title, []).append(
                    Series(
                        label,
                        np.array([step for step, _ in found], dtype=np.float64),
                        np.array([scores.accuracy for _, scores in found]),
                        own,
                        low=np.array([low for low, _ in ends]),
                        high=np.array([high for _, high in ends]),
                        points=True,
                    )
                )
    options = {"percent": True, "from_zero": True}
    return [CurveFigure(title, series, "no evaluation", _who(runs), options) for title, series in figures.items()]


def _weighted_difficulty(runs: Sequence[RunCurves]) -> list[CurveFigure]:
    """Return HA-DW's belief beside the accuracy that it follows, and its mean weights; none if no run uses it."""
    belief, weights = [], []
    for color, run in _colored(runs):
        if not run.config.algorithm.hadw.enabled:
            continue
        accuracy = run.training_accuracy()
        belief.append(Series(curve_label(runs, run, "belief"), *run.metric("hadw/belief"), color))
        belief.append(Series(curve_label(runs, run, "accuracy"), *accuracy, color, dashed=True, smooth=True))
        for name, dashed in (("hard", False), ("easy", True)):
            values = run.metric(f"hadw/weight_{name}")
            weights.append(Series(curve_label(runs, run, name), *values, color, dashed=dashed, smooth=True))
    if not belief:
        return []
    return [
        CurveFigure(
            "Belief C, and the accuracy of each step", belief, ["hadw/belief"], _who(runs), {"percent": True}
        ),
        CurveFigure(
            "Mean weight Φ of a response with A ≠ 0", weights, ["hadw/weight_hard", "hadw/weight_easy"], _who(runs)
        ),
    ]


def updates_section(runs: Sequence[RunCurves]) -> PageSection:
    """Return clipping, entropy, the gap to the sampler, gradient norms and the refused steps."""
    clip = []
    for color, run in _colored(runs):
        clip.append(Series("all" if len(runs) == 1 else run.name, *run.metric("clip_ratio/region_mean"), color))
        if len(runs) == 1:
            clip.append(Series("A < 0, below", *run.metric("clip_ratio/low_mean"), BAD))
            clip.append(Series("A > 0, above", *run.metric("clip_ratio/high_mean"), GOOD))
    gap = "Gap to the sampler: mean |log-prob of learner − of sampler| per token"
    share = {"y_title": "of tokens", "percent": True, "from_zero": True}
    figures = [
        CurveFigure("Clip fraction", clip, ["clip_ratio/…"], _who(runs), share),
        _metric_figure(runs, "entropy", "Entropy of the policy", y_title="nats per token"),
        _metric_figure(runs, "rollout/logprob_gap", gap, y_title="nats per token", log=True),
        _metric_figure(runs, "grad_norm", "Gradient norm before clipping", log=True),
    ]
    skipped = [
        curve_label(runs, run, f"{count:.0f}") for run in runs if math.isfinite(count := run.last("steps/skipped"))
    ]
    refused = "Optimizer steps refused by the gradient guard"
    note = _REPORT.skipped_steps(skipped) if skipped else _PARTS.not_logged(refused, ["steps/skipped"], _who(runs))
    return PageSection(
        "Updates",
        "These curves show whether the policy changes steadily, still explores, and agrees with the sampler.",
        figure_grid(figures) + _clipped_by_length(runs) + note,
    )


def _clipped_by_length(runs: Sequence[RunCurves]) -> Markup:
    """Return a chart per run of the clipped share of tokens by length and sign; nothing if none is clipped."""
    cards = []
    for run in runs:
        stretches = _decile_stretches(run, "clip_ratio")
        if stretches is not None and any(
            np.nan_to_num(table).any() for part in stretches[:2] for table in part.values()
        ):
            early, late, labels = stretches
            title = "Clipped tokens by length and sign of the advantage" + (f": {run.name}" if len(runs) > 1 else "")
            bars = decile_bars(early, late, labels=labels, y_title="of the tokens of that sign and length")
            cards.append(card(title, embed(bars, title)))
    return _PARTS.grid(cards, [], "") if cards else Markup("")


def time_section(runs: Sequence[RunCurves]) -> PageSection:
    """Return a table per run of the seconds that each phase of a step takes."""
    tables = [table for run in runs if (table := _time_table(run, heading=run.name if len(runs) > 1 else ""))]
    absent = [] if tables else [_PARTS.not_logged("Time", ["timing/…"], _who(runs))]
    caption = (
        "Where a step's seconds go. Means are over all steps, so work that only some steps do, such as a save, "
        "counts with its average cost."
    )
    caption = " ".join([caption, *filter(None, (_speed_text(runs, run) for run in runs))])
    return PageSection("Time", caption, _PARTS.grid(tables, absent, ""))


def _speed_text(runs: Sequence[RunCurves], run: RunCurves) -> str:
    """Return how fast a run was, as the mean over its steps; empty if it was not logged."""
    kinds = {
        "speed/rollout_tokens": "{:,.0f} tokens a second in rollouts",
        "speed/update_tokens": "{:,.0f} in updates",
        "speed/mfu": "MFU {:.0%}",
        "memory/peak_over_planned": "{:.2f} times the planned memory",
    }
    found = {name: run.metric(name)[1] for name in kinds if name in run.every_metric}
    said = [kinds[name].format(np.nanmean(values)) for name, values in found.items()]
    return f"{curve_label(runs, run, ', '.join(said))}." if said else ""


def _time_table(run: RunCurves, *, heading: str) -> Markup | None:
    phases = [(name.removeprefix("timing/"), run.metric(name)[1]) for name in run.metric_names("timing/")]
    means = [(float(np.nansum(v)) / len(v), name) for name, v in phases if np.isfinite(v).any()]
    if not means:
        return None
    longest = max(seconds for seconds, _ in means) or 1.0
    rows = [
        (name.replace("_", " "), _seconds(seconds), seconds / longest)
        for seconds, name in sorted(means, reverse=True)
    ]
    return _PARTS.bars(rows, heading)


def every_metric_section(runs: Sequence[RunCurves]) -> PageSection:
    """Return a small chart of every metric that a run logged, folded by the first part of its name."""
    names = {name for run in runs for name in run.every_metric}
    return metric_section([_metric_figure(runs, name, name, height=130) for name in names])


def _metric_figure(runs: Sequence[RunCurves], name: str, title: str, **options: Any) -> CurveFigure:
    series = [Series(run.name, *run.metric(name), color, smooth=True) for color, run in _colored(runs)]
    return CurveFigure(title, series, [name], _who(runs), options)


def _who(runs: Sequence[RunCurves]) -> str:
    return "this run" if len(runs) == 1 else "these runs"


def _colored(runs: Sequence[RunCurves]) -> list[tuple[str, RunCurves]]:
    return [(PALETTE[i % len(PALETTE)], run) for i, run in enumerate(runs)]


def curve_label(runs: Sequence[RunCurves], run: RunCurves, what: str) -> str:
    """Return a curve's title, with the run's name where there are several."""
    return what if len(runs) == 1 else f"{run.name}: {what}"


def percent_text(share: float) -> str:
    """Return a share in percent with one digit after the point."""
    return f"{100 * share:.1f} %"


def count_of_steps(count: int) -> str:
    """Return a number of steps in words."""
    return "1 step" if count == 1 else f"{count} steps"


def interval_text(score: Score) -> str:
    """Return a score's interval; empty if none was stored."""
    return "" if math.isnan(score.low) else f"{100 * score.low:.1f}–{100 * score.high:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def duration_text(seconds: float) -> str:
    """Return a time in seconds, from two minutes in minutes, from two hours in hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
