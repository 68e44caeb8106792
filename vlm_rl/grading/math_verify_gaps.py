r"""Find the differences that math-verify does not see: number bases, corners of figures, primes, derivatives."""

from __future__ import annotations

import re

from vlm_rl.grading.closed_form import DIFFERENTIALS
from vlm_rl.grading.latex import canonical

_NUMERAL = re.compile(r"(?<![A-Za-z0-9\\])([0-9A-F]*[0-9A-F)]) ?_ ?\{ ?([^{}]*?) ?\}")
_FIGURE = re.compile(r"(\\triangle ?)?(?<![A-Za-z\\])([A-Z]{3,6})(?![A-Za-z])")
_MARK = re.compile(r"[A-Za-z)}]? ?'+|[A-Za-z)}] ?\^ ?\{? ?(?:T|\\top|\\intercal)(?![A-Za-z])")
_DERIVATIVE = re.compile(rf"\\partial(?:\^\{{[0-9]\}})? ?[A-Za-z]?|{DIFFERENTIALS}")


def unseen_difference(gold: str, answer: str) -> str | None:
    """Return the rule by which two `clean` texts differ although math-verify may call them equal, or None."""
    if _numerals(gold) != _numerals(answer):
        return "number_base"
    if _figures(gold) != _figures(answer):
        return "figure"
    same = _marks(gold) == _marks(answer) and _derivatives(gold) in ([], _derivatives(answer))
    return None if same else "text"


def _numerals(text: str) -> list[tuple[str, str]]:
    """Return (digits, base) of the numbers that state their base; F_{k} and F_{2} are not such numbers."""
    return sorted((digits, base) for digits, base in _NUMERAL.findall(text) if _is_numeral(digits, base))


def _is_numeral(digits: str, base: str) -> bool:
    if digits[-1] not in "ABCDEF":
        return True
    return (
        base.isdecimal()
        and len(base) <= 2
        and int(base) <= 36
        and all(int(digit, 36) < int(base) for digit in digits)
    )


def _figures(text: str) -> list[str]:
    """Return the figures that are named by their corners, each in one spelling.

    The corners of a triangle may come in any order, those of an angle or a polygon in both directions.
    """
    figures = _FIGURE.findall(text)
    return sorted("".join(sorted(name)) if triangle else min(name, name[::-1]) for triangle, name in figures)


def _marks(text: str) -> list[str]:
    """Return the primes and transposes with the letter or bracket in front of each."""
    return sorted(map(canonical, _MARK.findall(text)))


def _derivatives(text: str) -> list[str]:
    r"""Return the differentials in their order in the text: \frac{dy}{dx} is not \frac{dx}{dy}."""
    return [canonical(derivative) for derivative in _DERIVATIVE.findall(text)]
