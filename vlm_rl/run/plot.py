"""A run's curves as a figure of matplotlib, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vlm_rl.errors import UserError, near
from vlm_rl.run.eval_result import EvalResult

_PLOTS = {  # what is asked for -> axis, and the metrics that are drawn with their labels
    "length": (
        "tokens of a response",
        {"completions/mean_length": "all", "length/correct_mean": "right", "length/wrong_mean": "wrong"},
    ),
    "reward": ("reward", {"reward": "mean"}),
}


class RunPlot(Figure):
    """A figure that a notebook shows without pyplot, which would keep every figure in memory."""

    def _repr_png_(self) -> bytes:
        place = BytesIO()
        self.savefig(place, format="png", dpi=100)
        return place.getvalue()


def plot_run(name: str, metrics: Sequence[Mapping[str, float]], evals: Sequence[EvalResult], what: str) -> RunPlot:
    """Draw metrics or evaluations over the steps.

    Args:
        name: of the run, for the title.
        metrics: one record per step.
        evals: the run's evaluations.
        what: a key of _PLOTS, accuracy, or the name of a metric.

    Raises UserError for what the run does not have.
    """
    figure = RunPlot(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    if what == "accuracy":
        _draw_evaluations(axes, evals, name)
        label = "accuracy, with 95 % interval"
    else:
        label, names = _PLOTS.get(what, (what, {what: what}))
        logged = dict.fromkeys(key for record in metrics for key in record if key not in ("step", "attempt"))
        if not logged:
            raise UserError(f"{name} has logged no step, so there is nothing to plot yet")
        if not (drawn := [key for key in names if key in logged]):
            known = [each for each, (_, wanted) in _PLOTS.items() if wanted.keys() & logged.keys()]
            known += [*["accuracy"] * bool(evals), *logged]
            hint = near(what, known, otherwise=f"it has {', '.join(known[:12])}, ...: run.metrics_frame().columns")
            raise UserError(f"{name} has no metric {what!r}: {hint}")
        for key in drawn:
            steps = [record["step"] for record in metrics]
            axes.plot(steps, [record.get(key, float("nan")) for record in metrics], marker=".", label=names[key])
    axes.set(xlabel="step")
    axes.set_ylabel(label, parse_math=False)  # a name with dollar signs is no formula
    axes.set_title(name, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if len(axes.get_legend_handles_labels()[0]) > 1 or what == "accuracy":
        axes.legend()
    return figure


def _draw_evaluations(axes: Any, evals: Sequence[EvalResult], name: str) -> None:
    """Draw a point with its interval for each evaluation, and a line for each set. Raises UserError for none."""
    if not evals:
        raise UserError(f"{name} has no evaluation to plot; give fit its eval_data, or set data.eval and eval.every")
    for benchmark in dict.fromkeys(result.benchmark for result in evals):
        results = [result for result in evals if result.benchmark == benchmark]
        accuracies = [result.accuracy for result in results]
        ends = [result.summary.get("interval") or (result.accuracy,) * 2 for result in results]
        below = [value - low for value, (low, _) in zip(accuracies, ends, strict=True)]
        above = [high - value for value, (_, high) in zip(accuracies, ends, strict=True)]
        steps = [result.step for result in results]
        axes.errorbar(steps, accuracies, yerr=[below, above], marker="o", capsize=3, label=benchmark)
    axes.set_ylim(-0.02, 1.02)
