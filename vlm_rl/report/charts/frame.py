"""What all charts share: colours, axes, tooltips, and the layered chart around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_rl.report.html import visible
from vlm_rl.report.vega import VEGA_LITE, Spec

INK, MUTED, GRID, GOOD, BAD = (f"var(--{name})" for name in ("ink", "muted", "grid", "good", "bad"))
SURFACE = "var(--surface)"
PALETTE = tuple(f"var(--c{place})" for place in range(10))
HEIGHT = 210  # pixels

NUMBER, SHARE = ".6~g", ".3~%"  # formats of d3
TIP: Spec = {"field": "tip", "type": "nominal"}
_ROW_LABEL = 33  # characters of a row's label, about as wide as there is room
# Ctrl, so that the wheel alone still scrolls the page; a pinch on a trackpad arrives as Ctrl and wheel.
ZOOM: Spec = {
    "name": "zoom",
    "select": {"type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey]"},
    "bind": "scales",
}
CONFIG: Spec = {
    "aria": False,  # the chart's element is labelled; a label per mark would double the page
    "background": None,
    "font": "system-ui, Liberation Sans, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "domainColor": GRID,
        "gridColor": GRID,
        "labelColor": MUTED,
        "labelFontSize": 11.5,
        "labelPadding": 6,
        "ticks": False,
        "titleColor": MUTED,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
    },
    "axisX": {
        "grid": False,
        "labelBound": 12,
        "labelFlush": True,
        "labelOverlap": True,
        "labelSeparation": 7,
    },  # of narrow charts
    "axisY": {"domain": False, "tickCount": 5},
    "legend": {"labelColor": INK, "labelFontSize": 12, "labelLimit": 400, "orient": "top", "symbolStrokeWidth": 2.5},
    "rule": {"color": MUTED},
    "text": {"color": INK, "fontSize": 12},
    "title": {"anchor": "start", "color": INK, "fontSize": 13, "offset": 10},
}


def chart(
    rows: Sequence[Spec],
    layers: Sequence[Spec],
    encoding: Spec,
    *,
    tip: str,
    height: int,
    legend: Sequence[Spec] = (),
    log: bool | None = None,
    smooth: Sequence[str] = (),
) -> Spec:
    """Return a layered chart of `rows`, as wide as its place.

    Args:
        tip: the expression of a row's tooltip.
        legend: name, color, dashed, dot (a square instead of a line); one entry alone says nothing and is left out.
        log: whether the vertical axis is logarithmic; None if it cannot be.
        smooth: the curves with a running mean.
    """
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{VEGA_LITE.partition('.')[0]}.json",
        "config": CONFIG,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "params": [{"name": "hidden", "value": []}],
        "data": {"name": "rows"},
        "transform": [{"filter": "indexof(hidden, datum.series) < 0"}, {"calculate": tip, "as": "tip"}],
        "encoding": encoding,
        "layer": list(layers),
        "usermeta": {
            "legend": [{**entry, "name": visible(entry["name"])} for entry in legend] if len(legend) > 1 else [],
            "log": log,
            "smooth": [visible(name) for name in smooth],
        },
        "datasets": {"rows": list(rows)},
    }


def x_axis(title: str, *, whole: bool = True, zero: bool = False) -> Spec:
    """Return a horizontal axis. `whole`: its ticks are whole numbers, such as steps. `zero`: it includes 0."""
    axis: Spec = {"tickCount": 10, "format": NUMBER}
    if whole:  # a tick between two of few whole numbers is not named: it would be a second time the next one
        axis |= {"format": ",~d", "tickMinStep": 1, "labelExpr": "datum.value % 1 ? '' : datum.label"}
    scale = {"zero": zero, "nice": False, "padding": 8}
    return {"field": "x", "type": "quantitative", "title": title, "axis": axis, "scale": scale}


def short(label: str, most: int) -> str:
    """Return a label of at most `most` characters; of a longer one the middle is left out: the ends differ."""
    head = most // 3
    return label if len(label) <= most else f"{label[:head]}…{label[head + 1 - most :]}"


def row_axis(labels: Sequence[str]) -> Spec:
    """Return a vertical axis with a row per label, in this order."""
    tail = _ROW_LABEL * 2 // 3  # as `short`
    shortened = f"slice(datum.label, 0, {_ROW_LABEL - tail - 1}) + '…' + slice(datum.label, -{tail})"
    text = f"length(datum.label) > {_ROW_LABEL} ? {shortened} : datum.label"
    axis = {"labelExpr": text, "labelLimit": 220, "labelColor": INK, "labelFontSize": 12, "domain": False}
    order = list(dict.fromkeys(labels))
    return {"field": "series", "type": "nominal", "title": None, "scale": {"domain": order}, "axis": axis}


def color_by_series(items: Sequence[Any]) -> Spec:
    """Return the colour encoding of everything that has a label and a colour."""
    scale = {"domain": [visible(item.label) for item in items], "range": [item.color for item in items]}
    return {"field": "series", "type": "nominal", "legend": None, "scale": scale}


def value_tip(x_title: str, number: str) -> str:
    """Return the expression of a tooltip: the curve, its place and value, the mean and the interval where known."""
    value, low, high, mean = (f"format(datum.{name}, '{number}')" for name in ("y", "low", "high", "mean"))
    return (
        f"datum.series + '\\n{x_title} ' + format(datum.x, ',~f') + ': ' + {value}"
        f" + (isValid(datum.mean) ? '\\nrunning mean ' + {mean} : '')"
        f" + (isValid(datum.low) ? '\\n' + {low} + ' to ' + {high} : '')"
    )


def cursor(rows: Sequence[Spec]) -> Spec:
    """Return the pointing hand as a mark's cursor where a click on a row does something."""
    return {"cursor": "pointer"} if any("click" in row for row in rows) else {}


def line_at_zero() -> Spec:
    """Return the layer of a vertical line at x = 0."""
    return {"mark": {"type": "rule"}, "data": {"values": [{}]}, "encoding": {"x": {"datum": 0}}}
