"""Points: measurements in a plane, and differences with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlm_rl.report.charts.frame import (
    HEIGHT,
    NUMBER,
    PALETTE,
    SHARE,
    SURFACE,
    TIP,
    ZOOM,
    chart,
    color_by_series,
    cursor,
    line_at_zero,
    row_axis,
    value_tip,
    x_axis,
)
from vlm_rl.report.html import visible
from vlm_rl.report.vega import Spec


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """A group of points of one colour: [n] each, NaN if there is none."""

    label: str
    x: np.ndarray
    y: np.ndarray
    color: str = PALETTE[0]
    sizes: Sequence[float] | None = None  # areas in square pixels
    hollow: Sequence[bool] | None = None
    tips: Sequence[str] | None = None
    click: Sequence[Any] | None = None


def scatter(
    groups: Sequence[Points],
    *,
    x_title: str,
    y_title: str = "",
    percent: bool = False,
    joined: bool = False,
    y_ticks: bool = True,
    zero_line: bool = False,
    height: int = HEIGHT,
) -> Spec | None:
    """Return groups of points; None without a finite one.

    Args:
        percent: the vertical values are shares in [0, 1].
        joined: a thin line joins the points of a group in their order.
        y_ticks: the vertical axis is shown.
        zero_line: a line marks x = 0.
    """
    rows = [row for group in groups for row in point_rows(group)]
    if not rows:
        return None
    number = SHARE if percent else NUMBER
    y: Spec = {
        "field": "y",
        "type": "quantitative",
        "title": y_title or None,
        "scale": {"zero": False, "padding": 14},
    }
    y["axis"] = {"format": number} if y_ticks else None
    color = color_by_series(groups)
    fill = {"condition": {"test": "datum.hollow", "value": SURFACE}, **color}
    size = {"field": "size", "type": "quantitative", "scale": None, "legend": None}
    mark = {"type": "point", "filled": True, "opacity": 0.85, "clip": True, "strokeWidth": 1.2, **cursor(rows)}
    x = x_axis(x_title, whole=False)  # in each layer: from the top it would override the 0 of the zero line
    x["scale"] |= {"padding": 16}  # the largest points are whole at both ends
    points = {"x": x, "y": y, "size": size, "stroke": color, "fill": fill, "tooltip": TIP}
    layers: list[Spec] = [{"mark": mark, "encoding": points, "params": [ZOOM]}]
    if joined:
        line = {"type": "line", "strokeWidth": 1, "opacity": 0.6, "clip": True}
        layers.insert(0, {"mark": line, "encoding": {"x": x, "y": y, "order": {"field": "order"}, "color": color}})
    if zero_line:
        layers.insert(0, line_at_zero())
    tip = f"datum.text || ({value_tip(x_title, number)})"
    legend = [{"name": group.label, "color": group.color, "dot": True} for group in groups]
    return chart(rows, layers, {}, tip=tip, height=height, legend=legend)


def point_rows(group: Points) -> list[Spec]:
    """Return a row for each finite point of a group."""
    rows: list[Spec] = []
    places: list[int] = np.flatnonzero(np.isfinite(group.x) & np.isfinite(group.y)).tolist()
    for i in places:
        row: Spec = {"series": visible(group.label), "order": i, "x": float(group.x[i]), "y": float(group.y[i])}
        row["size"] = group.sizes[i] if group.sizes is not None else 50
        row["hollow"] = bool(group.hollow[i]) if group.hollow is not None else False
        if group.tips is not None:
            row["text"] = visible(group.tips[i])
        if group.click is not None:
            row["click"] = group.click[i]
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its interval, a row of `forest`; the ends are NaN if there is none."""

    label: str
    mean: float
    low: float
    high: float
    color: str = PALETTE[0]
    tip: str = ""  # more lines of its tooltip
    click: str | None = None


def forest(intervals: Sequence[Interval], *, x_title: str, percent: bool = False) -> Spec | None:
    """Return differences with their intervals, a row each, and a line at 0.

    A dot is hollow where the interval holds 0 or does not exist. `percent`: the values are shares, shown in points.
    """
    factor = 100 if percent else 1
    rows: list[Spec] = []
    for interval in intervals:
        if math.isfinite(interval.mean):
            row: Spec = {
                "series": visible(interval.label),
                "x": factor * interval.mean,
                "hollow": not (interval.low > 0 or interval.high < 0),
                "more": visible(interval.tip),
            }
            if interval.click is not None:
                row["click"] = interval.click
            rows.append(
                row
                | (
                    {"low": factor * interval.low, "high": factor * interval.high}
                    if math.isfinite(interval.low)
                    else {}
                )
            )
    if not rows:
        return None
    color = color_by_series(intervals)
    fill = {"condition": {"test": "datum.hollow", "value": SURFACE}, **color}
    x = x_axis(x_title, whole=False, zero=True)
    y = row_axis([visible(interval.label) for interval in intervals])
    span = {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y, "color": color}
    dot = {"x": x, "y": y, "stroke": color, "fill": fill, "tooltip": TIP}
    layers: list[Spec] = [
        line_at_zero(),
        {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": span},
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1, "strokeWidth": 2, **cursor(rows)},
            "encoding": dot,
        },
    ]
    tip = (
        "datum.series + '\\n' + format(datum.x, '+.1f') + (isValid(datum.low) ? '\\n95 % interval '"
        " + format(datum.low, '+.1f') + ' to ' + format(datum.high, '+.1f') : '')"
        " + (datum.more ? '\\n' + datum.more : '')"
    )
    return chart(rows, layers, {}, tip=tip, height=26 * len(intervals) + 10)
