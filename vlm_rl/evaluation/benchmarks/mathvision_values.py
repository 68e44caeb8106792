r"""Compute the value that MathVision's published rule sees in a text, without running the text as code.

That rule turns LaTeX into a symbolic expression (latex2sympy2 1.9), prints it, and lets Python evaluate the printed
text. `value_of` gives the same number by a parser of a dozen rules: `value_of(r"3\sqrt{2}")` is 4.24...,
`value_of("6/2")` is 3.0, `value_of("2:30")` is 2/30. What has no value there has none here: a variable, a word, a
list, a lone %, an absolute value, \ln. Its oddities are kept, because published scores contain them: `7\frac{1}{2}`
is a product, and `3)` is 3. tests/evaluation/latex_values.jsonl holds what that library gave for over 1000 texts.

Model text is hostile: length, depth and the size of powers are bounded, and nothing is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

Value = int | float

_MAX_TEXT = 300
_MAX_DEPTH = 40
_MAX_BITS = 4096  # of a whole power, and of a value
_TOKEN = re.compile(r"\s*(\d+(?:,\d{3})+(?:\.\d+)?|\d*\.\d+|\d+|\\[A-Za-z]+|\\.|.)", re.DOTALL)
_SKIPPED = {r"\left", r"\right", r"\,", "~", "$", r"\displaystyle", r"\quad", r"\qquad"}
_TIMES = {"*", r"\times", r"\cdot"}
_OVER = {"/", r"\div", ":", r"\over"}
_CLOSES = {"(": ")", "{": "}", "[": "]", r"\{": r"\}", r"\lfloor": r"\rfloor"}
_FRACTIONS = (r"\frac", r"\dfrac", r"\tfrac")
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    **{rf"\{name}": getattr(math, name) for name in ("sin", "cos", "tan")},
    **{rf"\arc{name}": getattr(math, f"a{name}") for name in ("sin", "cos", "tan")},
}
_WORDS = {
    *_FUNCTIONS,
    *_FRACTIONS,
    r"\sqrt",
    r"\pi",
    r"\log",
    r"\exp",
    r"\binom",
    *_SKIPPED,
    *_TIMES,
    *_OVER,
    *_CLOSES,
}
_IGNORED_REST = re.compile(r"'|[)\]}_.][ !'-~]*")  # the published reader stops there, and keeps the value so far
_ODD_QUOTIENT = re.compile(r"(?:/|\}\{)-?\d*\.\d*[1-9]")  # it prints -4/2.5 as -4/5/2


class _NoValueError(Exception):
    """The text has no value."""


def value_of(text: str) -> Value | None:
    """Return the value of a text, an int where Python's would be one; None if it has none, or a larger one."""
    if len(text) > _MAX_TEXT or text.count(r"\left") != text.count(r"\right"):
        return None
    tokens = [token for token in _TOKEN.findall(text) if token not in _SKIPPED and token.strip()]
    parser = _Parser(tokens)
    try:
        value = parser.sum()
        rest = "".join(parser.rest())
        if rest and not _IGNORED_REST.fullmatch(rest):
            return None
        if isinstance(value, int):
            return value if value.bit_length() <= _MAX_BITS else None
        return value if math.isfinite(value) else None
    except (_NoValueError, ArithmeticError, ValueError):
        return None


def is_beyond(text: str) -> bool:
    """Say whether the published reader may see a different value: decimals, relations, rare commands, long texts."""
    if not re.search(r"\d", text):
        return False
    if value_of(text) is not None:
        return _ODD_QUOTIENT.search(text) is not None
    commands = set(re.findall(r"\\[A-Za-z]+", text))
    return len(text) > _MAX_TEXT or re.search("[<>!^]", text) is not None or bool(commands - _WORDS)


