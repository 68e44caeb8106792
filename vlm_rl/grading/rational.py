r"""Exact rational numbers out of LaTeX or plain text: our own small parser, no symbolic library.

Understands digits with thousands separators, decimals (repeating ones with \overline), scientific
notation, + - * / and their LaTeX names, \frac, mixed numbers, integer powers, factorials and
binomials. `parse_rational` returns None for anything else and raises TooLargeError before it would compute
a number of more than MAX_BITS bits, so hostile input such as 9^{9^{9^9}} costs nothing.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_BITS = 100_000
MAX_WORK = 2_000_000  # bits over all results of one text
MAX_DIGITS = 4_000
MAX_FACTORIAL = 5_000
MAX_DEPTH = 60

_DATE = re.compile(r" *(?:[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}|[0-9]{1,2}/[0-9]{1,2}/[0-9]{4}) *")
NUMBER = (
    r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?(?![0-9,])"  # 1,234.5
    r"|[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]*)?(?![0-9])(?! ?/)"  # 1 234.5, which is also 1\,234.5
    r"|[0-9]{1,3}(?:(?:'[0-9]{3})+(?![0-9'])|(?:\.[0-9]{3}){2,}(?![0-9.]))"  # 1'234, 1.234.567
    r"|[0-9]*\.[0-9]*\\overline ?\{[0-9]+\}"  # 0.1\overline{6}
    r"|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+(?![0-9.]))?"
)
_TOKEN = re.compile(
    rf" *(?:(?P<number>{NUMBER})|(?P<word>\\(?:frac|binom|cdot|times|div)(?![A-Za-z]))|(?P<sign>[-+*/^!(){{}}]))"
)
_OPERATORS = {"\\cdot": "*", "\\times": "*", "\\div": "/"}


class TooLargeError(Exception):
    """The text names a number too large to be worth computing."""


class NotReadableError(Exception):
    """The text is not a number in any notation we read."""


def parse_rational(text: str) -> Fraction | None:
    """The exact value of `text`, or None if it is not a rational number. Raises TooLargeError."""
    if is_date(text):
        return None
    try:
        return Parser(tokens(text)).whole()
    except (NotReadableError, ZeroDivisionError):
        return None


def is_date(text: str) -> bool:
    """Whether this is 2021-03-05 or 3/5/2021, which is neither a difference nor a quotient."""
    return _DATE.fullmatch(text) is not None


def tokens(text: str, pattern: re.Pattern[str] = _TOKEN) -> list[str]:
    """The text cut into `pattern`'s tokens. Raises NotReadableError where something else stands."""
    found: list[str] = []
    position, text = 0, text.strip()
    while position < len(text):
        match = pattern.match(text, position)
        if match is None:
            raise NotReadableError
        token = match.group().strip()
        found.append(_OPERATORS.get(token, token))
        position = match.end()
    return found


