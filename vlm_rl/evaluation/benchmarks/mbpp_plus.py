"""MBPP+ (EvalPlus, arXiv 2305.01210): 378 short tasks in words, with about 35 times MBPP's tests.

JSON has neither tuples nor sets nor complex numbers. Which tasks take some, and where, is data of EvalPlus
(evalplus/data/mbpp.py, mbpp_deserialize_inputs); it is listed here by the shape of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vlm_rl.evaluation.benchmarks.code_sets import evalplus_benchmark

Convert = Callable[[list[Any]], list[Any]]


def _tuples(items: list[Any]) -> list[Any]:
    return [tuple(item) for item in items]


def _deep(value: Any) -> Any:
    return tuple(map(_deep, value)) if isinstance(value, list) else value


def _first_is_tuple(call: list[Any]) -> list[Any]:
    return [tuple(call[0]), *call[1:]]


_CONVERSIONS: tuple[tuple[Convert, str], ...] = (
    # every argument is a tuple
    (_tuples, "2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809"),
    # every argument is a list of tuples
    (lambda call: [_tuples(items) for items in call], "63 64 70 94 120 237 272 299 400 409 417 438 473 614 780"),
    # the first argument is a list of tuples
    (lambda call: [_tuples(call[0]), *call[1:]], "75 413 444 753"),
    (lambda call: [call[0], tuple(call[1])], "106 750"),
    (_first_is_tuple, "250 307 405 446 617 720 763 808"),
    # every argument is a tuple of tuples
    (lambda call: [tuple(_tuples(items)) for items in call], "259 401 445"),
    # a tuple that may hold tuples
    (lambda call: [tuple(tuple(item) if isinstance(item, list) else item for item in call[0])], "278"),
    # a list of sets; EvalPlus has an empty dictionary for an empty one
    (lambda call: [[set(item) if isinstance(item, list) and item else {} for item in call[0]]], "115"),
    (lambda call: [float(call[0]), complex(call[1])], "124"),
    (lambda call: [complex(call[0])], "252"),
    (lambda call: [{key: tuple(value) for key, value in call[0].items()}, *call[1:]], "722"),
    (lambda call: list(_deep(call)), "580 615 791"),
)
_BY_TASK: dict[str, Convert] = {task: convert for convert, tasks in _CONVERSIONS for task in tasks.split()}


def arguments(task: str, calls: list[Any]) -> list[list[Any]]:
    """Return the calls of a task ("Mbpp/2") with the types that its function takes."""
    convert = _BY_TASK.get(task.rpartition("/")[2], list)
    return [list(convert(call)) for call in calls]


BENCHMARK = evalplus_benchmark(
    "mbpp_plus", rule="evalplus_mbpp", num_rows=378, prefix="MbppPlus", arguments=arguments
)
