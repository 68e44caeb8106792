"""What is refused unevaluated: texts that would cost the symbolic judge time or memory, found by their form.

The filter is cheap and only saves work; what it misses is stopped by the judge's own limits. A refusal is
the verdict "error", with the reason: never a silent "wrong".
"""

from __future__ import annotations

import re

from vlm_rl.types import Verdict

MAX_TEXT = 8_000
MAX_SYMBOLIC_TEXT = 1_000
MAX_SYMBOLIC_ITEMS = 24
MAX_DEPTH = 40

_EXPLOSIVE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("a long sum or product", re.compile(r"\\(?:sum|prod)(?![A-Za-z]).{0,80}(?:[0-9]{4,}|\^ ?\{?[0-9]+ ?\^)")),
    ("an exponent tower", re.compile(r"(?:\^ ?[{(]*[^{}()^]{0,40}[)}]* ?){2}\^")),
    ("a huge power", re.compile(r"\^ ?\{? ?\(?[0-9]{5,}|[)\]}] ?\^ ?\{? ?[0-9]{3,}")),
    ("a power of a power of digits", re.compile(r"\^ ?[{(] ?[0-9]+ ?\^ ?[{(]? ?[0-9]{2,}")),
    ("a huge factorial", re.compile(r"[0-9]{5,} ?!|\^ ?\{?[0-9]+\}? ?\)? ?!|! ?\)? ?!")),
    ("a huge binomial", re.compile(r"\\[dt]?binom[^A-Za-z]{0,80}(?:\^|[0-9]{5,})")),
    ("several integrals", re.compile(r"\\int.{0,200}\\int|\\i{2,4}nt(?![A-Za-z])")),
)
# The upper end of a sum or an integral is no power of the lower one's braces.
_LOWER_END = re.compile(r"(\\(?:sum|prod|int)(?![A-Za-z])(?:\\limits)? ?_ ?)\{([^{}]*)\}(?= ?\^)")


class Undecided(Exception):  # noqa: N818  a verdict, not a fault
    """No opinion is possible: the judge timed out or failed, or the text is refused unevaluated."""

    def __init__(self, verdict: Verdict, path: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict: Verdict = verdict
        self.path = path
        self.reason = reason


def refused(reason: str) -> Undecided:
    """The exception to raise for a text that is not looked at any further."""
    return Undecided("error", "prefilter", f"refused unevaluated: {reason}")


def refuse_long(text: str) -> None:
    """Raise Undecided for an answer too long for any comparison."""
    if len(text) > MAX_TEXT:
        raise refused(f"an answer of over {MAX_TEXT} characters")


def refuse_explosive(text: str) -> None:
    """Raise Undecided for a text that must not reach the symbolic judge."""
    if len(text) > MAX_SYMBOLIC_TEXT:
        raise refused(f"an expression of {len(text)} characters")
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise refused(f"{deepest} nested brackets")
    text = _LOWER_END.sub(r"\1 \2 ", text)
    for name, pattern in _EXPLOSIVE:
        if pattern.search(text):
            raise refused(name)
