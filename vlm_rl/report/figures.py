"""Charts on a page: which are drawn, which are a sentence instead, and rows that are always full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vlm_rl.report.charts import Series, lines
from vlm_rl.report.html import escape
from vlm_rl.report.vega import embed


@dataclass(frozen=True, slots=True, eq=False)
class Figure:
    """A chart over training steps; a sentence where there is nothing to draw, or nothing but zeros."""

    title: str
    series: Sequence[Series]
    absent: str  # HTML: what was not logged
    options: Mapping[str, Any] = field(default_factory=dict)  # of charts.lines

    @property
    def sentence(self) -> str:
        """What stands in the chart's place; empty if it is drawn."""
        if all(one.empty for one in self.series):
            return missing(f"{escape(self.title)}: not logged {self.absent}.")
        if not any(np.nan_to_num(one.y).any() for one in self.series):
            return missing(f"{escape(self.title)}: 0 at every step.")
        return ""

    def html(self) -> str:
        """A card with the chart, or the sentence."""
        return self.sentence or card(self.title, embed(lines(self.series, **self.options), self.title))


def card(title: str, chart: str) -> str:
    return f"<figure class='card'><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def figure_grid(figures: Sequence[Figure], *, columns: int = 2) -> str:
    """The charts in full rows, whatever their number, and below them the sentences of the others.

    `columns`: 2, or 3 for three charts in one row.
    """
    drawn = [one for one in figures if not one.sentence]
    sentences = "".join(one.sentence for one in figures)
    if columns == len(drawn) == 3:
        return f"<div class='grid three'>{''.join(one.html() for one in drawn)}</div>{sentences}"
    charts = [one.html() for one in drawn]
    return (f"<div class='grid'>{''.join(charts)}</div>" if charts else "") + sentences


def missing(text: str) -> str:
    return f"<p class='missing'>{text}</p>"
