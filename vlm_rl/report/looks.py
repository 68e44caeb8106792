"""S_t, how much the image changes a sampled token (vlm_rl.credit): responses in its shades, and by what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from vlm_rl.grading.moves import MOVES, moves_of
from vlm_rl.report.html import macros

_PARTS = macros("vlm_rl.report", "parts.html")
_MOST_TOKENS = 1_500  # shown of a response
_LEVELS = 9  # shades above none


@dataclass(frozen=True, slots=True)
class Shade:
    """Neighbouring tokens of one shade; `value` is S_t of a token that stands by itself."""

    level: int  # 0 to _LEVELS
    text: str
    value: str


@dataclass(frozen=True, slots=True)
class ColoredResponse:
    """One training response whose tokens are coloured by S_t."""

    title: str
    verdict: str
    length: int
    mean: str
    text: Markup  # its tokens, each in its shade
    is_cut: bool


def color_response(row: Mapping[str, Any], title: str = "") -> ColoredResponse:
    """Color a rollout row that has `tokens` and `visual_dependence`."""
    values = np.array(row["visual_dependence"], dtype=np.float64)
    shades: list[Shade] = []
    for token, value in zip(row["tokens"][:_MOST_TOKENS], values, strict=False):
        level = round(_LEVELS * (1 - math.exp(-2 * value)))  # most values are far below 1
        if level == 0 and shades and shades[-1].level == 0:
            shades[-1] = Shade(0, shades[-1].text + token, "")
        elif token:
            shades.append(Shade(level, token, f"{value:.2f}" if level else ""))
    return ColoredResponse(
        title=title,
        verdict=row["verdict"],
        length=row["length"],
        mean=f"{values.mean():.3f}",
        text=_PARTS.shades(shades),
        is_cut=len(values) > _MOST_TOKENS,
    )


def looks_by_move(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return move -> mean S_t of the tokens in statements that make it, and of the response's other tokens.

    Moves of which all tokens or none are in such statements are left out. A token belongs where it begins, its spaces
    aside.

    Args:
        row: a rollout row that has `tokens` and `visual_dependence`.
    """
    tokens: list[str] = row["tokens"]
    ends = np.cumsum([len(token) for token in tokens])
    begins = ends - [len(token.lstrip()) for token in tokens]
    marks = moves_of("".join(tokens))
    values = np.array(row["visual_dependence"], dtype=np.float64)
    found = {}
    for move in MOVES:
        is_in = np.zeros(len(tokens), dtype=bool)
        for mark in marks:
            if mark.kind == move:
                is_in |= (begins >= mark.start) & (begins < mark.end)
        if is_in.any() and not is_in.all():
            found[move] = float(values[is_in].mean()), float(values[~is_in].mean())
    return found
