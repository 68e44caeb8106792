"""Charts as SVG fragments whose colours are CSS variables, so that one file reads in light and dark.

Matplotlib draws with placeholder colours; `svg_of` puts `var(--...)` in their place, gives every id a
prefix of its own (several figures share a page) and drops what a fragment does not need. No chart is
ever drawn without data: the functions return None then.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from vlm_rl.stats import running_mean

# placeholder -> CSS variable; vlm_rl/assets/report.css gives both themes' values
_VARIABLES = {
    "#010101": "--ink",
    "#010102": "--muted",
    "#010103": "--grid",
    "#010104": "--good",
    "#010105": "--bad",
    "#010110": "--c0",
    "#010111": "--c1",
    "#010112": "--c2",
    "#010113": "--c3",
    "#010114": "--c4",
    "#010115": "--c5",
    "#010116": "--c6",
    "#010117": "--c7",
    "#010118": "--c8",
    "#010119": "--c9",
}
INK, MUTED, GRID, GOOD, BAD = list(_VARIABLES)[:5]
PALETTE = tuple(list(_VARIABLES)[5:])

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # for measuring; the page's own font, narrower, is what shows
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.02,
    "axes.ymargin": 0.08,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


# Inches. The page shows every chart at the same scale in cards of a half, a third or the full width.
FULL, HALF, THIRD = (11.2, 2.7), (5.4, 2.6), (3.5, 2.1)


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One curve over training steps; NaN where a step has no value."""

    label: str
    x: np.ndarray
    y: np.ndarray
    color: str = PALETTE[0]
    dashed: bool = False
    low: np.ndarray | None = None  # a band, or with `points` the ends of the error bars
    high: np.ndarray | None = None
    band_alpha: float = 0.16  # opacity of the band
    points: bool = False  # measurements apart from the curve: markers joined by a thin line
    smooth: bool = False  # thin for each step, bold for the running mean

    @property
    def empty(self) -> bool:
        return not bool(np.isfinite(self.y).any())


def line_chart(
    series: Sequence[Series],
    *,
    description: str,
    y_label: str = "",
    percent: bool = False,
    log: bool = False,
    from_zero: bool = False,
    legend: bool = True,
    size: tuple[float, float] = HALF,
) -> str | None:
    """Curves over training steps as an SVG fragment; None without a finite value.

    `log` asks for a logarithmic axis and gets it where the values are positive and span a decade.
    """
    shown = [one for one in series if not one.empty]
    if not shown:
        return None
    with mpl.rc_context(_style(description)):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        for one in shown:
            _draw(axes, one)
        _scale_y(axes, shown, percent=percent, log=log, from_zero=from_zero)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1, steps=[1, 2, 5, 10]))
        axes.set_xlabel("step")
        axes.set_ylabel(y_label)
        if legend:
            _legend(axes, size[0])
        return svg_of(figure, description)


def _style(salt: str) -> dict[Any, Any]:
    return {**STYLE, "svg.hashsalt": salt}  # the salt makes the ids of clip paths the same in every run


def _draw(axes: Axes, one: Series) -> None:
    keep = np.isfinite(one.y)
    x, y = one.x[keep], one.y[keep]
    if one.points:
        if one.low is not None and one.high is not None:
            errors = np.stack([y - one.low[keep], one.high[keep] - y]).clip(min=0)
            axes.errorbar(x, y, errors, fmt="none", ecolor=one.color, elinewidth=1.1, capsize=2.5)
        axes.plot(x, y, color=one.color, lw=1.0, ls=(0, (2, 2)), marker="o", ms=4.6, label=plain(one.label))
        return
    if one.low is not None and one.high is not None:
        axes.fill_between(x, one.low[keep], one.high[keep], color=one.color, alpha=one.band_alpha, lw=0)
    style = {"color": one.color, "ls": (0, (4, 2)) if one.dashed else "-", "label": plain(one.label)}
    marker = {"marker": "o", "ms": 4} if len(x) == 1 else {}
    if one.smooth and len(y) >= 12:
        axes.plot(x, y, color=one.color, lw=0.8, alpha=0.35)
        y = running_mean(y, window_for(len(y)))
    axes.plot(x, y, **style, **marker)


def window_for(num_steps: int) -> int:
    """How many steps the bold curves average: about a twentieth of the run, odd, at least 5."""
    return max(5, num_steps // 20) | 1


def _scale_y(axes: Axes, series: Sequence[Series], *, percent: bool, log: bool, from_zero: bool) -> None:
    values = np.concatenate([one.y[np.isfinite(one.y)] for one in series])
    if log and values.min() > 0 and values.max() / values.min() > 10:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if values.max() / values.min() < 100 else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        return
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    if percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=False)


def _legend(axes: Axes, width: float) -> None:
    """Above the axes, in as many columns as `width` inches hold; none for a single curve."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = max(1, int((width - 0.7) / (0.4 + 0.075 * max(map(len, labels)))))
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.1}
        axes.legend(handles, labels, ncols=min(columns, len(labels)), **place)


def mass_chart(
    early: Mapping[str, np.ndarray],
    late: Mapping[str, np.ndarray],
    *,
    labels: tuple[str, str],
    description: str,
    size: tuple[float, float] = HALF,
) -> str:
    """Shares of the gradient mass by length decile, positive upwards and negative downwards.

    `early` and `late` hold "positive" and "negative" shares [10] of two stretches of the run.
    """
    with mpl.rc_context(_style(description)):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        places = np.arange(1, len(early["positive"]) + 1)
        for shift, part, alpha, name in ((-0.2, early, 0.42, labels[0]), (0.2, late, 1.0, labels[1])):
            axes.bar(places + shift, part["positive"], 0.36, color=GOOD, alpha=alpha, label=f"A > 0, {name}")
            axes.bar(places + shift, -part["negative"], 0.36, color=BAD, alpha=alpha, label=f"A < 0, {name}")
        axes.axhline(0, color=MUTED, lw=0.8)
        axes.set_xticks(places)
        axes.set_xlabel("decile of response length (1: shortest)")
        axes.set_ylabel("share of gradient mass")
        axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.0%}")
        _legend(axes, size[0])
        return svg_of(figure, description)


def svg_of(figure: Figure, description: str) -> str:
    """The figure as an accessible inline <svg>: themable, ids unique, no metadata, no declarations."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s+xmlns(:xlink)?=\"[^\"]*\"", "", svg).replace("xlink:href", "href")
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    svg = svg.replace("font-family: 'DejaVu Sans'", "font-family: var(--sans)")
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # its selector is *: the whole page
    prefix = re.sub(r"\W+", "-", description.lower())
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    for name in ("width", "height"):  # the page decides; the viewBox keeps the proportions
        svg = re.sub(rf'^(<svg[^>]*?) {name}="[^"]*"', r"\1", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{_attribute(description)}"', 1)


def plain(text: str) -> str:
    """Text that Matplotlib shows as it is: no mathematics between dollars, no label hidden by an underscore."""
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
