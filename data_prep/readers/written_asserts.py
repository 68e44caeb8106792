"""Read asserts that compare a call with a value, as tests of a program. They are read, never run.

    assert add(1, 2) == 3
    assert set(f(1)) == {1, 2}                 a view of the value: set, frozenset, sorted, list, tuple, len
    assert f(1), "message"                     anything that is true; with `not`, anything that is false
    assert abs(f(1) - 1.5) < 1e-6              so do math.isclose and pytest.approx
    assert f([0] * 3) == float("inf")          constants: arithmetic, repetition, math.pi, range(3)

Anything else is refused, with its line. A short text may write out values that take all memory, so a process
with limits reads it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from vlm_rl.grading.code_tests import VIEWS
from vlm_rl.sandbox.functions import decode, encode
from vlm_rl.sandbox.limited import FaultError, LimitedWorker, LimitError

_LARGEST = 100_000  # items of a value that an assert writes out by repetition or as a range
_BITS = 20_000  # of an integer
_worker = LimitedWorker(f"{__name__}.read", cpu_seconds=10.0, memory=1 << 30, output=16 << 20)
_NAMES = {"math.pi": math.pi, "math.e": math.e, "math.tau": math.tau, "math.inf": math.inf, "inf": math.inf}
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_SIGNS = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_BUILDERS: Mapping[str, Callable[..., Any]] = {
    "float": float, "set": set, "frozenset": frozenset, "list": list, "tuple": tuple, "sorted": sorted, "dict": dict,
    "range": lambda *ends: _range(*ends), "math.sqrt": math.sqrt, "complex": complex,
}  # fmt: skip


class Assert(NamedTuple):
    """One test: the function, its arguments, the view of its value, and what is expected of that."""

    function: str
    arguments: list[Any]
    expected: Any
    tolerance: float = 0.0
    view: str = ""


def read_asserts(text: str) -> list[Assert]:
    """Return the asserts of a Python text. Raises ValueError if asserts_in does, and if they take too much."""
    try:
        found = _worker.call(text)
    except (LimitError, FaultError) as error:
        raise ValueError(f"reading its asserts {error}") from None
    if isinstance(found, str):
        raise ValueError(found)
    return [
        Assert(function, decode(arguments), decode(expected), tolerance, view)
        for function, arguments, expected, tolerance, view in found
    ]


def read(text: str) -> list[list[Any]] | str:
    """Return the fields of each assert, or why they cannot be read. Called in the process with limits."""
    try:
        return [
            [item.function, encode(item.arguments), encode(item.expected), item.tolerance, item.view]
            for item in asserts_in(text)
        ]
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        return str(error) if type(error) is ValueError else repr(error)


def asserts_in(text: str) -> Iterator[Assert]:
    """Yield the asserts of a Python text, those inside of `def check(candidate)` too.

    Raises ValueError for a statement that is not an import, `check`, METADATA or an assert that can be read, and
    SyntaxError.
    """
    for node in _statements(ast.parse(text)):
        try:
            yield from _of_test(node.test)
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"line {node.lineno}, {ast.unparse(node)[:80]!r}: {error}") from None


def _statements(module: ast.Module) -> Iterator[ast.Assert]:
    for node in module.body:
        body = node.body if isinstance(node, ast.FunctionDef) and node.name == "check" else [node]
        for inner in body:
            if isinstance(inner, ast.Assert):
                if not isinstance(inner.test, ast.Constant):  # assert True, "..."
                    yield inner
            elif not _means_nothing(inner):
                raise ValueError(f"line {inner.lineno}: {ast.unparse(inner)[:60]!r} is no assert")


def _means_nothing(node: ast.stmt) -> bool:
    """Tell whether a statement is an import, a text, METADATA = ..., `pass`, or a call of `check`."""
    if isinstance(node, ast.Expr):
        call = node.value
        return isinstance(call, ast.Constant) or (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
        )
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Pass) or (
        isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["METADATA"]
    )


def _of_test(test: ast.expr) -> Iterator[Assert]:
    """Yield the tests of an assert, of which `and` joins several."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            for value in values:
                yield from _of_test(value)
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            yield _equality(left, right)
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[limit],
        ):
            call, value = _call_and_value(left, right)
            yield _called(call)._replace(expected=plain_value(value), tolerance=float(plain_value(limit)))
        case ast.Call(
            func=ast.Attribute(attr="isclose") | ast.Name(id="isclose"), args=[left, right], keywords=options
        ):
            call, value = _call_and_value(left, right)
            given = {option.arg: float(plain_value(option.value)) for option in options}
            expected = float(plain_value(value))
            relative = given.get("rel_tol", given.get("rtol", 1e-9)) * abs(expected)
            tolerance = max(relative, given.get("abs_tol", given.get("atol", 0.0)))
            yield _called(call)._replace(expected=expected, tolerance=tolerance)
        case ast.UnaryOp(op=ast.Not(), operand=call):
            yield _called(call)._replace(expected=False, view="bool")
        case ast.Call():
            yield _called(test)._replace(expected=True, view="bool")
        case _:
            raise ValueError("it does not compare a call with a value")


