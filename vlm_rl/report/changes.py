"""What training changed, problem by problem: each evaluation against the one that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vlm_rl.paired import Paired
from vlm_rl.report.charts.frame import PALETTE
from vlm_rl.report.charts.points import Interval, forest
from vlm_rl.report.figures import card
from vlm_rl.report.html import PageSection, macros
from vlm_rl.report.run_curves import RunCurves, holds_training
from vlm_rl.report.vega import embed
from vlm_rl.run.best import paired_change

_PARTS = macros("vlm_rl.report", "parts.html")


@dataclass(frozen=True, slots=True)
class Change:
    """Two evaluations of one benchmark over the problems that both have."""

    benchmark: str
    who: str  # what is compared with what, as in "step 24 against step 0"
    paired: Paired
    judged: str = ""  # by which part of the reward, where it is not the grader

    @property
    def sentence(self) -> str:
        """Return the difference with its interval in words, and the problems won and lost."""
        p = self.paired
        low, high = (100 * end for end in p.interval)
        points = f"{100 * abs(p.difference):.1f} points"
        what = f"rises by {points} (" if low > 0 else f"falls by {points} (" if high < 0 else ""
        what = what or f"may not have changed ({100 * p.difference:+.1f} points, "
        lengths = ""
        if p.length_a is not None and p.length_b is not None:
            lengths = f" Responses have {p.length_b:.0f} tokens on average, against {p.length_a:.0f}"
            if p.length_interval is not None:
                shortest, longest = p.length_interval
                lengths += f" ({p.length_b - p.length_a:+.1f}, 95 % interval {shortest:+.1f} to {longest:+.1f})"
            lengths += "."
        return (
            f"{self.benchmark}, {self.who}: accuracy{self.judged} {what}95 % interval {low:+.1f} to {high:+.1f}; "
            f"{p.n:,} problems, {p.won:,} won, {p.lost:,} lost).{lengths}"
        )


def changes_of(runs: Sequence[RunCurves]) -> list[Change]:
    """Return the last evaluation of each benchmark against the first or, of several runs, against the first run's."""
    changes = []
    for run in runs[1:] or runs:
        for benchmark, results in run.evals.items():
            others = runs[0].evals.get(benchmark, [])
            if not others or (before := others[0] if run is runs[0] else others[-1]) is results[-1]:
                continue
            paired = paired_change(before, results[-1])
            rules = dict.fromkeys(str(r.summary.get("rule", "")) for r in (before, results[-1]))
            parts_decided = any(rule.startswith("reward.") for rule in rules)
            judged = f", judged by {' and '.join(rules)}," if parts_decided else ""
            who = f"step {results[-1].step} against step {before.step}"
            if run is not runs[0]:
                who = f"{run.name} against {runs[0].name}"
            if paired is not None:
                changes.append(Change(benchmark, who, paired, judged))
    return changes


def change_section(runs: Sequence[RunCurves]) -> PageSection | None:
    """Return a sentence for each paired difference, and forest plots of accuracy and length; None without a pair."""
    changes = changes_of(runs)
    if not changes:
        return None
    same_who = len({c.who for c in changes}) == 1
    colors = [PALETTE[place % len(PALETTE)] for place in range(len(changes))]
    labels = [c.benchmark if same_who else f"{c.benchmark}: {c.who}" for c in changes]
    points = [
        Interval(label, c.paired.difference, *c.paired.interval, color)
        for label, c, color in zip(labels, changes, colors, strict=True)
    ]
    tokens = [
        Interval(
            label, c.paired.length_b - c.paired.length_a, *(c.paired.length_interval or (math.nan, math.nan)), color
        )
        for label, c, color in zip(labels, changes, colors, strict=True)
        if c.paired.length_a is not None and c.paired.length_b is not None
    ]
    who = f", {changes[0].who}" if same_who else ""
    plots = [
        card(f"Change of {what}{who}", embed(plot, f"Change of {what}{who}"))
        for what, plot in (
            ("accuracy", forest(points, x_title="points, with the 95 % interval", percent=True)),
            ("length", forest(tokens, x_title="tokens, with the 95 % interval")),
        )
        if plot is not None
    ]
    caption = (
        "The same problems are compared one by one, so that the interval is that of their differences. A hollow dot: "
        "the interval holds 0, or there is none, where all differences are equal."
    )
    best = [(run.name, run.run.best()) for run in runs if holds_training(run.run)]
    named = [f"{f'{name}, ' if len(runs) > 1 else ''}{known.sentence()}." for name, known in best if known]
    return PageSection(
        "Change", caption, _PARTS.changes([*(c.sentence for c in changes), *named], _PARTS.grid(plots, [], ""))
    )
