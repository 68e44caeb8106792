"""What an attack is: a name, the promise it tries to break, what must be observed, and how to observe it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attack:
    """One attack on one promise.

    `observe` gets an empty folder, attacks, and returns in a few words what happened; the promise holds where that
    equals `expected`. It raises only where the attack itself could not be carried out.
    """

    name: str
    promise: str  # a heading of docs/reliability.md or SECURITY.md
    expected: str
    observe: Callable[[Path], str]
    slow: bool = False  # takes more than a few seconds
