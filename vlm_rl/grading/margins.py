"""When two exact numbers count as equal: percent signs, stated rounding, stated tolerance. No float is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from vlm_rl.grading.quantities import Quantity


@dataclass(frozen=True, slots=True)
class Margin:
    """What a problem allows: decimal places to round to (MathVista), or a distance (DynaMath); None: neither."""

    places: int | None = None
    distance: Fraction | None = None

    def allows(self, gold: Fraction, answer: Fraction) -> bool:
        if gold == answer:
            return True
        if self.distance is not None:
            return abs(gold - answer) <= self.distance
        return self.places is not None and _rounded(gold, self.places) == _rounded(answer, self.places)

    def __bool__(self) -> bool:
        return self.places is not None or self.distance is not None


def margin_of(meta: Mapping[str, Any]) -> Margin:
    """The margin that a problem's meta states; a tolerance goes before a precision."""
    if meta.get("tolerance") is not None:
        return Margin(distance=Fraction(str(meta["tolerance"])))
    return Margin() if meta.get("precision") is None else Margin(places=int(meta["precision"]))


def same_number(want: Quantity, have: Quantity, wanted: Fraction, had: Fraction, margin: Margin) -> bool:
    """Whether the bodies' values are equal, percent signs taken into account."""
    if want.percent == have.percent:
        return margin.allows(wanted, had)
    if want.percent:  # 50% is 0.5, not 50
        return margin.allows(wanted / 100, had)
    # A bare 50 may have asked for a percentage; a bare 0.5 is a share, so 0.5% is something else.
    return margin.allows(wanted, had / 100) or (abs(wanted) > 1 and margin.allows(wanted, had))


def _rounded(number: Fraction, places: int) -> Fraction:
    """Half away from zero."""
    scaled = abs(number) * 10**places + Fraction(1, 2)
    rounded = Fraction(scaled.numerator // scaled.denominator, 10**places)
    return rounded if number >= 0 else -rounded
