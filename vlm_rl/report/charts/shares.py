"""Shares of responses or of gradient mass: histograms, quantiles, bars and cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlm_rl.report.charts.frame import (
    BAD,
    GOOD,
    HEIGHT,
    PALETTE,
    SHARE,
    SURFACE,
    TIP,
    chart,
    color_by_series,
    cursor,
    row_axis,
    x_axis,
)
from vlm_rl.report.html import visible
from vlm_rl.report.vega import Spec


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """One histogram over common bins."""

    label: str
    shares: np.ndarray  # [bins]
    color: str = PALETTE[0]
    click: Sequence[Any] | None = None  # [bins]


def histogram(edges: np.ndarray, bars: Sequence[Bars], *, x_title: str) -> Spec | None:
    """Return overlaid histograms over common bins; None if all are empty.

    The lower bar of a bin is in front, so that each can be pointed at.

    Args:
        edges: [bins + 1], ascending.
        bars: the histograms.
        x_title: what is counted in the bins.
    """
    rows: list[Spec] = []
    for group in bars:
        for k, share in enumerate(group.shares.tolist()):
            if share > 0:
                row = {"series": visible(group.label), "x": float(edges[k]), "end": float(edges[k + 1]), "y": share}
                rows.append(row | ({"click": group.click[k]} if group.click is not None else {}))
    if not rows:
        return None
    rows.sort(key=lambda row: (row["x"], -row["y"]))
    y = {"field": "y", "type": "quantitative", "title": "share of responses", "axis": {"format": SHARE}}
    layer = {
        "mark": {"type": "rect", "opacity": 0.6, "stroke": SURFACE, "strokeWidth": 0.5, **cursor(rows)},
        "encoding": {"x2": {"field": "end"}, "y": y, "y2": {"datum": 0}, "tooltip": TIP},
    }
    tip = f"datum.series + '\\n' + datum.x + ' to ' + (datum.end - 1) + ' {x_title}: ' + format(datum.y, '.1%')"
    encoding = {"x": x_axis(x_title), "color": color_by_series(bars)}
    legend = [{"name": group.label, "color": group.color, "dot": True} for group in bars]
    return chart(rows, [layer], encoding, tip=tip, height=HEIGHT, legend=legend)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Five quantiles of one distribution, a row of `quantile_bars`."""

    label: str
    p10: float
    p25: float
    median: float
    p75: float
    p90: float
    color: str = PALETTE[0]
    hollow: bool = False
    tip: str = ""
    click: Any = None
    points: Sequence[float] = ()  # all values, drawn instead of the box where they are few


def quantile_bars(rows: Sequence[Quantiles], *, x_title: str) -> Spec | None:
    """Return a row per distribution in percent: a line from p10 to p90, a box from p25 to p75, a dot at the median.

    A row with `points` has these alone.
    """
    known = [row for row in rows if math.isfinite(row.median)]
    if not known:
        return None
    data: list[Spec] = [
        {"series": visible(row.label), "hollow": row.hollow, "text": visible(row.tip)}
        | places
        | ({"click": row.click} if row.click is not None else {})
        for row in known
        for places in _places(row)
    ]
    y, color = row_axis([visible(row.label) for row in rows]), color_by_series(known)
    fill = {"condition": {"test": "datum.hollow", "value": SURFACE}, **color}

    x = x_axis(x_title, zero=True)
    x["scale"]["domain"] = [0, 100]
    span = {"x": x | {"field": "p10"}, "x2": {"field": "p90"}, "color": color}
    box = {"x": x | {"field": "p25"}, "x2": {"field": "p75"}, "stroke": color, "fill": fill, "tooltip": TIP}
    dot = {"x": x | {"field": "median"}, "fill": color, "tooltip": TIP}
    hand = cursor(data)
    box_alone = [{"filter": "isValid(datum.p10)"}]
    layers = [
        {"transform": box_alone, "mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": span},
        {"transform": box_alone, "mark": {"type": "bar", "height": 11, "strokeWidth": 1.5, **hand}, "encoding": box},
        {
            "mark": {"type": "point", "filled": True, "size": 46, "opacity": 1, "stroke": SURFACE, **hand},
            "encoding": dot,
        },
    ]
    return chart(data, layers, {"y": y}, tip="datum.text", height=24 * len(rows) + 10)