class _Parser:
    """A recursive descent over the tokens; each method returns the value of what it consumed."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def rest(self) -> list[str]:
        return self._tokens[self._at :]

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, wanted: str | None = None) -> str:
        token = self._peek()
        if token is None or (wanted is not None and token != wanted):
            raise _NoValueError
        self._at += 1
        return token

    def sum(self) -> Value:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _NoValueError
        value = self._product()
        while self._peek() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        self._depth -= 1
        return value

    def _product(self) -> Value:
        value = self._signed()
        while (token := self._peek()) in _TIMES or token in _OVER:
            self._take()
            other = self._signed()
            value = value * other if token in _TIMES else value / other
        return value

    def _signed(self) -> Value:
        sign = 1
        while self._peek() in ("+", "-"):
            sign *= -1 if self._take() == "-" else 1
        value = self._power()
        while self._starts_factor():  # 2\pi; binds closer than a written division
            value = value * self._power()
        return value * sign

    def _starts_factor(self) -> bool:
        token = self._peek()
        if token is None:
            return False
        known = (*_FRACTIONS, r"\sqrt", r"\pi", "e", r"\log", r"\exp", r"\binom")
        return _is_number(token) or token in known or token in _CLOSES or token in _FUNCTIONS

    def _power(self) -> Value:
        value = self._atom()
        while (token := self._peek()) in ("!", "^"):
            self._take()
            value = _factorial(value) if token == "!" else _raised(value, self._exponent())
        if self._peek() == r"\%":
            self._take()
            value = value / 100
        return value

    def _atom(self) -> Value:
        token = self._take()
        if _is_number(token):
            return _number(token)
        if token in _CLOSES:
            value = self.sum()
            self._take(_CLOSES[token])
            return math.floor(value) if token == r"\lfloor" else value
        if token in _FRACTIONS:
            return self._braced() / self._braced()
        if token in _FUNCTIONS:
            return _FUNCTIONS[token](self._argument())
        match token:
            case r"\pi":
                return math.pi
            case r"\sqrt":
                return self._root()
            case r"\binom":
                return _binomial(self._braced(), self._braced())
            case r"\log":
                base = self._exponent("_") if self._peek() == "_" else 10
                return math.log(self._argument(), base)
            case r"\exp":
                return _exp(self._argument())
            case "e" if self._peek() == "^":
                self._take()
                return _exp(self._exponent())
        raise _NoValueError

    def _braced(self) -> Value:
        if self._peek() != "{":
            raise _NoValueError
        return self._atom()

    def _argument(self) -> Value:
        r"""Read a function's argument: \sin(2)\cdot 3 is 3 \sin 2, but without brackets \sin 2\cdot 3 is \sin 6."""
        return self._atom() if self._peek() == "(" else self._product()

    def _exponent(self, mark: str = "") -> Value:
        """Read a braced group or one token, after `mark`; a sign or a round bracket has no value there."""
        if mark:
            self._take(mark)
        if self._peek() in ("(", "["):
            raise _NoValueError
        return self._atom()

    def _root(self) -> Value:
        degree: Value = 2
        if self._peek() == "[":
            degree = self._atom()
        inside = self._braced()
        return math.sqrt(inside) if degree == 2 else _raised(inside, 1 / degree)


def _is_number(token: str) -> bool:
    return token[-1].isdecimal() and token[0] != "\\"


def _number(token: str) -> Value:
    """Read a number; a decimal that is whole counts as a whole number: 3.0 is 3."""
    text = token.replace(",", "")
    if "." not in text:
        return int(text)
    value = float(text)
    return int(value) if value.is_integer() else value


def _raised(base: Value, power: Value) -> Value:
    if isinstance(base, int) and isinstance(power, int) and base.bit_length() * abs(power) > _MAX_BITS:
        raise _NoValueError
    value = base**power
    if isinstance(value, complex):
        raise _NoValueError
    return value


def _exp(power: Value) -> Value:
    """Return e to a power; the published reader prints exp(1) as E, which has no value there."""
    if power == 1:
        raise _NoValueError
    return 1 if power == 0 else math.exp(power)


def _factorial(value: Value) -> int:
    if not isinstance(value, int) or not 0 <= value <= 500:
        raise _NoValueError
    return math.factorial(value)


def _binomial(n: Value, k: Value) -> int:
    if not isinstance(n, int) or not isinstance(k, int) or max(abs(n), abs(k)) > 500:
        raise _NoValueError
    return math.comb(n, k)
