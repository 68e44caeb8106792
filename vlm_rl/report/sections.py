"""The sections of the report that show curves: each a heading, how to read it, and its charts.

A section whose metrics a run did not log says so in words; there is no empty plot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlm_rl.report.charts import BAD, GOOD, PALETTE, Series, mass_bars
from vlm_rl.report.figures import Figure, card, figure_grid, missing
from vlm_rl.report.html import Section, escape
from vlm_rl.report.run_curves import RunCurves, Score
from vlm_rl.report.vega import embed


def reward_section(curves: Sequence[RunCurves]) -> Section:
    total = _metric_figure(curves, "reward", "Mean reward of a response")
    parts = [
        _metric_figure(curves, f"rewards/{part}/mean", f"Part: {part}") for part in ("accuracy", "format", "overlong")
    ]
    return Section(
        "Reward",
        "Mean over the responses of each training step, and its three parts apart. "
        "Thin: each step; bold: a running mean.",
        total.html() + figure_grid(parts, columns=3),
    )


def accuracy_section(curves: Sequence[RunCurves]) -> Section:
    train, held_out = [], []
    for color, one in _colored(curves):
        x, y = one.rollouts.steps, one.rollouts.accuracy
        if not np.isfinite(y).any():
            x, y = one.metric("rewards/accuracy/mean")
        train.append(Series(label(curves, one, "training responses"), x, y, color, smooth=True))
        for benchmark, scores in one.scores.items():
            held_out.append(_score_series(scores, label(curves, one, benchmark), color if len(curves) > 1 else ""))
    colors = [PALETTE[(1 + i) % len(PALETTE)] for i in range(len(held_out))]
    held_out = [replace(s, color=c) if not s.color else s for s, c in zip(held_out, colors, strict=True)]
    figure = _figure("Share of correct answers", train + held_out, "no rollouts, no evaluation", percent=True)
    return Section(
        "Accuracy",
        "Curve: responses sampled for training. Points: the stored evaluations, with their 95 % interval.",
        figure.html(),
    )


def _score_series(scores: Sequence[Score], label: str, color: str) -> Series:
    columns = np.array([[s.step, s.accuracy, s.low, s.high] for s in scores], dtype=np.float64).T
    x, y, low, high = columns
    return Series(label, x, y, color, low=low, high=high, points=True)


def length_section(curves: Sequence[RunCurves]) -> Section:
    mean, split, cut = [], [], []
    for color, one in _colored(curves):
        r = one.rollouts
        if len(r.steps):
            mean.append(Series(one.name, r.steps, r.mean, color, low=r.p10, high=r.p90))
        else:
            mean.append(Series(one.name, *one.metric("completions/mean_length"), color))
        right, wrong = (GOOD, BAD) if len(curves) == 1 else (color, color)
        split.append(Series(label(curves, one, "correct"), r.steps, r.mean_correct, right, smooth=True))
        split.append(
            Series(label(curves, one, "not correct"), r.steps, r.mean_wrong, wrong, dashed=True, smooth=True)
        )
        x, y = (r.steps, r.truncated) if len(r.steps) else one.metric("completions/clipped_ratio")
        cut.append(Series(one.name, x, y, color))
    whole = _figure("Length of a response: mean, and p10 to p90 as a band", mean, y_title="tokens", from_zero=True)
    figures = [
        _figure("Length of correct and of other responses", split, "no rollouts", y_title="tokens", from_zero=True),
        _figure("Share cut at the token limit", cut, percent=True, from_zero=True),
    ]
    return Section(
        "Length",
        "Generated tokens of a training response, the end-of-sequence token included.",
        whole.html() + figure_grid(figures),
    )


def gradient_mass_section(curves: Sequence[RunCurves]) -> Section:
    figures = []
    for one in curves:
        stretches = _mass_stretches(one)
        if stretches is None:
            continue
        early, late, labels = stretches
        title = "Gradient mass by length and sign of the advantage" + (f": {one.name}" if len(curves) > 1 else "")
        figures.append(card(title, embed(mass_bars(early, late, labels=labels), title)))
    body = "".join(figures) or missing("Not logged by this run: <code>gradient_mass/…</code>.")
    return Section(
        "Gradient mass",
        "Which responses the update listens to: the share of the summed |token weight × advantage| that falls on "
        "each tenth of the responses by length. Did every response count alike, each tenth would hold about 10 %.",
        f"<div class='grid'>{body}</div>" if len(curves) % 2 == 0 else body,
    )


def _mass_stretches(
    one: RunCurves,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], tuple[str, str]] | None:
    """Mean shares over the first and the last quarter of the steps, with a label for each."""
    shares = {
        sign: np.stack([one.metric(f"gradient_mass/{sign}/decile_{d}")[1] for d in range(1, 11)])
        for sign in ("positive", "negative")
        if one.metric(f"gradient_mass/{sign}/decile_1")[1].size
    }
    if len(shares) < 2:
        return None
    logged = np.isfinite(shares["positive"]).all(0) & np.isfinite(shares["negative"]).all(0)
    if not logged.any():
        return None
    steps = one.metric("gradient_mass/positive/decile_1")[0][logged]
    width = max(1, len(steps) // 4)
    early = {sign: table[:, logged][:, :width].mean(1) for sign, table in shares.items()}
    late = {sign: table[:, logged][:, -width:].mean(1) for sign, table in shares.items()}
    labels = tuple(f"steps {part[0]:.0f}–{part[-1]:.0f}" for part in (steps[:width], steps[-width:]))
    return early, late, (labels[0], labels[1])


def updates_section(curves: Sequence[RunCurves]) -> Section:
    clip = []
    for color, one in _colored(curves):
        clip.append(Series("all" if len(curves) == 1 else one.name, *one.metric("clip_ratio/region_mean"), color))
        if len(curves) == 1:
            clip.append(Series("A < 0, below", *one.metric("clip_ratio/low_mean"), BAD))
            clip.append(Series("A > 0, above", *one.metric("clip_ratio/high_mean"), GOOD))
    gap = "Gap to the sampler: mean |log-prob of learner − of sampler| per token"
    figures = [
        _figure(
            "Clip fraction", clip, "<code>clip_ratio/…</code>", y_title="of tokens", percent=True, from_zero=True
        ),
        _metric_figure(curves, "entropy", "Entropy of the policy", y_title="nats per token"),
        _metric_figure(curves, "rollout/logprob_gap", gap, y_title="nats per token", log=True),
        _metric_figure(curves, "grad_norm", "Gradient norm before clipping", log=True),
    ]
    skipped = [
        escape(label(curves, one, f"{count:.0f}"))
        for one in curves
        if math.isfinite(count := one.last("steps/skipped"))
    ]
    note = (
        f"<p class='caption'>Optimizer steps refused by the gradient guard: {'; '.join(skipped)}.</p>"
        if skipped
        else missing("Not logged by this run: <code>steps/skipped</code>.")
    )
    return Section(
        "Updates",
        "Whether the policy changes steadily, still explores, and is the one that the sampler runs.",
        figure_grid(figures) + note,
    )


def time_section(curves: Sequence[RunCurves]) -> Section:
    tables = [table for one in curves if (table := _time_table(one, title=len(curves) > 1))]
    body = "".join(tables) or missing("Not logged by this run: <code>timing/…</code>.")
    caption = (
        "Where a step's seconds go: the mean over all steps, so that work of some steps only, a save, weighs what it "
        "costs in the long run."
    )
    return Section("Time", caption, f"<div class='grid'>{body}</div>")


def _time_table(one: RunCurves, *, title: bool) -> str:
    phases = [(name.removeprefix("timing/"), one.metric(name)[1]) for name in one.metric_names("timing/")]
    means = [(float(np.nansum(v)) / len(v), name) for name, v in phases if np.isfinite(v).any()]
    if not means:
        return ""
    longest = max(seconds for seconds, _ in means) or 1.0
    rows = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td class='number'>{_seconds(seconds)}</td>"
        f"<td class='bar'><i style='width:{100 * seconds / longest:.1f}%'></i></td></tr>"
        for seconds, name in sorted(means, reverse=True)
    )
    head = f"<h3>{escape(one.name)}</h3>" if title else ""
    return f"<div class='card bars'>{head}<table>{rows}</table></div>"


def _metric_figure(curves: Sequence[RunCurves], name: str, title: str, **options: Any) -> Figure:
    series = [Series(one.name, *one.metric(name), color, smooth=True) for color, one in _colored(curves)]
    return _figure(title, series, f"<code>{escape(name)}</code>", **options)


def _figure(title: str, series: Sequence[Series], absent: str = "no rollouts", **options: Any) -> Figure:
    return Figure(title, series, f"by this run ({absent})", options)


def _colored(curves: Sequence[RunCurves]) -> list[tuple[str, RunCurves]]:
    return [(PALETTE[i % len(PALETTE)], one) for i, one in enumerate(curves)]


def label(curves: Sequence[RunCurves], one: RunCurves, what: str) -> str:
    return what if len(curves) == 1 else f"{one.name}: {what}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def interval(score: Score, before: str = "", after: str = "") -> str:
    """The interval between `before` and `after`; nothing where none was stored."""
    return "" if math.isnan(score.low) else f"{before}{100 * score.low:.1f}–{100 * score.high:.1f} %{after}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
