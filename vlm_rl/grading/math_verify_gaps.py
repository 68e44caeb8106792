r"""What math-verify overlooks: the base of a number, a figure's corners, primes, transposes, derivatives."""

from __future__ import annotations

import re

from vlm_rl.grading.closed_form import DIFFERENTIALS
from vlm_rl.grading.latex import canonical

_NUMBER_BASE = re.compile(r"\(?[0-9A-F)] ?\)? ?_ ?\{([^{}]*)\}")
_FIGURE = re.compile(r"(\\triangle ?)?(?<![A-Za-z\\])([A-Z]{3,6})(?![A-Za-z])")
_MARK = re.compile(r"[A-Za-z)}]? ?'+|[A-Za-z)}] ?\^ ?\{? ?(?:T|\\top|\\intercal)(?![A-Za-z])")
_DERIVATIVE = re.compile(rf"\\partial(?:\^\{{[0-9]\}})? ?[A-Za-z]?|{DIFFERENTIALS}")


def overlooked(gold: str, answer: str) -> str | None:
    """The rule by which two `clean` texts differ in something that math-verify does not see; None if they do not."""
    if _NUMBER_BASE.findall(gold) != _NUMBER_BASE.findall(answer):
        return "number_base"
    if _figures(gold) != _figures(answer):
        return "figure"
    same = _marks(gold) == _marks(answer) and _derivatives(gold) in ([], _derivatives(answer))
    return None if same else "text"


def _figures(text: str) -> list[str]:
    """The figures named by their corners: a triangle's in any order, an angle's or a polygon's in both directions."""
    found = _FIGURE.findall(text)
    return sorted("".join(sorted(name)) if triangle else min(name, name[::-1]) for triangle, name in found)


def _marks(text: str) -> list[str]:
    """The primes and transposes, and what has them."""
    return sorted(map(canonical, _MARK.findall(text)))


def _derivatives(text: str) -> list[str]:
    r"""What is differentiated, and by what, in the order of \frac{dy}{dx}."""
    return [canonical(found) for found in _DERIVATIVE.findall(text)]
