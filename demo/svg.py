"""Inline SVG: a frame with axes, lines, bands and marks. Colours are CSS variables, set by the page.

A mark with `go` is a click to the problems behind it: a change of the url (demo/url_state.py) that the
page's script hands over. `tip` is what the mark says when pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vlm_rl.report.html import escape


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area and its two linear scales, in user units of the SVG."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: float = 560
    height: float = 300
    left: float = 54
    right: float = 14
    top: float = 24
    bottom: float = 40

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / ((high - low) or 1) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return (
            self.height - self.bottom - (value - low) / ((high - low) or 1) * (self.height - self.top - self.bottom)
        )

    @property
    def floor(self) -> float:
        return self.height - self.bottom


def ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """Round values inside [low, high], about `count` of them: steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A tick's or a tip's number: 1,200; 0.25; 12."""
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def percent(value: float) -> str:
    """A share as 12.3 %, 1.5 %, 0.78 % or 100 %."""
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.2g} %" if abs(value) < 0.01 else f"{100 * value:.3g} %"


def axes(
    frame: Frame,
    *,
    x_title: str,
    y_title: str = "",
    x_ticks: Sequence[float] | None = None,
    y_ticks: Sequence[float] | None = None,
    x_text: Callable[[float], str] = number,
    y_text: Callable[[float], str] = number,
) -> str:
    """Grid lines, tick labels and titles."""
    across = ticks(*frame.x_range) if x_ticks is None else x_ticks
    up = ticks(*frame.y_range) if y_ticks is None else y_ticks
    right, floor = frame.width - frame.right, frame.floor
    parts = [
        f"<line class='grid' x1='{frame.left}' x2='{right}' y1='{frame.y(v):.1f}' y2='{frame.y(v):.1f}'/>"
        f"<text x='{frame.left - 7}' y='{frame.y(v) + 4:.1f}' text-anchor='end'>{escape(y_text(v))}</text>"
        for v in up
    ]
    parts += [
        f"<text x='{frame.x(v):.1f}' y='{floor + 17}' text-anchor='middle'>{escape(x_text(v))}</text>" for v in across
    ]
    parts.append(f"<line class='axis' x1='{frame.left}' x2='{right}' y1='{floor}' y2='{floor}'/>")
    middle = (frame.left + right) / 2
    parts.append(
        f"<text class='name' x='{middle}' y='{frame.height - 6}' text-anchor='middle'>{escape(x_title)}</text>"
    )
    if y_title:
        parts.append(f"<text class='name' x='4' y='{frame.top - 11}'>{escape(y_title)}</text>")
    return "".join(parts)


def line(frame: Frame, x: np.ndarray, y: np.ndarray, kind: str = "line") -> str:
    """A curve of class `kind`; where a value is not finite it breaks off and begins again."""
    commands, pen_up = [], True
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            pen_up = True
            continue
        commands.append(f"{'M' if pen_up else 'L'}{frame.x(a):.1f} {frame.y(b):.1f}")
        pen_up = False
    return f"<path class='{kind}' d='{''.join(commands)}'/>" if commands else ""


def steps(frame: Frame, x: np.ndarray, y: np.ndarray, kind: str = "line") -> str:
    """A staircase that rises to y[i] at x[i], from the left border to the right one."""
    low, high = frame.x_range
    begin = frame.y_range[0]
    d = [f"M{frame.x(low):.1f} {frame.y(begin):.1f}"]
    d += [f"H{frame.x(a):.1f}V{frame.y(b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    return f"<path class='{kind}' d='{''.join(d)}H{frame.x(high):.1f}'/>"


def band(frame: Frame, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> str:
    """The area between two curves; steps without a value are skipped."""
    known = np.isfinite(low) & np.isfinite(high)
    if known.sum() < 2:
        return ""
    there = [
        f"{frame.x(a):.1f} {frame.y(b):.1f}" for a, b in zip(x[known].tolist(), high[known].tolist(), strict=True)
    ]
    back = [f"{frame.x(a):.1f} {frame.y(b):.1f}" for a, b in zip(x[known].tolist(), low[known].tolist(), strict=True)]
    return f"<path class='band' d='M{'L'.join(there + back[::-1])}Z'/>"


def dot(
    x: float, y: float, *, radius: float = 4, kind: str = "dot", tip: str = "", go: str = "", key: bool = False
) -> str:
    """A point at SVG coordinates."""
    return (
        f"<circle class='{kind}' cx='{x:.1f}' cy='{y:.1f}' r='{radius:.1f}'{_click(go, key=key)}>{_tip(tip)}</circle>"
    )


def bar(x: float, y: float, width: float, height: float, *, kind: str = "bar", tip: str = "", go: str = "") -> str:
    """A rectangle at SVG coordinates."""
    place = f"x='{x:.1f}' y='{y:.1f}' width='{max(0.0, width):.1f}' height='{max(0.0, height):.1f}'"
    return f"<rect class='{kind}' {place}{_click(go, key=True)}>{_tip(tip)}</rect>"


def rule(x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> str:
    """A straight line at SVG coordinates."""
    return f"<line class='{kind}' x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'/>"


def words(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> str:
    """Text at SVG coordinates."""
    return f"<text class='{kind}' x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"


def group(slot: int, body: str) -> str:
    """Marks in the colour of a slot."""
    return f"<g class='k{slot}'>{body}</g>"


def drawing(frame: Frame, body: str, description: str) -> str:
    """The whole picture."""
    return (
        f"<svg class='drawing' viewBox='0 0 {frame.width:g} {frame.height:g}' role='img' "
        f"aria-label='{escape(description)}'>{body}</svg>"
    )


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _click(go: str, *, key: bool) -> str:
    if not go:
        return ""
    return f" data-go='{escape(go)}'" + (" tabindex='0' role='button'" if key else "")
