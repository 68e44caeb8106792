"""Charts: small functions from arrays to a Vega-Lite specification.

A specification is a plain dictionary that a browser draws interactively and vl-convert as a picture (`vega.py`).
Colours are the variables of vlm_rl/assets/cards.css, so that a chart follows the page's light or dark theme. No chart
is drawn without data: the functions return None then.

    spec = charts.lines([Series("luspo", steps, reward, PALETTE[0], smooth=True)], y_title="reward")

A mark may carry `click`, any JSON value: a click on it hands that value to the page (`vega.py` says how).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlm_rl.report.html import visible
from vlm_rl.report.vega import VEGA_LITE, Spec
from vlm_rl.stats import smooth

INK, MUTED, GRID, GOOD, BAD = (f"var(--{name})" for name in ("ink", "muted", "grid", "good", "bad"))
SURFACE = "var(--surface)"
PALETTE = tuple(f"var(--c{place})" for place in range(10))
HEIGHT = 210  # pixels

_NUMBER, _SHARE = ".6~g", ".3~%"  # formats of d3
_TIP: Spec = {"field": "tip", "type": "nominal"}
_DASHES: Spec = {"domain": [False, True], "range": [[1, 0], [6, 4]]}
# Ctrl, so that the wheel alone still scrolls the page; a pinch on a trackpad arrives as Ctrl and wheel.
_ZOOM: Spec = {
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
    "axisX": {"grid": False, "labelFlush": True},
    "axisY": {"domain": False, "tickCount": 5},
    "legend": {"labelColor": INK, "labelFontSize": 12, "labelLimit": 400, "orient": "top", "symbolStrokeWidth": 2.5},
    "rule": {"color": MUTED},
    "text": {"color": INK, "fontSize": 12},
    "title": {"anchor": "start", "color": INK, "fontSize": 13, "offset": 10},
}


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One curve: float64 [n] each, NaN where there is no value."""

    label: str
    x: np.ndarray
    y: np.ndarray
    color: str = PALETTE[0]
    dashed: bool = False
    low: np.ndarray | None = None  # a band, or with `points` the ends of the error bars
    high: np.ndarray | None = None
    points: bool = False  # measurements apart from the curve: markers joined by a thin line
    smooth: bool = False  # thin for each step, bold for the running mean
    click: Sequence[Any] | None = None  # [n]

    @property
    def empty(self) -> bool:
        """Tell whether no value is finite, so that there is nothing to draw."""
        return not bool(np.isfinite(self.y).any())


def lines(
    series: Sequence[Series],
    *,
    x_title: str = "step",
    y_title: str = "",
    percent: bool = False,
    log: bool = False,
    from_zero: bool = False,
    stairs: bool = False,
    height: int = HEIGHT,
) -> Spec | None:
    """Return curves with their bands, error bars and running means; None without a finite value.

    Args:
        percent: the values are shares in [0, 1].
        log: the axis is logarithmic where the values are positive and span a decade.
        from_zero: the vertical axis begins at 0.
        stairs: a value holds until the next one, as in a cumulative distribution.
    """
    shown = [curve for curve in series if not curve.empty]
    if not shown:
        return None
    rows = [row for curve in shown for row in _rows(curve)]
    y = _y_axis(np.array([row["y"] for row in rows]), y_title, percent=percent, log=log, from_zero=from_zero)
    line: Spec = {"type": "line", "clip": True, "interpolate": "step-after" if stairs else "linear"}
    color = _color(shown)
    layers: list[Spec] = []

    def add(mark: Spec, field: str, test: str, **encoding: Any) -> None:
        """Add a layer of the rows that pass a test, if there are any."""
        layers.append(
            {"transform": [{"filter": test}], "mark": mark, "encoding": {"y": {"field": field, **y}, **encoding}}
        )

    num_bands = sum(curve.low is not None and not curve.points for curve in shown)
    if num_bands:
        area = {"type": "area", "clip": True, "opacity": 0.16 if num_bands <= 4 else 0.1}
        add(area, "low", "isValid(datum.low) && !datum.points", y2={"field": "high"})
    dashes = {"field": "dashed", "type": "nominal", "legend": None, "scale": _DASHES}
    if any("mean" in row for row in rows):
        add(line | {"strokeWidth": 0.9, "opacity": 0.4}, "y", "isValid(datum.mean)")
        add(line | {"strokeWidth": 2}, "mean", "isValid(datum.mean)", strokeDash=dashes)
    add(line | {"strokeWidth": 1.9}, "y", "!isValid(datum.mean) && !datum.points", strokeDash=dashes)
    if any(curve.points or np.isfinite(curve.y).sum() == 1 for curve in shown):
        bar = {"type": "rule", "clip": True, "strokeWidth": 1.2}
        add(bar, "low", "isValid(datum.low) && datum.points", y2={"field": "high"}, color=color)
        add(line | {"strokeWidth": 1, "strokeDash": [3, 3]}, "y", "datum.points")
        add({"type": "point", "filled": True, "size": 46, "opacity": 1}, "y", "datum.points || datum.alone")
    layers[0]["params"] = [_ZOOM]
    layers.append(_nearest({"field": "y", **y}, rows))
    legend = [{"name": s.label, "color": s.color, "dashed": s.dashed, "dot": s.points} for s in shown]
    tip = _value_tip(x_title, y["axis"]["format"])
    encoding = {"x": _x_axis(x_title), "color": color}
    return _spec(rows, layers, encoding, tip=tip, height=height, legend=legend)


