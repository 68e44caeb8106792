"""What a check answers, and how checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from vlm_rl.errors import UserError

CheckOutcome = Literal["ok", "off", "unknown"]
Waiting = Callable[[str, str], Any]  # told which check is running, and what it does now: empty as it begins

_told: ContextVar[Callable[[str], Any]] = ContextVar("told", default=lambda phase: None)


def phase(text: str) -> None:
    """Say what the running check does now, for whoever waits for its answer."""
    _told.get()(text)


@dataclass(frozen=True, slots=True)
class Check:
    """The answer to one question about the machine or a model."""

    name: str
    outcome: CheckOutcome  # unknown: it could not be checked
    detail: str  # what was measured, and the limit that it passes or exceeds
    next_step: str = ""  # what to do, unless the outcome is ok


def run_checks(
    checks: Sequence[Callable[..., Check]], subject: Any, *, waiting: Waiting = lambda name, phase: None
) -> Iterator[Check]:
    """Call each check on the subject and yield its answer; one that fails does not keep the others from running.

    `waiting` is called before a check begins, and with each of its phases.

    A UserError is an answer: something is off, and the message names the next step. A later check with the same
    message depends on the first, so its outcome is unknown. So is that of a check that ends in any other exception.
    """
    known: dict[str, str] = {}  # a message -> the check that it came from first
    for check in checks:
        name = check.__name__.replace("_", " ")
        waiting(name, "")
        before = _told.set(partial(waiting, name))
        answer = _answer(check, subject, name, known)
        _told.reset(before)
        yield answer


def _answer(check: Callable[..., Check], subject: Any, name: str, known: dict[str, str]) -> Check:
    try:
        return check(subject)
    except UserError as error:
        cause = known.setdefault(str(error), name)
        if cause == name:
            return Check(name, "off", str(error))
        return Check(name, "unknown", f"it depends on {cause!r}, which failed", f"fix {cause!r} first")
    except Exception as error:  # whatever a broken machine or model leads to: the other checks still run
        reason = " ".join(str(error).split())
        return Check(name, "unknown", f"the check failed: {type(error).__name__}: {reason:.300}", "report this")


def exit_code(answers: Sequence[Check]) -> int:
    """Return 1 where something is off, else 2 where something could not be checked, else 0."""
    outcomes = {answer.outcome for answer in answers}
    return 1 if "off" in outcomes else 2 if "unknown" in outcomes else 0
