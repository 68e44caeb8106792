"""A chart in its card, as the panels and the exported page show it."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from vlm_rl.report.charts.frame import PALETTE
from vlm_rl.report.vega import Spec, embed


@dataclass(frozen=True, slots=True)
class ChartCard:
    """One or more charts under one title."""

    title: str
    charts: tuple[Markup, ...]
    caption: str = ""
    hint: str = ""  # what a click does; the exported page has no clicks


def chart_card(title: str, *specs: Spec | None, caption: str = "", hint: str = "") -> list[ChartCard]:
    """Return the card of some charts in a list; the empty list where none of them has data.

    Args:
        title: of the card.
        specs: of the charts; None for one without data.
        caption: below the charts.
        hint: what a click does.
    """
    charts = tuple(embed(spec, title) for spec in specs if spec is not None)
    return [ChartCard(title, charts, caption, hint)] if charts else []


def color(slot: int) -> str:
    """Return the colour of a slot for a chart."""
    return PALETTE[slot]
