"""The section of the report on how steady a run was: evaluations that fall or waver, updates that jump."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlm_rl.report.html import PageSection, macros
from vlm_rl.report.run_curves import RunCurves
from vlm_rl.run.stability import FEWEST, FIRST, FIRST_LOSSES, GROWTH

_PARTS = macros("vlm_rl.report", "parts.html")
_MOST_NAMED = 8  # steps in a cell


def stability_section(runs: Sequence[RunCurves]) -> PageSection:
    """Return the tables of evaluations and of spikes, each with a row per run."""
    caption = (
        "Drop: the best evaluation less the last. Deviation: the standard deviation between evaluations, from the "
        f"differences of neighbours, so that slow learning counts little; of {FEWEST} evaluations or more. A spike: "
        f"a gradient norm above {GROWTH:.0f} times the median of the steps before it, from the {FIRST + 1}th on, or "
        f"a loss further from that median than {GROWTH:.0f} times the usual distance, from the "
        f"{FIRST_LOSSES + 1}st on."
    )
    evaluated = [
        [
            run.name,
            benchmark,
            str(moved.num_evaluations),
            *(f"{100 * share:.1f}" for share in (moved.best, moved.last, moved.drop)),
            "-" if math.isnan(moved.between_std) else f"{100 * moved.between_std:.1f}",
        ]
        for run in runs
        for benchmark, moved in run.steadiness.items()
    ]
    head = ["run", "set", "evaluations", "best, %", "last, %", "drop, points", "deviation, points"]
    body = (
        _PARTS.table(head, evaluated, numbers=2)
        if evaluated
        else _PARTS.missing("There are no two evaluations of one set to compare.")
    )
    logged = [run for run in runs if run.spikes.norms or run.spikes.losses]
    if not logged:
        who = "this run" if len(runs) == 1 else "these runs"
        return PageSection("Stability", caption, body + _PARTS.not_logged("Spikes", ["grad_norm", "loss"], who))
    spikes = [
        [
            run.name,
            _counted(run.spikes.norm_steps, enough=len(run.spikes.norms) > FIRST),
            _counted(run.spikes.loss_steps, enough=len(run.spikes.losses) > FIRST_LOSSES),
        ]
        for run in logged
    ]
    head = ["run", "norm spikes", "loss spikes"]
    return PageSection("Stability", caption, body + _PARTS.table(head, spikes))


def _counted(steps: Sequence[int], *, enough: bool) -> str:
    """Return how many steps there are and which."""
    if not enough:
        return "too few steps"
    if not steps:
        return "none"
    named = ", ".join(map(str, steps[:_MOST_NAMED])) + (", …" if len(steps) > _MOST_NAMED else "")
    return f"{len(steps)} (step{'s' * (len(steps) > 1)} {named})"
