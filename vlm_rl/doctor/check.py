"""What a check answers, and how checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vlm_rl.errors import UserError

CheckOutcome = Literal["ok", "off", "unknown"]


@dataclass(frozen=True, slots=True)
class Check:
    """The answer to one question about the machine or a model."""

    name: str
    outcome: CheckOutcome  # unknown: it could not be checked
    detail: str  # what was measured, and the limit that it passes or exceeds
    next_step: str = ""  # what to do, unless the outcome is ok


def run_checks(
    checks: Sequence[Callable[..., Check]], subject: Any, *, waiting: Callable[[str], Any] = lambda name: None
) -> Iterator[Check]:
    """Call each check on the subject and yield its answer; one that fails does not keep the others from running.

    `waiting` is called with the name of a check before it begins.

    A UserError is an answer: something is off, and the message names the next step. A later check with the same
    message depends on the first, so its outcome is unknown. So is that of a check that ends in any other exception.
    """
    known: dict[str, str] = {}  # a message -> the check that it came from first
    for check in checks:
        name = check.__name__.replace("_", " ")
        waiting(name)
        try:
            yield check(subject)
        except UserError as error:
            cause = known.setdefault(str(error), name)
            if cause == name:
                yield Check(name, "off", str(error))
            else:
                yield Check(name, "unknown", f"it depends on {cause!r}, which failed", f"fix {cause!r} first")
        except Exception as error:  # whatever a broken machine or model leads to: the other checks still run
            reason = " ".join(str(error).split())
            yield Check(name, "unknown", f"the check failed: {type(error).__name__}: {reason:.300}", "report this")


def exit_code(answers: Sequence[Check]) -> int:
    """Return 1 where something is off, else 2 where something could not be checked, else 0."""
    outcomes = {answer.outcome for answer in answers}
    return 1 if "off" in outcomes else 2 if "unknown" in outcomes else 0
