r"""Read the gold answer of a row; a missing or broken one raises RowError (vlm_rl.data.golds reads its text)."""

from __future__ import annotations

import math
from typing import Any

from vlm_rl.data.golds import infer_answer_type, parse_choices, plain_number, unwrap_gold
from vlm_rl.data_prep.records import RowError
from vlm_rl.templates import boxes
from vlm_rl.types import AnswerType


def gold_of(answer: Any) -> str:
    """Return the unwrapped gold of a row. Raises RowError if it is missing, broken, or not text."""
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise RowError("answer_missing", "the answer is missing")
    if not isinstance(answer, str):
        raise RowError("bad_type", f"the answer must be text, not {type(answer).__name__} {answer!r:.40}")
    gold = unwrap_gold(answer)
    if gold is None:
        raise RowError("gold_broken", f"the answer's boxes or braces do not close: {answer!r:.80}")
    if not gold:
        raise RowError("answer_missing", f"the answer is empty: {answer!r:.40}")
    return gold


def number_gold(answer: Any) -> str:
    """Return a gold that may be a number in its file: 27.0 is "27", 73 is "73", "073" is "73"."""
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return plain_number(gold_of(answer))
    if isinstance(answer, float) and not math.isfinite(answer):
        raise RowError("answer_missing", f"the answer is {answer}")
    return plain_number(answer)


def type_and_choices(gold: str, question: str) -> tuple[AnswerType, tuple[str, ...]]:
    """Return the gold's type, and, if it is a choice, the options that the question lists."""
    kind = infer_answer_type(gold)
    return kind, parse_choices(question) if kind == "choice" else ()


def last_box(solution: str) -> str:
    r"""Return the contents of a solution's last `\boxed{}`. Raises RowError if it has none."""
    contents = boxes(solution.replace(r"\fbox", r"\boxed"))
    if not contents:
        raise RowError("answer_missing", f"the solution has no closed box: ...{solution[-60:]!r}")
    return contents[-1]
