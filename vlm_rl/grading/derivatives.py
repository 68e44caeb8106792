r"""Give derivatives names of their own: math-verify takes \frac{dv}{dt} for 0, whatever multiplies it."""

from __future__ import annotations

import re

from vlm_rl.grading.latex import canonical

_ORDER = r"(?:\^\{[0-9]\})?"
_LETTER = r"(?:\\[A-Za-z]+|[A-Za-z])(?:_\{[A-Za-z0-9]{1,4}\})?"
_D = r"(?:d|\{ ?d ?\}|\\partial(?![A-Za-z]))"
_ABOVE = rf"{_D} ?{_ORDER} ?{_LETTER}"
_BELOW = rf"{_D} ?{_LETTER} ?{_ORDER}"
_DERIVATIVE = re.compile(
    rf"\\frac ?\{{ ?(?P<above>{_ABOVE}) ?\}} ?\{{ ?(?P<below>{_BELOW}(?: ?{_BELOW}){{0,2}}) ?\}}"
    rf"|(?<![A-Za-z\\])(?P<left>{_ABOVE}) ?/ ?(?P<right>{_BELOW})(?![A-Za-z])"
)
_NAMES = "QJWZUYXDGHKLMNPRSTVBCA"


def name_derivatives(gold: str, answer: str) -> tuple[str, str]:
    r"""Return two `clean` texts with a symbol for each different derivative: m\frac{dv}{dt} becomes mQ_{1}."""
    if "d" not in gold + answer and "\\partial" not in gold + answer:
        return gold, answer
    if not (_DERIVATIVE.search(gold) or _DERIVATIVE.search(answer)):
        return gold, answer
    letter = next((name for name in _NAMES if name not in gold + answer), None)
    if letter is None:
        return gold, answer
    symbols: dict[str, str] = {}

    def symbol(match: re.Match[str]) -> str:
        above, below = match["above"] or match["left"], match["below"] or match["right"]
        derivative = re.sub(r"\{ ?d ?\}", "d", canonical(f"{above}/{below}")).replace(" ", "")
        return f" {symbols.setdefault(derivative, f'{letter}_{{{len(symbols) + 1}}}')} "

    left, right = (" ".join(_DERIVATIVE.sub(symbol, text).split()) for text in (gold, answer))
    return left, right
