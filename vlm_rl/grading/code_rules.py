"""When an output of a program is right: the published rules of benchmarks, on plain data.

    lines                LiveCodeBench, programs that read stdin (lcb_runner/evaluation/testing_util.py, grade_stdio)
    equal                LiveCodeBench, functions (the same file, grade_call_based)
    equal_or_item        APPS and TACO, functions (testing_util.py): each output stands in a list of its own
    same                 asserts of users' own sets
    evalplus_humaneval   HumanEval+ (evalplus/eval/__init__.py of EvalPlus 0.3.1, check_output)
    evalplus_mbpp        MBPP+ (the same function)

Values come from a sandbox as data of Python's own types, so no comparison here runs code of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

_RTOL = 1e-7
_FLOATS_ATOL = 1e-6  # where a gold consists of floats and the problem names no tolerance
# MBPP+ compares these functions' outputs as sets, and of these only asks whether there is one.
_AS_SETS = {
    *("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum"),
    *("intersection_array", "find_dissimilar", "Diff"),
}
_ANY_BUT_NONE = {"check_str", "text_match_three", "text_starta_endb"}


def same_lines(printed: str, expected: str) -> bool:
    """Tell whether two outputs have the same lines: equal texts without outer spaces, or equal decimal numbers."""
    ours, theirs = printed.strip().split("\n"), expected.strip().split("\n")
    return len(ours) == len(theirs) and all(_same_line(*pair) for pair in zip(ours, theirs, strict=True))


def _same_line(ours: str, theirs: str) -> bool:
    ours, theirs = ours.strip(), theirs.strip()
    if ours == theirs:
        return True
    try:
        return [Decimal(word) for word in ours.split()] == [Decimal(word) for word in theirs.split()]
    except InvalidOperation:
        return False


def equal_values(_: Sequence[Any], value: Any, expected: Any, **__: object) -> bool:
    """Tell whether a value equals the expected one; a tuple counts as a list."""
    return (list(value) if isinstance(value, tuple) else value) == expected


def equal_or_item(call: Sequence[Any], value: Any, expected: Any, **options: object) -> bool:
    """Tell whether a value equals the expected one, or what the list of one around it holds."""
    return equal_values(call, value, expected, **options) or equal_values(call, value, expected[0], **options)


def same_value(_: Sequence[Any], value: Any, expected: Any, *, atol: float, view: str = "", **__: object) -> bool:
    """Tell whether a value, or a view of it, equals the expected one as an assert compares them, or nearly so."""
    if view:
        value = VIEWS[view](value)
    is_close = atol > 0 and isinstance(value, int | float) and abs(value - expected) <= atol
    return bool(is_close or value == expected)


def evalplus_humaneval(call: Sequence[Any], value: Any, expected: Any, *, function: str, atol: float) -> bool:
    """Tell whether a value is right by EvalPlus' rule; a root of a polynomial need only be one.

    Args:
        call: the arguments that the function was called with.
        value: what it returned.
        expected: the gold.
        function: its name, which some exceptions depend on.
        atol: the absolute tolerance of floats; 0 if the problem names none.
    """
    if function == "find_zero":
        (coefficients,) = call
        return abs(sum(factor * math.pow(value, power) for power, factor in enumerate(coefficients))) <= atol
    return _close(value, expected, atol, is_equal=value == expected)


def evalplus_mbpp(call: Sequence[Any], value: Any, expected: Any, *, function: str, atol: float) -> bool:
    """Tell whether a value is right by EvalPlus' rule, with its exceptions for questions of several answers.

    The arguments are those of evalplus_humaneval.
    """
    is_equal = value == expected
    if function == "are_equivalent":
        return True
    if function == "sum_div":
        is_equal = is_equal or value == 0
    elif function == "surface_Area":
        is_equal = is_equal or abs(value - _pyramid_surface(*call)) <= atol
    elif function == "digit_distance_nums":
        is_equal = is_equal or value == _digit_distance(*call)
    elif function in _AS_SETS:
        is_equal = set(value) == set(expected)
    elif function in _ANY_BUT_NONE:
        wanted = expected if isinstance(expected, bool) else expected is not None
        is_equal = (value if isinstance(value, bool) else value is not None) == wanted
    return _close(value, expected, atol, is_equal=is_equal)


def _close(value: Any, expected: Any, atol: float, *, is_equal: bool) -> bool:
    """Tell whether values are equal, or close where the problem has a tolerance or the gold consists of floats."""
    if atol == 0 and _is_of_floats(expected):
        atol = _FLOATS_ATOL
    if is_equal or atol == 0 or type(value) is not type(expected):
        return is_equal
    if isinstance(expected, list | tuple) and len(value) != len(expected):
        return False
    return bool(np.allclose(value, expected, rtol=_RTOL, atol=atol))


def _is_of_floats(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    return bool(items) and all(isinstance(item, float) for item in items)


def _pyramid_surface(edge: float, height: float) -> int:
    """Return the surface of a pyramid on a square, whose slant height is that of a face."""
    return round(edge**2 + 2 * edge * math.hypot(edge / 2, height))


def _digit_distance(first: int, second: int) -> int:
    """Return the sum of the differences between digits in the same place."""
    width = max(len(str(first)), len(str(second)))
    pairs = zip(str(first).zfill(width), str(second).zfill(width), strict=True)
    return sum(abs(int(digit) - int(other)) for digit, other in pairs)


# What an assert may make of a value before it compares: set(f(1)) == {1, 2}; bool is that of `assert f(1)`.
VIEWS: Mapping[str, Callable[[Any], Any]] = {
    **{view.__name__: view for view in (bool, set, frozenset, sorted, list, tuple, len)},
}
RULES: Mapping[str, Callable[..., bool]] = {
    "lines": same_lines,
    "equal": equal_values,
    "equal_or_item": equal_or_item,
    "same": same_value,
    "evalplus_humaneval": evalplus_humaneval,
    "evalplus_mbpp": evalplus_mbpp,
}