class Parser:
    """Recursive descent with a depth limit; every intermediate result is bounded.

    vlm_rl.grading.closed_form reads more than numbers with it: it replaces `primary`, `power` and `bounded`.
    """

    FACTORS = frozenset(["(", "\\frac", "\\binom"])  # what multiplies without a sign

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.work = 0

    def whole(self) -> Any:
        value = self.sum(0)
        if self.next is not None:
            raise NotReadableError
        return value

    def bounded(self, value: Any) -> Any:
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        self.work += bits
        if bits > MAX_BITS or self.work > MAX_WORK:
            raise TooLargeError(f"numbers of more than {MAX_BITS} bits")
        return value

    def starts_factor(self, token: str) -> bool:
        return token in self.FACTORS

    @property
    def next(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, expected: str | None = None) -> str:
        token = self.next
        if token is None or (expected is not None and token != expected):
            raise NotReadableError
        self.position += 1
        return token

    def sum(self, depth: int) -> Any:
        value = self.product(depth)
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = self.bounded(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Any:
        value = self.signed(depth)
        while (token := self.next) is not None and (token in ("*", "/") or self.starts_factor(token)):
            if token in ("*", "/"):
                self.take()
                other = self.signed(depth)
                value = self.bounded(value * other if token == "*" else value / other)
            else:
                value = self.bounded(value * self.power(depth))
        return value

    def signed(self, depth: int) -> Any:
        sign, signs = 1, 0
        while self.next in ("+", "-"):
            sign *= 1 if self.take() == "+" else -1
            signs += 1
        if signs > 2:
            raise NotReadableError
        return sign * self.power(depth)

    def power(self, depth: int) -> Any:
        value = self.primary(depth)
        if self.next == "!":
            self.take()
            value = factorial(value)
        if self.next == "^":
            self.take()
            exponent = self.group(depth) if self.next in ("{", "(") else self.signed(deeper(depth))
            value = _power(value, exponent)
        return value

    def primary(self, depth: int) -> Any:
        token = self.next
        if token in ("(", "{"):
            return self.group(depth)
        self.take()
        if token == "\\frac":
            numerator, denominator = self.argument(depth), self.argument(depth)
            return self.bounded(numerator / denominator)
        if token == "\\binom":
            return binomial(self.argument(depth), self.argument(depth))
        if token is None or token[0] not in "0123456789.":
            raise NotReadableError
        value = _literal(token)
        return value + self.mixed_part() if token.isdigit() else value

    def mixed_part(self) -> Fraction:
        r"""The fraction of a mixed number such as 2\frac{1}{3} or 2 1/3; 0 if there is none."""
        ahead = self.tokens[self.position : self.position + 7]
        parts, used = None, 0
        if len(ahead) == 7 and [ahead[i] for i in (0, 1, 3, 4, 6)] == ["\\frac", "{", "}", "{", "}"]:
            parts, used = (ahead[2], ahead[5]), 7
        elif len(ahead) >= 3 and ahead[1] == "/":
            parts, used = (ahead[0], ahead[2]), 3
        if parts is None or not all(part.isdigit() and len(part) < 10 for part in parts):
            return Fraction(0)
        if not int(parts[0]) < int(parts[1]):
            raise NotReadableError
        self.position += used
        return Fraction(int(parts[0]), int(parts[1]))

    def group(self, depth: int) -> Any:
        closing = {"(": ")", "{": "}"}[self.take()]
        value = self.sum(deeper(depth))
        self.take(closing)
        return value

    def argument(self, depth: int) -> Any:
        if self.next != "{":
            raise NotReadableError
        return self.group(depth)


def deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise TooLargeError(f"more than {MAX_DEPTH} nested groups")
    return depth + 1


def _literal(token: str) -> Fraction:
    token = token.replace(",", "").replace(" ", "").replace("'", "")
    if token.count(".") > 1:
        token = token.replace(".", "")
    if len(token) > MAX_DIGITS:
        raise TooLargeError(f"a number of more than {MAX_DIGITS} digits")
    if "\\overline" in token:
        head, _, cycle = token.removesuffix("}").partition("\\overline{")
        whole, _, start = head.partition(".")
        base = Fraction(int(whole + start or "0"), 10 ** len(start))
        return base + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(start))
    mantissa, _, exponent = token.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals))
    return _power(Fraction(10), Fraction(int(exponent))) * value if exponent else value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise NotReadableError
    if base in (0, 1, -1):
        if base == 0 and exponent <= 0:
            raise NotReadableError
        return base if base >= 0 or exponent % 2 else Fraction(1)
    size = base.numerator.bit_length() + base.denominator.bit_length()
    if abs(exponent) * size > MAX_BITS:
        raise TooLargeError(f"a power of more than {MAX_BITS} bits")
    return base ** int(exponent)


@lru_cache(maxsize=64)
def factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise NotReadableError
    if value > MAX_FACTORIAL:
        raise TooLargeError(f"the factorial of a number above {MAX_FACTORIAL}")
    return Fraction(math.factorial(int(value)))


@lru_cache(maxsize=64)
def binomial(above: Fraction, below: Fraction) -> Fraction:
    if above.denominator != 1 or below.denominator != 1 or above < 0 or below < 0:
        raise NotReadableError
    if max(above, below) > MAX_FACTORIAL:
        raise TooLargeError(f"a binomial of a number above {MAX_FACTORIAL}")
    return Fraction(math.comb(int(above), int(below)))