def _equality(left: ast.expr, right: ast.expr) -> Assert:
    """Return the test of `call == value`, in either order; the call may stand inside a view, as in set(f(1))."""
    call, value = _call_and_value(left, right)
    match value:
        case ast.Call(func=ast.Attribute(attr="approx") | ast.Name(id="approx"), args=[about], keywords=options):
            expected = float(plain_value(about))
            given = {option.arg: float(plain_value(option.value)) for option in options}
            absolute = given.get("abs", 0.0 if "rel" in given else 1e-12)
            relative = given.get("rel", 0.0 if "abs" in given else 1e-6) * abs(expected)
            return _called(call)._replace(expected=expected, tolerance=max(absolute, relative))
    expected = plain_value(value)
    if isinstance(expected, float) and math.isnan(expected):
        raise ValueError("nan equals nothing, not even itself")
    view = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
    if isinstance(call, ast.Call) and view in VIEWS and view != "bool":
        if len(call.args) != 1 or call.keywords:
            raise ValueError(f"{view} has more than one argument")
        return _called(call.args[0])._replace(expected=expected, view=view)
    return _called(call)._replace(expected=expected)


def _call_and_value(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    """Return both sides, the call first."""
    return (left, right) if _calls_own(left) or not _calls_own(right) else (right, left)


def _calls_own(node: ast.expr) -> bool:
    """Tell whether an expression calls a function that is none of Python's."""
    return isinstance(node, ast.Call) and (
        _is_own(node)
        or (isinstance(node.func, ast.Name) and node.func.id in VIEWS and any(map(_calls_own, node.args)))
    )


def _is_own(call: ast.Call) -> bool:
    known = {*_BUILDERS, *VIEWS, "str", "int", "approx"}
    return isinstance(call.func, ast.Name) and call.func.id not in known


def _called(call: ast.expr) -> Assert:
    """Return the function and the arguments of a call. Raises ValueError for anything else."""
    if isinstance(call, ast.Call) and _is_own(call) and not call.keywords:
        function = call.func
        assert isinstance(function, ast.Name)
        return Assert(function.id, [plain_value(argument) for argument in call.args], None)
    raise ValueError(f"{ast.unparse(call)[:60]!r} is no call of a function with plain arguments")


def plain_value(node: ast.expr) -> Any:
    """Return the value of an expression of constants. Raises ValueError for all others, and for values too large."""
    match node:
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _computed(type(sign), plain_value(left), plain_value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](plain_value(operand))
        case ast.List(elts=items):
            return [plain_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(plain_value(item) for item in items)
        case ast.Set(elts=items):
            return {plain_value(item) for item in items}
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {plain_value(key): plain_value(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.Call(func=function, args=arguments, keywords=options) if ast.unparse(function) in _BUILDERS:
            named = {option.arg: plain_value(option.value) for option in options if option.arg}
            if len(named) == len(options):
                return _BUILDERS[ast.unparse(function)](*map(plain_value, arguments), **named)
        case ast.Attribute() | ast.Name() if ast.unparse(node) in _NAMES:
            return _NAMES[ast.unparse(node)]
        case ast.Constant(value=value) if value is not ...:
            return value
    raise ValueError(f"{ast.unparse(node)[:60]!r} is no plain value")


def _computed(sign: type[ast.operator], left: Any, right: Any) -> Any:
    """Return left sign right for numbers, and repeated or joined sequences. Raises ValueError if that is large."""
    sized = [side for side in (left, right) if isinstance(side, str | bytes | list | tuple)]
    if sized:
        count = next((side for side in (left, right) if isinstance(side, int)), 1)
        size = _weight(sized[0]) * max(0, count) if sign is ast.Mult else sum(map(_weight, sized))
        if sign not in (ast.Add, ast.Mult) or size > _LARGEST:
            raise ValueError("it repeats or joins more than can be read")
    elif not (isinstance(left, int | float | complex) and isinstance(right, int | float | complex)):
        raise ValueError("it computes with what is no number")
    elif sign is ast.Pow and isinstance(left, int) and left.bit_length() * abs(right) > _BITS:
        raise ValueError("its power is too large")
    value = _OPERATORS[sign](left, right)
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise ValueError("its number is too large")
    return value


def _weight(value: Any) -> int:
    """Return the number of items of a value, with those inside of them."""
    return sum(map(_weight, value)) + 1 if isinstance(value, list | tuple) else len(value) if _is_text(value) else 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes)


def _range(*ends: int) -> range:
    if len(numbers := range(*ends)) > _LARGEST:
        raise ValueError(f"its range has more than {_LARGEST} numbers")
    return numbers
