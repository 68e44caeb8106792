"""Compare what a function returned with what is expected, as the rule of its benchmark says.

Answers may take much memory once they are read, and values that a program chose may be slow to compare: integers that
share one hash make a set of n in n squared steps. Large answers are read and compared in a process with limits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vlm_rl.grading.code_rules import RULES
from vlm_rl.grading.code_tests import CodeTests
from vlm_rl.grading.reasons import shorten
from vlm_rl.sandbox.functions import Answers, decode, encode
from vlm_rl.sandbox.limited import LimitedWorker
from vlm_rl.sandbox.program import explained

_SMALL = 16 << 10  # bytes of answers that are compared here, at worst in some 10 ms
CPU_SECONDS = 10.0  # of one comparison of larger ones
_MEMORY = 1 << 30
NO_GOLD = -1


def comparison_worker() -> LimitedWorker:
    """Return a process in which large answers are compared."""
    return LimitedWorker(f"{__name__}.first_difference", cpu_seconds=CPU_SECONDS, memory=_MEMORY)


def written(values: Sequence[Any]) -> Answers:
    """Return values as the answers of a program that returns them."""
    lines = [json.dumps({"value": encode(value)}).encode() + b"\n" for value in values]
    return Answers(b"".join(lines), len(values))


def compare(worker: LimitedWorker, answers: Answers, tests: CodeTests, expected: Answers) -> list[Any] | None:
    """Return the first answer that is wrong or missing, as [its index, the reason], or None; see first_difference.

    Raises LimitError if reading or comparing takes too much, and FaultError or OSError for a fault of ours.
    """
    options = [_options(tests, number) for number in range(len(tests.inputs))]
    texts = [answers.text.decode(errors="replace"), answers.ending, expected.text.decode(errors="replace")]
    arguments = (tests.rule, options, encode(list(tests.inputs)), *texts)
    is_small = len(answers.text) + len(expected.text) <= _SMALL
    return first_difference(*arguments) if is_small else worker.call(*arguments)


def first_difference(
    rule: str, options: Sequence[dict[str, Any]], inputs: Sequence[Any], answers: str, ending: str, expected: str
) -> list[Any] | None:
    """Return the first answer that is wrong or missing, as [its index, the reason], or None.

    Args:
        rule: key of code_rules.RULES.
        options: of the rule, for each answer.
        inputs: the arguments of each call, as `encode` makes them.
        answers: what the program wrote.
        ending: why it wrote no more.
        expected: what a right program writes; where that is not an answer to each call, the index is NO_GOLD.
    """
    trees, fault = Answers(answers.encode(), len(inputs), ending).read()
    golds, missing = Answers(expected.encode(), len(inputs), "it was stopped").read()
    if missing:
        return [NO_GOLD, missing]
    for number, tree in enumerate(trees):
        try:
            value = decode(tree)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return [number, "what it returned cannot be read"]
        gold = decode(golds[number])
        try:
            passes = RULES[rule](decode(inputs[number]), value, gold, **options[number])
        except MemoryError:
            raise
        except Exception:  # values of other types than the rule compares, as in the published rules
            passes = False
        if not passes:
            return [number, f"returned {shown(value)} in place of {shown(gold)}"]
    return [len(trees), shorten(explained(fault))] if fault else None


def shown(value: Any) -> str:
    """Return a value for a reader, short."""
    try:
        text = value.strip() if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # Python writes no number of more than 4,300 digits
        text = f"a {type(value).__name__} that is too large to show"
    return shorten(text) or "nothing"


def _options(tests: CodeTests, number: int) -> dict[str, Any]:
    atol = tests.atol[number] if isinstance(tests.atol, list) else tests.atol
    return {"function": tests.function, "atol": atol} | ({"view": tests.views[number]} if tests.views else {})
