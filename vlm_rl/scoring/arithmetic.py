r"""The value of a closed LaTeX expression, computed by a parser of a dozen rules and nothing else.

`value_of(r"3\sqrt{2}")` is 4.24..., `value_of("1/2")` is Fraction(1, 2); anything with a letter, a word, a
relation or a list has no value. Model text is hostile: length, depth and the size of powers are bounded,
and nothing is ever run as code. Whole numbers and their quotients stay exact, as in a symbolic system.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Value = Fraction | float

_MAX_TEXT = 300
_MAX_DEPTH = 40
_MAX_BITS = 4096  # of an exact power or factorial
_TOKEN = re.compile(r"\s*(\d+(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\.\d+|\d+|\\[A-Za-z]+|\\.|.)", re.DOTALL)
_SKIPPED = {r"\left", r"\right", r"\,", r"\;", r"\!", r"\ ", "~", "$", r"\displaystyle", r"\quad"}
_TIMES = {"*", r"\times", r"\cdot"}
_OVER = {"/", r"\div", ":"}  # the grammar behind the published rule reads a colon as a division
_CLOSES = {"(": ")", "{": "}", "[": "]", "|": "|"}
_FUNCTIONS = {r"\sin": math.sin, r"\cos": math.cos, r"\tan": math.tan, r"\ln": math.log, r"\exp": math.exp}


class _NoValueError(Exception):
    """The text is no closed expression of the kind that is understood."""


def value_of(text: str) -> Value | None:
    """The value of `text`, exact where only whole numbers are involved; None if it has none."""
    if len(text) > _MAX_TEXT:
        return None
    tokens = [token for token in _TOKEN.findall(text.replace("−", "-")) if token not in _SKIPPED and token.strip()]
    parser = _Parser(tokens)
    try:
        value = parser.sum()
        if parser.peek() is not None:
            return None
        return value if _is_usable(value) else None
    except (_NoValueError, ArithmeticError, ValueError):
        return None


def _is_usable(value: Value) -> bool:
    """Finite, and small enough to be written and rounded. Raises OverflowError for a quotient that is not."""
    if isinstance(value, Fraction):
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        return bits <= 2 * _MAX_BITS and (value.denominator == 1 or math.isfinite(float(value)))
    return math.isfinite(value)


class _Parser:
    """Recursive descent over the tokens; each method returns the value of what it consumed."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def take(self, wanted: str | None = None) -> str:
        token = self.peek()
        if token is None or (wanted is not None and token != wanted):
            raise _NoValueError
        self._at += 1
        return token

    def sum(self) -> Value:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _NoValueError
        value = self._product()
        while self.peek() in ("+", "-"):
            sign = self.take()
            other = self._product()
            value = (
                _join(value, other, lambda a, b: a + b) if sign == "+" else _join(value, other, lambda a, b: a - b)
            )
        self._depth -= 1
        return value

    def _product(self) -> Value:
        value = self._signed()
        while (token := self.peek()) in _TIMES or token in _OVER:
            self.take()
            other = self._signed()
            value = _join(value, other, (lambda a, b: a * b) if token in _TIMES else (lambda a, b: a / b))
        return value

    def _signed(self) -> Value:
        sign = 1
        while self.peek() in ("+", "-"):
            sign *= -1 if self.take() == "-" else 1
        value = self._power()
        while self._starts_factor():  # 2\pi; binds closer than a written division
            mixed = re.fullmatch(r"\d+", self._tokens[self._at - 1]) and self.peek() == r"\frac"
            other = self._power()
            value = _join(value, other, (lambda a, b: a + b) if mixed else (lambda a, b: a * b))
        return value * sign

    def _starts_factor(self) -> bool:
        token = self.peek()
        if token is None or token in ("|", ")", "}", "]"):
            return False
        return token in ("(", "{", r"\frac", r"\sqrt", r"\pi", "π", "e") or token in _FUNCTIONS

    def _power(self) -> Value:
        value = self._atom()
        while self.peek() in ("!", "%", r"\%", "^"):
            token = self.take()
            if token == "!":
                value = _factorial(value)
            elif token == "^":
                value = _raised(value, self._argument())
            else:
                value = _join(value, Fraction(100), lambda a, b: a / b)
        return value

    def _atom(self) -> Value:
        token = self.take()
        if token[0].isdecimal() or token[0] == ".":
            number = token.replace(",", "")
            return float(number) if "." in number else Fraction(int(number))
        if token in _CLOSES:
            value = self.sum()
            self.take(_CLOSES[token])
            return abs(value) if token == "|" else value
        if token in (r"\frac", r"\dfrac", r"\tfrac"):
            return _join(self._argument(), self._argument(), lambda a, b: a / b)
        if token == r"\sqrt":
            return self._root()
        if token in (r"\pi", "π"):
            return math.pi
        if token == "e" and self.peek() == "^":  # alone it is a letter like any other
            return math.e
        if token in _FUNCTIONS:
            return _FUNCTIONS[token](float(self._power()))
        raise _NoValueError

    def _argument(self) -> Value:
        r"""A braced group, or one token: \frac{1}{2}, x^2, x^{-1}."""
        if self.peek() == "{":
            return self._atom()
        return -self._atom() if self.peek() == "-" and self.take() else self._atom()

    def _root(self) -> Value:
        degree: Value = Fraction(2)
        if self.peek() == "[":
            degree = self._atom()
        inside = self._argument()
        if degree == 2 and isinstance(inside, Fraction) and inside >= 0:
            top, bottom = math.isqrt(inside.numerator), math.isqrt(inside.denominator)
            if top * top == inside.numerator and bottom * bottom == inside.denominator:
                return Fraction(top, bottom)
        if inside < 0:
            raise _NoValueError
        return float(inside) ** (1 / float(degree))


def _join(a: Value, b: Value, operate: Callable[[Any, Any], Any]) -> Value:
    """`operate` on two values: exact only if both are."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return operate(a, b)
    return operate(float(a), float(b))


def _raised(base: Value, power: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(power, Fraction) and power.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(power.numerator) > _MAX_BITS:
            raise _NoValueError
        return base**power.numerator
    value = float(base) ** float(power)
    if isinstance(value, complex):
        raise _NoValueError
    return value


def _factorial(value: Value) -> Value:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 170:
        raise _NoValueError
    return Fraction(math.factorial(value.numerator))
