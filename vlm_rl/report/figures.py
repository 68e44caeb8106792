"""Charts on a page: which are drawn, which are a sentence instead, and rows that are always full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.html import PageSection, macros
from vlm_rl.report.vega import embed

_PARTS = macros("vlm_rl.report", "parts.html")


@dataclass(frozen=True, slots=True, eq=False)
class CurveFigure:
    """A chart of curves; a sentence where there is nothing to draw, or nothing but zeros."""

    title: str
    series: Sequence[Series]
    needs: Sequence[str] | str = "no rollouts"  # the metrics that it is drawn from, or what is missing
    runs: str = "this run"  # the runs that did not log them
    options: Mapping[str, Any] = field(default_factory=dict)  # of charts.lines.lines

    @property
    def sentence(self) -> Markup | None:
        """Return the text in the chart's place; None if the chart is drawn."""
        if all(curve.empty for curve in self.series):
            return _PARTS.not_logged(self.title, self.needs, self.runs)
        if not any(np.nan_to_num(curve.y).any() for curve in self.series):
            return _PARTS.missing(f"{self.title}: 0 at every step.")
        return None

    def html(self) -> Markup:
        """Return a card with the chart, or the sentence."""
        return self.sentence or card(self.title, embed(lines(self.series, **self.options), self.title))


def card(title: str, chart: Markup) -> Markup:
    """Return a chart under its title."""
    return _PARTS.figure(title, chart)


def metric_section(figures: Sequence[CurveFigure], *, note: str = "") -> PageSection:
    """Return the section of small charts, each titled with its metric's name, folded by the first part of that name.

    `note` ends the caption.
    """
    groups: dict[str, list[CurveFigure]] = {}
    for figure in sorted(figures, key=lambda figure: figure.title):
        first, slash, _ = figure.title.partition("/")
        groups.setdefault(first if slash else "", []).append(figure)
    folds = []
    for prefix, members in sorted(groups.items()):
        drawn = [figure.html() for figure in members if figure.sentence is None]
        zero = [figure.title for figure in members if figure.sentence is not None]
        sentences = [_PARTS.missing(f"0 at every step, or never a number: {', '.join(zero)}.")] if zero else []
        folds.append((prefix or "the step as a whole", len(members), drawn, sentences))
    caption = "All of metrics.jsonl, by the first part of a metric's name; docs/metrics.md says what each one means."
    body = _PARTS.folds(folds) if folds else _PARTS.missing("No metric is logged.")
    return PageSection("Every metric", f"{caption} {note}".rstrip(), body)


def figure_grid(figures: Sequence[CurveFigure], *, columns: int = 2) -> Markup:
    """Return the charts in full rows, whatever their number, and below them the sentences of the others.

    `columns`: 2, or 3 for three charts in one row.
    """
    drawn = [figure.html() for figure in figures if figure.sentence is None]
    sentences = [figure.sentence for figure in figures if figure.sentence is not None]
    return _PARTS.grid(drawn, sentences, "three" if columns == len(drawn) == 3 else "")
