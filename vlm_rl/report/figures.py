"""Charts on a page: which are drawn, which are a sentence instead, and rows that are always full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from vlm_rl.report.charts.lines import Series, lines
from vlm_rl.report.html import macros
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
        """Return what is said in the chart's place; None if it is drawn."""
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


def figure_grid(figures: Sequence[CurveFigure], *, columns: int = 2) -> Markup:
    """Return the charts in full rows, whatever their number, and below them the sentences of the others.

    `columns`: 2, or 3 for three charts in one row.
    """
    drawn = [figure.html() for figure in figures if figure.sentence is None]
    sentences = [figure.sentence for figure in figures if figure.sentence is not None]
    return _PARTS.grid(drawn, sentences, "three" if columns == len(drawn) == 3 else "")
