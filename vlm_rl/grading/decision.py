"""Types that the rules share: a decision, its absence, and the way to ask for symbolic comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_rl.types import Verdict

SymbolicQuery = tuple[str, ...]  # ("equal", gold, answer) or ("value", text)
# Returns whether the two are equal, or the value as a decimal ("" if there is none); None while that is not known.
# Raises UndecidedError if it never will be.
AskSymbolic = Callable[[SymbolicQuery], Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether an answer equals the gold, and the rule that says so."""

    equal: bool | None  # None while a symbolic comparison is pending
    path: str


class UndecidedError(Exception):
    """Say that a comparison has no result: it timed out or failed, or the text was not evaluated at all."""

    def __init__(self, verdict: Verdict, path: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict: Verdict = verdict
        self.path = path
        self.reason = reason


def refusal(reason: str) -> UndecidedError:
    """Return the exception to raise for a text that is not to be evaluated."""
    return UndecidedError("error", "prefilter", f"not evaluated: {reason}")


def all_equal(verdicts: Sequence[bool | None]) -> bool | None:
    """Return whether all verdicts are True; None if none is False but some are pending (None)."""
    return False if False in verdicts else None if None in verdicts else True


def any_equal(verdicts: Sequence[bool | None]) -> bool | None:
    """Return whether some verdict is True; None if none is but some are pending (None)."""
    return True if True in verdicts else None if None in verdicts else False
