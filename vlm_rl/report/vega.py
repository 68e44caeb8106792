"""Put a Vega-Lite specification on a page, or draw it into a picture without a browser.

    html = vega.embed(lines([...]), "Mean reward of a response")     # one chart; a page holds many
    page = template.render(chart=html, scripts=vega.scripts())       # the scripts once, at the end of the page

On a page the pointer shows values, dragging moves, Ctrl with the wheel zooms, a double click resets, and a click on a
legend entry hides its curve. A click on a mark whose row has a `click` value dispatches a CustomEvent "chart-click"
from the chart's element: it bubbles, and `event.detail` is that value. A page that receives charts later calls
`window.drawCharts(root)` once they are in the document. The loader that does this is vlm_rl/assets/charts.js.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import vl_convert
from markupsafe import Markup

from vlm_rl.report.html import asset, visible

Spec = dict[str, Any]

VEGA_LITE = "6.4"
_DATA = ("datasets", "domain", "sort", "usermeta")  # keys below which a string is a run's, never a colour of ours


def to_json(spec: Spec) -> str:
    """Return a specification as JSON that no HTML parser can leave early, inside a <script> element."""
    text = json.dumps(spec, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def embed(spec: Spec | None, description: str) -> Markup:
    """Return the element that the page's loader draws into, labelled for screen readers; empty without a chart."""
    if spec is None:
        return Markup()
    data = Markup('<script type="application/json">{}</script>').format(Markup(to_json(spec)))
    return Markup('<div class="chart" role="group" aria-label="{}">{}</div>').format(visible(description), data)


@cache
def scripts() -> tuple[str, str]:
    """Return the JavaScript of a page with charts, the Vega bundle and the loader, each for one inline module.

    Bundling takes about two seconds, once per process.
    """
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    assert "</script" not in bundle
    return bundle, asset("charts.js")


def page_scripts() -> tuple[str, ...]:
    """Return the scripts of a page with charts and commands to copy."""
    return (*scripts(), asset("copy.js"))


@cache
def light_colors() -> Mapping[str, str]:
    """Return the light theme of cards.css: "var(--name)" -> "#rrggbb"."""
    light = asset("cards.css").partition("@media")[0]
    return {f"var({name})": color for name, color in re.findall(r"(--[\w-]+): (#\w{6})", light)}


def in_light_theme(node: Any) -> Any:
    """Return a specification with the light theme's colours in place of variables; data stays as it is."""
    if isinstance(node, Mapping):
        return {key: value if key in _DATA else in_light_theme(value) for key, value in node.items()}
    if isinstance(node, list):
        return [in_light_theme(value) for value in node]
    return light_colors().get(node, node) if isinstance(node, str) else node


def still(spec: Spec, *, width: int, title: str = "") -> Spec:
    """Return the chart for a picture: `width` pixels wide, in the light theme, its legend inside, no interaction."""
    drawn = in_light_theme({key: spec[key] for key in ("$schema", "config", "height", "encoding")})
    layers = [layer for layer in spec["layer"] if "hover" not in (param["name"] for param in layer.get("params", []))]
    drawn["layer"] = [
        in_light_theme({key: part for key, part in layer.items() if key != "params"}) for layer in layers
    ]
    drawn |= {"width": width, "data": {"values": spec["datasets"]["rows"]}}
    if spec["usermeta"]["legend"]:
        legend = {"title": None, "symbolOpacity": 1}
        drawn["encoding"] = {**drawn["encoding"], "color": {**drawn["encoding"]["color"], "legend": legend}}
    return drawn | ({"title": title} if title else {})


def joined(stills: Sequence[Spec], *, columns: int) -> Spec:
    """Return several stills as one picture, row by row."""
    parts = [{key: part for key, part in chart.items() if key not in ("$schema", "config")} for chart in stills]
    shared = {"$schema": stills[0]["$schema"], "config": stills[0]["config"], "spacing": 40}
    return shared | {
        "concat": parts,
        "columns": columns,
        "resolve": {"scale": dict.fromkeys(("color", "fill", "stroke"), "independent")},
    }


def svg(spec: Spec) -> str:
    """Return a still as SVG."""
    return vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)


def png(spec: Spec, *, scale: float = 2.0) -> bytes:
    """Return a still on white as a PNG of `scale` times its size in pixels."""
    options = {"background": "white", "padding": 12}
    return vl_convert.vegalite_to_png(spec | options, vl_version=VEGA_LITE, scale=scale)


def png_of_svg(text: str) -> bytes:
    """Return an SVG drawing as a PNG of twice its size in pixels."""
    return vl_convert.svg_to_png(text, scale=2.0)
