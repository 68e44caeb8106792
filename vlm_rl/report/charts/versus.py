"""One value of each problem against another one of it, with the diagonal where both are equal."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_rl.report.charts.frame import MUTED, TIP, chart, color_by_series, cursor, short
from vlm_rl.report.charts.points import Points, point_rows
from vlm_rl.report.vega import Spec

_TITLE = 46  # characters
SHAPES = ("circle", "triangle-up", "triangle-down")


def versus(
    groups: Sequence[Points],
    *,
    x_title: str,
    y_title: str,
    shapes: Sequence[str],
    brush: str | None = None,
) -> Spec | None:
    """Return groups of points in a plane whose axes have one scale, and the diagonal; None without a point.

    Args:
        groups: the points; later ones are in front.
        x_title: of the horizontal axis.
        y_title: of the vertical axis.
        shapes: of SHAPES, one for each group.
        brush: a box can be drawn; a click event then hands over this text and "from,to,from,to" of the box's ends,
            rounded outwards. None: the page has no clicks.
    """
    rows = [row | {"shape": shape} for group, shape in zip(groups, shapes, strict=True) for row in point_rows(group)]
    if not rows:
        return None
    values = [float(row[axis]) for row in rows for axis in ("x", "y")]
    margin = 0.04 * (max(values) - min(values)) or 1.0
    ends = [min(values) - margin, max(values) + margin]
    scale = {"domain": ends, "nice": False, "zero": False}

    def axis(name: str, title: str, **more: object) -> Spec:
        return {
            "field": name, "type": "quantitative", "title": short(title, _TITLE), "scale": scale,
            "axis": {"format": ",~f", "tickCount": 6, "titleLimit": 320} | more,
        }  # fmt: skip

    x, y, color = axis("x", x_title, grid=True), axis("y", y_title), color_by_series(groups)
    diagonal: Spec = {
        "mark": {"type": "line", "color": MUTED, "strokeWidth": 1, "strokeDash": [4, 3], "clip": True},
        "data": {"values": [{"x": end, "y": end} for end in ends]},
        "encoding": {"x": x, "y": y},
    }
    points: Spec = {
        "mark": {"type": "point", "filled": True, "opacity": 0.75, **cursor(rows)},
        "encoding": {
            "x": x, "y": y, "color": color, "tooltip": TIP,
            "size": {"field": "size", "type": "quantitative", "scale": None, "legend": None},
            "shape": {"field": "shape", "type": "nominal", "scale": None, "legend": None},
        },
    }  # fmt: skip
    if brush is not None:
        points["params"] = [{"name": "brush", "select": {"type": "interval", "encodings": ["x", "y"]}}]
    legend = [{"name": group.label, "color": group.color, "dot": True} for group in groups]
    spec = chart(rows, [diagonal, points], {}, tip="datum.text", height=330, legend=legend)
    spec["usermeta"]["brush"] = brush
    return spec
