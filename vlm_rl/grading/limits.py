"""Refuse texts that are too expensive to compare, by their form and before anything is evaluated.

The filter is cheap and only saves work; what it misses is stopped by the limits of the symbolic workers. A refusal
is the verdict "error" with its reason, never a silent "wrong".
"""

from __future__ import annotations

import re

from vlm_rl.grading.decision import refusal

MAX_TEXT = 8_000  # characters of an answer
MAX_SYMBOLIC_TEXT = 1_000  # characters of an expression for math-verify
MAX_SYMBOLIC_ITEMS = 24  # items that are left to pair off, after those of equal text or number
MAX_DEPTH = 16  # nested brackets: the time of math-verify's grammar grows with their square

_EXPLOSIVE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("a long sum or product", re.compile(r"\\(?:sum|prod)(?![A-Za-z]).{0,80}(?:[0-9]{4,}|\^ ?\{?[0-9]+ ?\^)")),
    ("an exponent tower", re.compile(r"(?:\^ ?[{(]*[^{}()^]{0,40}[)}]* ?){2}\^")),
    ("a huge power", re.compile(r"\^ ?\{? ?\(?[0-9]{5,}|[)\]}] ?\^ ?\{? ?[0-9]{3,}")),
    ("a power of a power of digits", re.compile(r"\^ ?[{(] ?[0-9]+ ?\^ ?[{(]? ?[0-9]{2,}")),
    ("a huge factorial", re.compile(r"[0-9]{5,} ?!|\^ ?\{?[0-9]+\}? ?\)? ?!|! ?\)? ?!")),
    ("a huge binomial", re.compile(r"\\[dt]?binom[^A-Za-z]{0,80}(?:\^|[0-9]{5,})")),
    ("an indefinite integral", re.compile(r"\\int(?![A-Za-z]) ?+(?:\\limits ?+)?+(?!_)")),
    ("a derivative of high order", re.compile(r"\\frac ?\{ ?(?:d|\\partial) ?\^ ?\{? ?[0-9]{2}")),
    ("many signs in a row", re.compile(r"(?:[-+] ?){16}|(?:\| ?){16}")),
    ("several integrals", re.compile(r"\\int.{0,200}\\int|\\i{2,4}nt(?![A-Za-z])")),
)
# The upper end of \int_{0}^{12345} is not a power of its lower end.
_LOWER_END = re.compile(r"(\\(?:sum|prod|int)(?![A-Za-z])(?:\\limits)? ?_ ?)\{([^{}]*)\}(?= ?\^)")


def refuse_long(text: str) -> None:
    """Raise UndecidedError for an answer too long for any comparison."""
    if len(text) > MAX_TEXT:
        raise refusal(f"an answer of more than {MAX_TEXT} characters")


def refuse_explosive(text: str) -> None:
    """Raise UndecidedError for a text that must not reach math-verify."""
    if len(text) > MAX_SYMBOLIC_TEXT:
        raise refusal(f"an expression of {len(text)} characters")
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise refusal(f"{deepest} nested brackets")
    text = _LOWER_END.sub(r"\1 \2 ", text)
    for name, pattern in _EXPLOSIVE:
        if pattern.search(text):
            raise refusal(name)
