"""Curves over steps or lengths, with their bands, error bars and running means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlm_rl.report.charts.frame import (
    HEIGHT,
    NUMBER,
    PALETTE,
    SHARE,
    TIP,
    ZOOM,
    chart,
    color_by_series,
    cursor,
    value_tip,
    x_axis,
)
from vlm_rl.report.html import visible
from vlm_rl.report.vega import Spec
from vlm_rl.stats import smooth

MOST_DRAWN = 1_000  # places of a curve; a chart is about as many pixels wide
FEW = 8  # places; a curve with fewer has error bars instead of a band, and its places are marked
_EDGE = 5  # pixels above and below, so that no line and no marker is cut in half
_DASHES: Spec = {"domain": [False, True], "range": [[1, 0], [6, 4]]}


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One curve: float64 [n] each, NaN where there is no value."""

    label: str
    x: np.ndarray
    y: np.ndarray
    color: str = PALETTE[0]
    dashed: bool = False
    low: np.ndarray | None = None  # a band; with `points` or over few places the ends of error bars
    high: np.ndarray | None = None
    points: bool = False  # measurements apart from the curve: markers joined by a thin line
    smooth: bool = False  # thin for each step, bold for the running mean
    click: Sequence[Any] | None = None  # [n]

    @property
    def is_marked(self) -> bool:
        """Tell whether it is drawn as markers with error bars: `points`, or an interval at fewer than FEW places."""
        return self.points or (self.low is not None and int(np.isfinite(self.y).sum()) < FEW)

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
    values = np.array([row[name] for row in rows for name in ("y", "low") if name in row])
    y = _y_axis(np.array([row["y"] for row in rows]), y_title, percent=percent, log=log, from_zero=from_zero)
    y["scale"]["range"] = [height - _EDGE, _EDGE]
    line: Spec = {"type": "line", "clip": True, "interpolate": "step-after" if stairs else "linear"}
    color = color_by_series(shown)
    layers: list[Spec] = []

    def add(mark: Spec, field: str, test: str, **encoding: Any) -> None:
        """Add a layer of the rows that pass a test, if there are any."""
        layers.append(
            {"transform": [{"filter": test}], "mark": mark, "encoding": {"y": {"field": field, **y}, **encoding}}
        )

    num_bands = sum(curve.low is not None and not curve.is_marked for curve in shown)
    if num_bands:
        area = {"type": "area", "clip": True, "opacity": 0.16 if num_bands <= 4 else 0.1}
        add(area, "low", "isValid(datum.low) && !datum.points", y2={"field": "high"})
    dashes = {"field": "dashed", "type": "nominal", "legend": None, "scale": _DASHES}
    if any("mean" in row for row in rows):
        add(line | {"strokeWidth": 0.9, "opacity": 0.4}, "y", "isValid(datum.mean)")
        add(line | {"strokeWidth": 2}, "mean", "isValid(datum.mean)", strokeDash=dashes)
    add(line | {"strokeWidth": 1.9}, "y", "!isValid(datum.mean) && !datum.points", strokeDash=dashes)
    if any(curve.is_marked or np.isfinite(curve.y).sum() == 1 for curve in shown):
        bar = {"type": "rule", "clip": True, "strokeWidth": 1.2}
        add(bar, "low", "isValid(datum.low) && datum.points", y2={"field": "high"}, color=color)
        add(line | {"strokeWidth": 1, "strokeDash": [3, 3]}, "y", "datum.points")
        add({"type": "point", "filled": True, "size": 46, "opacity": 1}, "y", "datum.points || datum.alone")
    layers[0]["params"] = [ZOOM]
    layers.append(_nearest({"field": "y", **y}, rows))
    legend = [{"name": s.label, "color": s.color, "dashed": s.dashed, "dot": s.is_marked} for s in shown]
    tip = value_tip(x_title, y["axis"]["format"])
    encoding = {"x": x_axis(x_title), "color": color}
    return chart(
        rows,
        layers,
        encoding,
        tip=tip,
        height=height,
        legend=legend,
        log=y["scale"].get("type") == "log" if values.min() > 0 else None,
        smooth=list(dict.fromkeys(row["series"] for row in rows if "mean" in row)),
    )


def _rows(series: Series) -> list[Spec]:
    """Return a row per finite value, to six significant digits: more than a chart shows."""
    keep = np.isfinite(series.y)
    columns = {"x": series.x[keep], "y": series.y[keep]}
    if series.low is not None and series.high is not None:
        columns |= {"low": series.low[keep], "high": series.high[keep]}
    if series.smooth and (mean := smooth(columns["y"])) is not columns["y"]:
        columns["mean"] = mean
    drawn = _drawn(columns)
    means = _means_between(columns["y"], drawn) if "mean" in columns else {}
    columns = {name: values[drawn] for name, values in columns.items()} | means
    fixed: Spec = {"series": visible(series.label), "points": series.is_marked, "dashed": series.dashed}
    if keep.sum() == 1:
        fixed["alone"] = True
    rows = [
        fixed
        | {name: float(f"{value:.6g}") for name, value in zip(columns, values, strict=True) if math.isfinite(value)}
        for values in zip(*columns.values(), strict=True)
    ]
    for row, place in zip(rows, np.flatnonzero(keep)[drawn], strict=True):
        if series.click is not None:
            row["click"] = series.click[place]
    return rows


def _drawn(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the places [m <= MOST_DRAWN] of a curve that are drawn, in order: of a long one its ends and extremes.

    Each part of as many neighbours keeps the place of its lowest value and of its highest, and of those of its band,
    so that no jump of a single step is lost.
    """
    count = len(columns["y"])
    if count <= MOST_DRAWN:
        return np.arange(count)
    extremes = [
        (columns[name], sign) for name, sign in (("y", 1), ("y", -1), ("low", 1), ("high", -1)) if name in columns
    ]
    parts = np.array_split(np.arange(1, count - 1), (MOST_DRAWN - 2) // len(extremes))
    kept = {
        part[np.argmin(np.nan_to_num(sign * values[part], nan=math.inf))]
        for part in parts
        for values, sign in extremes
    }
    return np.array(sorted({0, count - 1} | kept))


def _means_between(y: np.ndarray, drawn: np.ndarray) -> dict[str, np.ndarray]:
    """Return what each drawn value stands for, from which charts.js takes other running means (`smoothed`).

    `count` values since the drawn one before, itself included, whose mean is `since`; nothing if all are drawn.
    """
    if len(drawn) == len(y):
        return {}
    count = np.diff(drawn, prepend=-1)
    return {"count": count, "since": np.diff(np.cumsum(y)[drawn], prepend=0.0) / count}


def _y_axis(values: np.ndarray, title: str, *, percent: bool, log: bool, from_zero: bool) -> Spec:
    """Return the vertical axis of some finite values."""
    axis: Spec = {"format": SHARE if percent else NUMBER}
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
        "mark": {"type": "point", "filled": True, "size": 60, "clip": True, **cursor(rows)},
        "encoding": {"y": y, "opacity": shown, "tooltip": TIP},
    }
