"""Read the tests of a program from cells of a table, in the forms in which sets of programming problems have them.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                         programs that read stdin
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}             a function, or a method of the class Solution
    {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}           the same, as APPS and TACO have it
    [{"input": "1 2\\n", "output": "3\\n"}, ...]                        programs that read stdin
    ["assert add(1, 2) == 3", ...]                                     a function
    "def check(candidate):\\n    assert candidate(1, 2) == 3"            the same, with fn_name beside it

Each may also be JSON text, or the text of the asserts. An object may hold the limits of each test (time_limit,
memory_limit), which a table may have in columns of their own. Asserts are read (written_asserts), never run: what is
expected stays outside of the sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlm_rl.data_prep.readers.row_limit import load_json
from vlm_rl.data_prep.readers.written_asserts import read_asserts
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError
from vlm_rl.grading.code_tests import CodeTests

# What solutions of contests take for granted, LeetCode's signatures above all.
HEADER = """from typing import *
import bisect, collections, functools, heapq, itertools, math, operator, re, string
from collections import Counter, OrderedDict, defaultdict, deque"""
_FORMS = (
    '{"inputs": [...], "outputs": [...], "fn_name": ...}, a list of {"input": ..., "output": ...}, or asserts such '
    'as ["assert add(1, 2) == 3"]'
)
_SECONDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|milliseconds?|s|sec|seconds?)?\.?\s*", re.IGNORECASE)
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(bytes|kb|kib|mb|mib|megabytes?|gb|gib)?\.?\s*", re.IGNORECASE)
_NAMED_ARGUMENT = re.compile(r"\s*[A-Za-z_]\w*\s*=[^=]")  # nums = [1, 2], k = 3: LeetCode's
_MIB = {"bytes": 2**-20, "k": 2**-10, "m": 1.0, "g": 2**10}
_LARGEST_IN_MIB = 1 << 16  # a number above it has bytes for a unit


def tests_in(value: Any, *, seconds: Any = None, memory: Any = None) -> CodeTests:
    """Return the tests of a cell. Raises RowError for anything else.

    Args:
        value: the cell of the tests.
        seconds: that of the time limit of one test, if there is one.
        memory: that of the memory limit, if there is one; a number is in MiB, or in bytes where it is large.
    """
    try:
        tree = _parsed(value)
        limits = _limits(tree if isinstance(tree, Mapping) else {}, seconds, memory)
        return CodeTests(**_tests(tree), header=HEADER, **limits)
    except UserError as error:
        raise RowError("bad_tests", str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError, SyntaxError) as error:
        cause = str(error) if type(error) is ValueError else repr(error)
        raise RowError("bad_tests", f"its tests are refused: {cause:.200}; the forms are {_FORMS}") from None


def _parsed(value: Any) -> Any:
    """Return the list or object of a cell; a text that is no JSON is one of asserts."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except ValueError:
        return [value] if "assert" in value else load_json(value)


def _tests(tree: Any) -> dict[str, Any]:
    """Return inputs, outputs, the function and the rule of comparison."""
    name = ""
    if isinstance(tree, Mapping):
        name = str(tree.get("fn_name") or tree.get("entry_point") or "")
        tree = next((tree[key] for key in ("asserts", "test_list", "test") if tree.get(key)), tree)
    if isinstance(tree, str):
        tree = [tree]
    if isinstance(tree, list) and tree and all(isinstance(item, str) for item in tree):
        return _of_asserts("\n".join(tree), name)
    if isinstance(tree, list):
        if any(test.get("testtype") == "functional" for test in tree):
            raise ValueError("tests of the type functional name no function; give inputs, outputs and fn_name")
        tree = {"inputs": [test["input"] for test in tree], "outputs": [test["output"] for test in tree]}
    inputs, outputs = list(tree["inputs"]), list(tree["outputs"])
    if not name and inputs and all(isinstance(text, str) and _NAMED_ARGUMENT.match(text) for text in inputs):
        raise ValueError(f"{inputs[0][:40]!r} are arguments of a function: give them as lists, with fn_name")
    are_wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    rule = ("equal_or_item" if are_wrapped else "equal") if name else "lines"
    return {"inputs": inputs, "outputs": outputs, "function": name, "rule": rule}


def _of_asserts(text: str, name: str) -> dict[str, Any]:
    """Return the tests that asserts describe.

    Args:
        text: the asserts, a Python text.
        name: the function that `candidate` stands for.
    """
    asserts = read_asserts(text)
    functions = {name if item.function == "candidate" and name else item.function for item in asserts}
    if len(functions) != 1:
        raise ValueError(f"asserts call {len(functions)} functions: {', '.join(sorted(functions))}")
    return {
        "inputs": [item.arguments for item in asserts],
        "outputs": [item.expected for item in asserts],
        "function": functions.pop(),
        "rule": "same",
        "atol": [item.tolerance for item in asserts] if any(item.tolerance for item in asserts) else 0.0,
        "views": [item.view for item in asserts] if any(item.view for item in asserts) else [],
    }


# -- limits --------------------------------------------------------------------------------------------


def _limits(tree: Mapping[str, Any], seconds: Any, memory: Any) -> dict[str, Any]:
    given = {
        "seconds": next((v for v in (seconds, tree.get("time_limit"), tree.get("seconds")) if v is not None), None),
        "memory_mib": next(
            (
                v
                for v in (memory, *(tree.get(f"memory_{key}") for key in ("limit", "limit_bytes", "mib")))
                if v is not None
            ),
            None,
        ),
    }
    readers = {"seconds": _seconds, "memory_mib": _mib}
    return {name: readers[name](value) for name, value in given.items() if value is not None}


def _seconds(value: Any) -> float:
    """Return the seconds of 2, 2.5, "2 seconds", "500 ms", or of CodeContests' {"seconds": 2, "nanos": 0}."""
    if isinstance(value, Mapping):
        return float(value.get("seconds") or 0) + float(value.get("nanos") or 0) / 1e9
    if (match := _SECONDS.fullmatch(str(value))) is None:
        raise ValueError(f"the time limit is {value!r}; give seconds, such as 2 or 2.5 seconds")
    return float(match[1]) * (1e-3 if (match[2] or "").lower().startswith("m") else 1)


def _mib(value: Any) -> int:
    """Return the MiB of 256, "256 MB", "256 megabytes", 268435456."""
    if (match := _MEMORY.fullmatch(str(value))) is None:
        raise ValueError(f"the memory limit is {value!r}; give MiB, such as 256 or 256 MB")
    unit = (match[2] or "").lower()
    number = float(match[1])
    if not unit:
        unit = "bytes" if number > _LARGEST_IN_MIB else "m"
    return max(1, round(number * _MIB[unit if unit == "bytes" else unit[0]]))
