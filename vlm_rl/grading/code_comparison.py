"""Compare what a function returned with what is expected, as the rule of its benchmark says.

Values that a program chose may be slow to compare: integers that share one hash make a set of n in n squared steps.
Large ones are compared in a process with limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_rl.grading.code_rules import RULES
from vlm_rl.grading.code_tests import CodeTests
from vlm_rl.grading.reasons import shorten
from vlm_rl.sandbox.functions import Answers, decode, encode
from vlm_rl.sandbox.limited import LimitedWorker

_SMALL = 16 << 10  # bytes of values that are compared here, at worst in some 10 ms
CPU_SECONDS = 10.0  # of one comparison of larger ones
_MEMORY = 1 << 30


def comparison_worker() -> LimitedWorker:
    """Return a process in which large values are compared."""
    return LimitedWorker(f"{__name__}.first_difference", cpu_seconds=CPU_SECONDS, memory=_MEMORY)


def compare(worker: LimitedWorker, answers: Answers, tests: CodeTests, expected: Sequence[Any]) -> list[Any] | None:
    """Return the first answer that is wrong, as [its index, the reason], or None.

    Raises LimitError where the comparison takes too much, and FaultError or OSError for a fault of ours.
    """
    count = len(answers.trees)
    options = [_options(tests, number) for number in range(count)]
    arguments = (
        tests.rule,
        options,
        encode(list(tests.inputs[:count])),
        answers.trees,
        encode(list(expected[:count])),
    )
    return first_difference(*arguments) if answers.num_bytes <= _SMALL else worker.call(*arguments)


def first_difference(
    rule: str,
    options: Sequence[dict[str, Any]],
    inputs: Sequence[Any],
    answers: Sequence[Any],
    expected: Sequence[Any],
) -> list[Any] | None:
    """Return the first answer that is wrong, as [its index, the reason], or None.

    Args:
        rule: key of code_rules.RULES.
        options: of the rule, for each answer.
        inputs: the arguments of each call, as `encode` makes them, and so the others.
        answers: what was returned.
        expected: the golds.
    """
    for number, tree in enumerate(answers):
        try:
            value = decode(tree)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return [number, "what it returned cannot be read"]
        gold = decode(expected[number])
        try:
            passes = RULES[rule](decode(inputs[number]), value, gold, **options[number])
        except MemoryError:
            raise
        except Exception:  # values of other types than the rule compares, as in the published rules
            passes = False
        if not passes:
            return [number, f"returned {shown(value)} in place of {shown(gold)}"]
    return None


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