def _places(row: Quantiles) -> list[Spec]:
    if row.points:
        return [{"median": float(value)} for value in row.points]
    return [{name: getattr(row, name) for name in ("p10", "p25", "median", "p75", "p90")}]


def decile_bars(
    early: Mapping[str, np.ndarray],
    late: Mapping[str, np.ndarray],
    *,
    labels: tuple[str, str],
    y_title: str = "share of gradient mass",
) -> Spec:
    """Return shares by length decile, of positive advantages upwards and of negative ones downwards.

    Args:
        early, late: "positive" and "negative" shares [10] of two stretches of the run; a NaN has no bar.
        labels: what the two stretches are called.
        y_title: what the shares are.
    """
    rows, legend = [], []
    for stretch, label, opacity in ((early, labels[0], 0.42), (late, labels[1], 1.0)):
        for sign, color, direction in (("positive", GOOD, 1), ("negative", BAD, -1)):
            name = f"A {'>' if direction > 0 else '<'} 0, {label}"
            legend.append({"name": name, "color": color, "opacity": opacity, "dot": True})
            for decile, share in enumerate(stretch[sign].tolist(), 1):
                if math.isfinite(share):
                    rows.append(
                        {"series": name, "x": decile, "stretch": label, "opacity": opacity, "y": direction * share}
                    )
    y = {"field": "y", "type": "quantitative", "stack": None, "title": y_title}
    bars = {
        "mark": {"type": "bar"},
        "encoding": {
            "y": y | {"axis": {"labelExpr": f"format(abs(datum.value), '{SHARE}')"}},
            "xOffset": {"field": "stretch", "type": "nominal", "sort": list(labels)},
            "opacity": {"field": "opacity", "type": "quantitative", "scale": None, "legend": None},
            "tooltip": TIP,
        },
    }
    scale = {"domain": [entry["name"] for entry in legend], "range": [entry["color"] for entry in legend]}
    x = {
        "field": "x",
        "type": "ordinal",
        "title": "decile of response length (1: shortest)",
        "axis": {"labelAngle": 0},
    }
    encoding = {"x": x, "color": {"field": "series", "type": "nominal", "legend": None, "scale": scale}}
    tip = "datum.series + '\\ndecile ' + datum.x + ': ' + format(abs(datum.y), '.1%')"
    return chart(rows, [bars], encoding, tip=tip, height=240, legend=legend)


def heatmap(
    shares: np.ndarray, *, columns: Sequence[Any], rows: Sequence[Any], titles: tuple[str, str]
) -> Spec | None:
    """Return shares as cells, the stronger the larger; None without a finite one.

    Args:
        shares: [rows, columns], 0 to 1; a NaN has no cell.
        columns: the name of each column.
        rows: the name of each row, from the top.
        titles: what columns and rows are called.
    """
    cells = [
        {"series": "", "x": columns[c], "row": rows[r], "y": float(f"{shares[r, c]:.4g}")}
        for r, c in np.argwhere(np.isfinite(shares)).tolist()
    ]
    if not cells:
        return None
    encoding = {
        "x": {"field": "x", "type": "ordinal", "title": titles[0], "axis": {"labelOverlap": True, "labelAngle": 0}},
        "y": {"field": "row", "type": "ordinal", "title": titles[1], "sort": list(rows), "axis": {"domain": False}},
        "opacity": {"field": "y", "type": "quantitative", "legend": None, "scale": {"range": [0.04, 1]}},
        "tooltip": TIP,
    }
    tip = f"'{titles[0]} ' + datum.x + '\\n{titles[1]} ' + datum.row + ': ' + format(datum.y, '.1%')"
    return chart(cells, [{"mark": {"type": "rect", "color": PALETTE[0]}}], encoding, tip=tip, height=HEIGHT)
