"""The light value types that the grader shares with everybody; importable without torch.

`vlm_rl.types` re-exports all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AnswerType = Literal["choice", "integer", "float", "expression", "text", "list"]
StopReason = Literal["stop", "length"]
Verdict = Literal["correct", "wrong", "no_answer", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Grade:
    """The grader's opinion on one response."""

    verdict: Verdict
    extracted: str | None  # the final answer as found in the response
    path: str  # the rule that decided, e.g. "number", "choice", "math_verify"
    reason: str  # one human sentence

    @property
    def correct(self) -> bool:
        return self.verdict == "correct"
