"""The section of the report on where responses look at their images: S_t by place and statement, and as colours.

S_t says how much the image changes the sampled token (vlm_rl.credit). It is known of runs with a credit that is not
uniform, or with a bonus for looking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vlm_rl.report.charts.frame import BAD, GOOD
from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.figures import card
from vlm_rl.report.html import PageSection, macros
from vlm_rl.report.looks import ColoredResponse, color_response, looks_by_move
from vlm_rl.report.run_curves import RunCurves
from vlm_rl.report.vega import embed
from vlm_rl.stats import estimate

_PARTS = macros("vlm_rl.report", "parts.html")
_REPORT = macros("vlm_rl.report", "report.html")
_MOST_RESPONSES = 4
_MOST_STEPS = 50  # whose responses are read for what they say
_SAYS = {"reflection": "looks again", "backtracking": "turns back", "repetition": "repeats itself"}
_COLUMNS = ["prompt_id", "verdict", "length", "tokens", "visual_dependence"]


def looking_section(runs: Sequence[RunCurves]) -> PageSection | None:
    """Return curves of S_t by place and verdict, and coloured responses; None if no run knows S_t."""
    charts, responses, said = [], [], []
    for run in runs:
        suffix = f": {run.name}" if len(runs) > 1 else ""
        if series := _by_place(run):
            title = f"Mean S by tenth of the response{suffix}"
            spec = lines(series, x_title="tenth of the response", from_zero=True)
            charts.append(card(title, embed(spec, title)))
        responses += _colored_responses(run, suffix)
        said += _by_what_is_said(run, suffix)
    if not charts and not responses:
        return None
    caption = (
        "S is how much a token's probability depends on the image: the k3 divergence at the sampled token between "
        "the policy with the image and with a blank one, 0 to 10. Dashed: the first quarter of the steps; solid: the "
        "last. The shade of a token grows with S; one without a shade would be about as likely without the image."
    )
    body = _PARTS.grid(charts, [], "")
    if said:
        head = ["where a response", "responses", "mean S there", "elsewhere in them", "difference, 95 % interval"]
        body += _PARTS.table(head, said, 1) + _REPORT.table_note(
            "Is the image used where a response says that it looks again? By statement, of the stored responses."
        )
    body += _REPORT.colored(responses)
    return PageSection("Looking", caption, body)


def _by_place(run: RunCurves) -> list[Series]:
    """Return mean S_t by tenth, right and wrong apart, over the first and the last quarter of the steps."""
    series = []
    for verdict, color in (("correct", GOOD), ("wrong", BAD)):
        names = [f"visual/dependence/{verdict}/tenth_{n}" for n in range(1, 11)]
        table = np.array([[record.get(name, math.nan) for record in run.metrics] for name in names]).reshape(10, -1)
        table = table[:, np.isfinite(table).all(axis=0)]
        if not table.size:
            continue
        width = max(1, table.shape[1] // 4)
        tenths = np.arange(1, 11, dtype=np.float64)
        stretches = {"first steps": table[:, :width], "last steps": table[:, -width:]}
        for label, part in stretches.items():
            if label == "last steps" or table.shape[1] > 1:
                name = f"{verdict}, {label}"
                series.append(Series(name, tenths, part.mean(axis=1), color, dashed=label == "first steps"))
    return series


def _by_what_is_said(run: RunCurves, suffix: str) -> list[list[str]]:
    """Return a row for each move: S_t of the statements that make it, and of the same responses' other tokens.

    The interval is over the problems.
    """
    looks: list[dict[str, tuple[float, float]]] = []
    problems: list[str] = []
    for step in run.run.rollout_steps()[-_MOST_STEPS:]:
        table = run.run.rollouts(step, _COLUMNS)
        rows = table.to_pylist() if "visual_dependence" in table.column_names else []
        seeing = [row for row in rows if row["visual_dependence"]]
        looks += [looks_by_move(row) for row in seeing]
        problems += [row["prompt_id"] for row in seeing]
    lines = []
    for move, words in _SAYS.items():
        if not (found := [each for each, look in enumerate(looks) if move in look]):
            continue
        inside, outside = np.array([looks[each][move] for each in found]).T
        change = estimate(inside - outside, clusters=[problems[each] for each in found])
        interval = f" ({change.low:+.3f} to {change.high:+.3f})" if change.has_interval else ""
        means = f"{inside.mean():.3f}", f"{outside.mean():.3f}", f"{change.mean:+.3f}{interval}"
        lines.append([f"{words}{suffix}", str(len(found)), *means])
    return lines


def _colored_responses(run: RunCurves, suffix: str) -> list[ColoredResponse]:
    """Return the stored responses with S_t of the newest step that has some, right and wrong ones in turn."""
    for step in reversed(run.run.rollout_steps()):
        table = run.run.rollouts(step, _COLUMNS)
        if "visual_dependence" not in table.column_names:
            return []
        rows = [row for row in table.to_pylist() if row["visual_dependence"]]
        if rows:
            return [color_response(row, f"{row['prompt_id']}, step {step}{suffix}") for row in rows[:_MOST_RESPONSES]]
    return []