def _rows(series: Series) -> list[Spec]:
    """Return a row per finite value, to six significant digits: more than a chart shows."""
    keep = np.isfinite(series.y)
    columns = {"x": series.x[keep], "y": series.y[keep]}
    if series.low is not None and series.high is not None:
        columns |= {"low": series.low[keep], "high": series.high[keep]}
    if series.smooth and (mean := smooth(columns["y"])) is not columns["y"]:
        columns["mean"] = mean
    fixed: Spec = {"series": visible(series.label), "points": series.points, "dashed": series.dashed}
    if keep.sum() == 1:
        fixed["alone"] = True
    rows = [
        fixed
        | {name: float(f"{value:.6g}") for name, value in zip(columns, values, strict=True) if math.isfinite(value)}
        for values in zip(*columns.values(), strict=True)
    ]
    for row, place in zip(rows, np.flatnonzero(keep), strict=True):
        if series.click is not None:
            row["click"] = series.click[place]
    return rows


def _x_axis(title: str, *, whole: bool = True, zero: bool = False) -> Spec:
    axis = {"tickCount": 10} | ({"format": ",~d", "tickMinStep": 1} if whole else {"format": _NUMBER})
    scale = {"zero": zero, "nice": False, "padding": 8}
    return {"field": "x", "type": "quantitative", "title": title, "axis": axis, "scale": scale}


def _y_axis(values: np.ndarray, title: str, *, percent: bool, log: bool, from_zero: bool) -> Spec:
    """Return the vertical axis of some finite values."""
    axis: Spec = {"format": _SHARE if percent else _NUMBER}
    scale: Spec = {"zero": from_zero, "nice": True}
    if log and values.min() > 0 and values.max() / values.min() > 10:
        axis["values"] = _log_ticks(float(values.min()), float(values.max()))
        scale = {"type": "log", "nice": False, "padding": 8}
    return {"type": "quantitative", "title": title or None, "axis": axis, "scale": scale}


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 of every decade, or the decades alone where there are more than two."""
    digits = (1, 2, 5) if high / low < 100 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{digit}e{decade}") for decade in decades for digit in digits]


def _nearest(y: Spec, rows: Sequence[Spec]) -> Spec:
    """Return the layer that answers the pointer: the nearest point shows itself and its tooltip."""
    pointer = {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}
    shown = {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0}
    return {
        "params": [{"name": "hover", "select": pointer}],
        "mark": {"type": "point", "filled": True, "size": 60, "clip": True, **_cursor(rows)},
        "encoding": {"y": y, "opacity": shown, "tooltip": _TIP},
    }


def _value_tip(x_title: str, number: str) -> str:
    """Return the expression of a tooltip: the curve, its place and value, the mean and the interval where known."""
    value, low, high, mean = (f"format(datum.{name}, '{number}')" for name in ("y", "low", "high", "mean"))
    return (
        f"datum.series + '\\n{x_title} ' + format(datum.x, ',~f') + ': ' + {value}"
        f" + (isValid(datum.mean) ? '\\nrunning mean ' + {mean} : '')"
        f" + (isValid(datum.low) ? '\\n' + {low} + ' to ' + {high} : '')"
    )


def _cursor(rows: Sequence[Spec]) -> Spec:
    return {"cursor": "pointer"} if any("click" in row for row in rows) else {}


def _color(items: Sequence[Any]) -> Spec:
    """Return the colour encoding of everything that has a label and a colour."""
    scale = {"domain": [visible(item.label) for item in items], "range": [item.color for item in items]}
    return {"field": "series", "type": "nominal", "legend": None, "scale": scale}


def _spec(
    rows: Sequence[Spec],
    layers: Sequence[Spec],
    encoding: Spec,
    *,
    tip: str,
    height: int,
    legend: Sequence[Spec] = (),
) -> Spec:
    """Return a layered chart of `rows`, as wide as its place.

    Args:
        tip: the expression of a row's tooltip.
        legend: name, color, dashed, dot (a square instead of a line); one entry alone says nothing and is left out.
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
            "legend": [{**entry, "name": visible(entry["name"])} for entry in legend] if len(legend) > 1 else []
        },
        "datasets": {"rows": list(rows)},
    }


