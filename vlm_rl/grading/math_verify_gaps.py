r"""Find the differences that math-verify does not see: number bases, figures, primes, derivatives, stray symbols.

It drops the symbols that it does not know, and reduces a relation such as `1 ≅ 7` to one of its sides.
"""

from __future__ import annotations

import re
import unicodedata

from vlm_rl.grading.closed_form import DIFFERENTIALS
from vlm_rl.grading.latex import canonical

_NUMERAL = re.compile(r"(?<![A-Za-z0-9\\])([0-9A-F]*[0-9A-F)]) ?_ ?\{ ?([^{}]*?) ?\}")
_FIGURE = re.compile(r"(\\triangle ?)?(?<![A-Za-z\\])([A-Z]{3,6})(?![A-Za-z])")
_MARK = re.compile(r"[A-Za-z)}]? ?'+|[A-Za-z)}] ?\^ ?\{? ?(?:T|\\top|\\intercal)(?![A-Za-z])")
_DERIVATIVE = re.compile(rf"\\partial(?:\^\{{[0-9]\}})? ?[A-Za-z]?|{DIFFERENTIALS}")
# A relation, a quotation mark, or a number behind an exclamation mark, `1! 7`. 3! 2! is a product.
_STRAY = re.compile(r"\\(?:equiv|n?cong|simeq|asymp|doteq|triangleq|bowtie|models)(?![A-Za-z])|\"|! [0-9]+(?![0-9!])")
_STRAY_CATEGORIES = frozenset(["Sm", "So", "Sk", "Pi", "Pf", "Po"])  # of Unicode: symbols, quotation marks, points


def unseen_difference(gold: str, answer: str) -> str | None:
    """Return the rule by which two `clean` texts differ although math-verify may call them equal, or None."""
    if _numerals(gold) != _numerals(answer):
        return "number_base"
    if _figures(gold) != _figures(answer):
        return "figure"
    if _has_stray(gold) != _has_stray(answer):
        return "text"
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


def _has_stray(text: str) -> bool:
    """Return whether a text holds a relation that states no value, or a symbol that `clean` does not know."""
    return _STRAY.search(text) is not None or any(
        unicodedata.category(symbol) in _STRAY_CATEGORIES for symbol in text if not symbol.isascii()
    )


def _derivatives(text: str) -> list[str]:
    r"""Return the differentials in their order in the text: \frac{dy}{dx} is not \frac{dx}{dy}."""
    return [canonical(derivative) for derivative in _DERIVATIVE.findall(text)]
