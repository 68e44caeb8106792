"""Ridgelines: one distribution above the other on a common axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats

from vlm_rl.report.charts.frame import INK, PALETTE, SURFACE, TIP, chart, cursor, short, x_axis
from vlm_rl.report.html import visible
from vlm_rl.report.vega import Spec

FEW = 12  # values; fewer are drawn as points, since a curve over them says more about its smoothing
_PLACES = 90  # of a curve
_MOST = 4_000  # values that a density is computed from
_TOP = 0.56  # a ridge's peak, as a share of its row; the name is above
_ROW = 56  # pixels
_NAME = 50  # characters
_MOST_ABOVE = 5  # points of one value, so that they do not reach the name


@dataclass(frozen=True, slots=True, eq=False)
class Ridge:
    """One distribution, a row."""

    label: str
    values: np.ndarray  # [n]
    color: str = PALETTE[0]
    hollow: bool = False  # an outline without a filling
    tip: str = ""
    click: Any = None


def ridges(rows: Sequence[Ridge]) -> Spec | None:
    """Return a smoothed density of tokens for each row, of its own height, its name above it; None without values.

    A density is Gaussian, with Scott's bandwidth (scipy.stats.gaussian_kde), and ends at the least and the largest
    value. Fewer than FEW values, or equal ones, are points. A line marks the median.
    """
    known = [row for row in rows if len(row.values)]
    if not known:
        return None
    data: list[Spec] = []
    low, high = (float(end([end(row.values) for row in known])) for end in (np.min, np.max))
    for place, row in enumerate(known):
        data += _row(row, base=len(known) - 1 - place, left=low)
    x = x_axis("tokens")
    x["scale"] |= {"domain": [low, high] if high > low else [low - 1, high + 1], "padding": 10}
    y: Spec = {
        "type": "quantitative", "axis": None,
        "scale": {"domain": [-0.12, len(known) - 0.02], "nice": False, "zero": False},
    }  # fmt: skip
    color = {"field": "color", "type": "nominal", "scale": None, "legend": None}
    hand = cursor(data)
    area: Spec = {"type": "area", "interpolate": "monotone", **hand}
    line: Spec = {"type": "line", "interpolate": "monotone", "strokeWidth": 1.6, **hand}
    curve = {"y": {"field": "y", **y}, "y2": {"field": "base"}, "detail": {"field": "series"}, "tooltip": TIP}
    above = {"y": {"field": "y", **y}, "detail": {"field": "series"}, "tooltip": TIP}
    opacity = {"condition": {"test": "datum.hollow", "value": 0.06}, "value": 0.38}
    dot = {
        "y": {"field": "y", **y}, "fill": {"condition": {"test": "datum.hollow", "value": SURFACE}, **color},
        "stroke": color, "tooltip": TIP,
    }  # fmt: skip
    layers: list[Spec] = [
        _layer("curve", area, curve | {"fill": color, "fillOpacity": opacity}),
        _layer("curve", line, above | {"stroke": color}),
        _layer(
            "median",
            {"type": "rule", "strokeWidth": 2},
            {"y": {"field": "base", **y}, "y2": {"field": "y"}, "color": color, "tooltip": TIP},
        ),
        _layer(
            "point", {"type": "point", "size": 42, "opacity": 0.9, "filled": True, "strokeWidth": 1.3, **hand}, dot
        ),
        _layer(
            "name",
            {"type": "text", "align": "left", "baseline": "bottom", "fontSize": 11.5, "limit": 330, "color": INK},
            {"y": {"field": "y", **y}, "text": {"field": "name"}},
        ),
    ]
    return chart(data, layers, {"x": x}, tip="datum.text", height=_ROW * len(known) + 16)


def _layer(kind: str, mark: Spec, encoding: Spec) -> Spec:
    return {"transform": [{"filter": f"datum.kind === '{kind}'"}], "mark": mark, "encoding": encoding}


def _row(ridge: Ridge, *, base: int, left: float) -> list[Spec]:
    """Return the rows of one distribution, which stands on the height `base`."""
    shared: Spec = {
        "series": visible(ridge.label), "color": ridge.color, "hollow": ridge.hollow, "base": base,
        "text": visible(ridge.tip),
    }  # fmt: skip
    if ridge.click is not None:
        shared["click"] = ridge.click

    def at(kind: str, x: float, y: float) -> Spec:
        return {**shared, "kind": kind, "x": float(f"{x:.6g}"), "y": round(base + y, 4)}

    name = at("name", left, _TOP + 0.06) | {"name": short(shared["series"], _NAME)}
    values = np.sort(ridge.values.astype(float))
    if len(values) < FEW or values[0] == values[-1]:
        seen: dict[float, int] = {}
        points = []
        for value in values[:FEW].tolist():  # equal ones are above each other
            points.append(at("point", value, 0.06 + 0.09 * min(seen.get(value, 0), _MOST_ABOVE - 1)))
            seen[value] = seen.get(value, 0) + 1
        return [name, *points]
    places = np.linspace(values[0], values[-1], _PLACES)
    even = np.linspace(0, len(values) - 1, min(len(values), _MOST)).round().astype(int)  # by rank, both ends included
    density = scipy.stats.gaussian_kde(values[even])(places)
    heights = _TOP * density / density.max()
    median = float(np.median(values))
    middle = at("median", median, float(np.interp(median, places, heights)))
    return [name, *(at("curve", x, y) for x, y in zip(places.tolist(), heights.tolist(), strict=True)), middle]