# -- distributions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """One histogram over common bins."""

    label: str
    shares: np.ndarray  # [bins]
    color: str = PALETTE[0]
    click: Sequence[Any] | None = None  # [bins]


def histogram(
    edges: np.ndarray, bars: Sequence[Bars], *, x_title: str = "tokens", height: int = HEIGHT
) -> Spec | None:
    """Return overlaid histograms over the bins between `edges` [bins + 1].

    The lower bar of a bin lies in front, so that each can be pointed at.
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
    y = {"field": "y", "type": "quantitative", "title": "share of responses", "axis": {"format": _SHARE}}
    layer = {
        "mark": {"type": "rect", "opacity": 0.6, "stroke": SURFACE, "strokeWidth": 0.5, **_cursor(rows)},
        "encoding": {"x2": {"field": "end"}, "y": y, "y2": {"datum": 0}, "tooltip": _TIP},
    }
    tip = f"datum.series + '\\n' + datum.x + ' to ' + (datum.end - 1) + ' {x_title}: ' + format(datum.y, '.1%')"
    encoding = {"x": _x_axis(x_title), "color": _color(bars)}
    legend = [{"name": group.label, "color": group.color, "dot": True} for group in bars]
    return _spec(rows, [layer], encoding, tip=tip, height=height, legend=legend)


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


def quantile_bars(rows: Sequence[Quantiles], *, x_title: str = "tokens") -> Spec | None:
    """Return a row per distribution: a line from p10 to p90, a box from p25 to p75, a dot at the median."""
    known = [row for row in rows if math.isfinite(row.median)]
    if not known:
        return None
    data: list[Spec] = [
        {"series": visible(row.label), "hollow": row.hollow, "text": visible(row.tip)}
        | {name: getattr(row, name) for name in ("p10", "p25", "median", "p75", "p90")}
        | ({"click": row.click} if row.click is not None else {})
        for row in known
    ]
    y, color = _row_axis([visible(row.label) for row in rows]), _color(known)
    fill = {"condition": {"test": "datum.hollow", "value": SURFACE}, **color}

    x = _x_axis(x_title, zero=True)
    span = {"x": x | {"field": "p10"}, "x2": {"field": "p90"}, "color": color}
    box = {"x": x | {"field": "p25"}, "x2": {"field": "p75"}, "stroke": color, "fill": fill, "tooltip": _TIP}
    dot = {"x": x | {"field": "median"}, "fill": color, "tooltip": _TIP}
    hand = _cursor(data)
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": span},
        {"mark": {"type": "bar", "height": 11, "strokeWidth": 1.5, **hand}, "encoding": box},
        {
            "mark": {"type": "point", "filled": True, "size": 46, "opacity": 1, "stroke": SURFACE, **hand},
            "encoding": dot,
        },
    ]
    return _spec(data, layers, {"y": y}, tip="datum.text", height=24 * len(rows) + 10)


def _row_axis(labels: Sequence[str]) -> Spec:
    """Return a vertical axis with a row per label, in this order."""
    axis = {"labelLimit": 220, "labelColor": INK, "labelFontSize": 12, "domain": False}
    order = list(dict.fromkeys(labels))
    return {"field": "series", "type": "nominal", "title": None, "scale": {"domain": order}, "axis": axis}


# -- points --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """A group of points of one colour: [n] each, NaN where there is none."""

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
    rows = [row for group in groups for row in _point_rows(group)]
    if not rows:
        return None
    number = _SHARE if percent else _NUMBER
    y: Spec = {
        "field": "y",
        "type": "quantitative",
        "title": y_title or None,
        "scale": {"zero": False, "padding": 14},
    }
    y["axis"] = {"format": number} if y_ticks else None
    color = _color(groups)
    fill = {"condition": {"test": "datum.hollow", "value": SURFACE}, **color}
    size = {"field": "size", "type": "quantitative", "scale": None, "legend": None}
    mark = {"type": "point", "filled": True, "opacity": 0.85, "clip": True, "strokeWidth": 1.2, **_cursor(rows)}
    x = _x_axis(x_title, whole=False)  # in each layer: from the top it would override the 0 of the zero line
    points = {"x": x, "y": y, "size": size, "stroke": color, "fill": fill, "tooltip": _TIP}
    layers: list[Spec] = [{"mark": mark, "encoding": points, "params": [_ZOOM]}]
    if joined:
        line = {"type": "line", "strokeWidth": 1, "opacity": 0.6, "clip": True}
        layers.insert(0, {"mark": line, "encoding": {"x": x, "y": y, "order": {"field": "order"}, "color": color}})
    if zero_line:
        layers.insert(0, _zero_line())
    tip = f"datum.text || ({_value_tip(x_title, number)})"
    legend = [{"name": group.label, "color": group.color, "dot": True} for group in groups]
    return _spec(rows, layers, {}, tip=tip, height=height, legend=legend)


def _point_rows(group: Points) -> list[Spec]:
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


def _zero_line() -> Spec:
    return {"mark": {"type": "rule"}, "data": {"values": [{}]}, "encoding": {"x": {"datum": 0}}}


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its interval, a row of `forest`; the ends are NaN where there is none."""

    label: str
    mean: float
    low: float
    high: float
    color: str = PALETTE[0]


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
            }
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
    color = _color(intervals)
    fill = {"condition": {"test": "datum.hollow", "value": SURFACE}, **color}
    x = _x_axis(x_title, whole=False, zero=True)
    y = _row_axis([visible(interval.label) for interval in intervals])
    span = {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y, "color": color}
    dot = {"x": x, "y": y, "stroke": color, "fill": fill, "tooltip": _TIP}
    layers: list[Spec] = [
        _zero_line(),
        {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": span},
        {"mark": {"type": "point", "filled": True, "size": 80, "opacity": 1, "strokeWidth": 2}, "encoding": dot},
    ]
    tip = (
        "datum.series + '\\n' + format(datum.x, '+.1f') + (isValid(datum.low) ? '\\n95 % interval '"
        " + format(datum.low, '+.1f') + ' to ' + format(datum.high, '+.1f') : '')"
    )
    return _spec(rows, layers, {}, tip=tip, height=26 * len(intervals) + 10)


# -- gradient mass -------------------------------------------------------------------------------


def mass_bars(early: Mapping[str, np.ndarray], late: Mapping[str, np.ndarray], *, labels: tuple[str, str]) -> Spec:
    """Return shares of the gradient mass by length decile, positive advantages upwards and negative ones downwards.

    Args:
        early, late: "positive" and "negative" shares [10] of two stretches of the run.
        labels: what the two stretches are called.
    """
    rows, legend = [], []
    for stretch, label, opacity in ((early, labels[0], 0.42), (late, labels[1], 1.0)):
        for sign, color, direction in (("positive", GOOD, 1), ("negative", BAD, -1)):
            name = f"A {'>' if direction > 0 else '<'} 0, {label}"
            legend.append({"name": name, "color": color, "opacity": opacity, "dot": True})
            for decile, share in enumerate(stretch[sign].tolist(), 1):
                rows.append(
                    {"series": name, "x": decile, "stretch": label, "opacity": opacity, "y": direction * share}
                )
    y = {"field": "y", "type": "quantitative", "stack": None, "title": "share of gradient mass"}
    bars = {
        "mark": {"type": "bar"},
        "encoding": {
            "y": y | {"axis": {"labelExpr": f"format(abs(datum.value), '{_SHARE}')"}},
            "xOffset": {"field": "stretch", "type": "nominal", "sort": list(labels)},
            "opacity": {"field": "opacity", "type": "quantitative", "scale": None, "legend": None},
            "tooltip": _TIP,
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
    return _spec(rows, [bars], encoding, tip=tip, height=240, legend=legend)


def heatmap(
    shares: np.ndarray, *, columns: Sequence[Any], rows: Sequence[Any], titles: tuple[str, str]
) -> Spec | None:
    """Return shares [rows, columns] as cells, the stronger the larger; None without a finite one.

    `titles`: what columns and rows are called.
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
        "tooltip": _TIP,
    }
    tip = f"'{titles[0]} ' + datum.x + '\\n{titles[1]} ' + datum.row + ': ' + format(datum.y, '.1%')"
    return _spec(cells, [{"mark": {"type": "rect", "color": PALETTE[0]}}], encoding, tip=tip, height=HEIGHT)
