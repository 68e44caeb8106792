r"""Read exact rational numbers out of LaTeX or plain text, without a symbolic library.

The parser understands digits with thousands separators, decimals (repeating ones with \overline), scientific
notation, + - * / and their LaTeX names, \frac, mixed numbers, integer powers, factorials and binomials.
Hostile text such as 9^{9^{9^9}} costs nothing: the size of every result is checked before it is computed.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_BITS = 100_000  # of any number, numerator and denominator together
MAX_WORK = 2_000_000  # bits, summed over all results of one text
MAX_DIGITS = 4_000  # of a number as written
MAX_FACTORIAL = 5_000
MAX_DEPTH = 60  # nested groups

_DATE = re.compile(r" *(?:[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}|[0-9]{1,2}/[0-9]{1,2}/[0-9]{4}) *")
NUMBER = (
    r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?(?![0-9,])"  # 1,234.5
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
    """Say that a text names a number too large to be worth computing."""


class NotReadableError(Exception):
    """Say that a text is not a number in any notation that the parser knows."""


def parse_rational(text: str) -> Fraction | None:
    """Return the exact value of a text, or None if it is not a rational number.

    Raises:
        TooLargeError: The value, or a number on the way to it, exceeds one of the limits above.
    """
    if is_date(text):
        return None
    try:
        return RationalParser(tokenize(text)).parse()
    except (NotReadableError, ZeroDivisionError):
        return None


def is_date(text: str) -> bool:
    """Return whether the text is a date such as 2021-03-05 or 3/5/2021: neither a difference nor a quotient."""
    return _DATE.fullmatch(text) is not None


def tokenize(text: str, pattern: re.Pattern[str] = _TOKEN) -> list[str]:
    """Cut a text into the tokens of a pattern. Raises NotReadableError if none of them matches."""
    tokens: list[str] = []
    position, text = 0, text.strip()
    while position < len(text):
        match = pattern.match(text, position)
        if match is None:
            raise NotReadableError
        token = match.group().strip()
        tokens.append(_OPERATORS.get(token, token))
        position = match.end()
    return tokens


class RationalParser:
    """Compute the value of a list of tokens by recursive descent, with a limit on depth and on every result.

    vlm_rl.grading.closed_form derives a parser for roots and polynomials from it.
    """

    FACTORS = frozenset(["(", "\\frac", "\\binom"])  # these multiply without a sign: 2(3), 2\frac{1}{2}

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.work = 0

    def parse(self) -> Any:
        """Return the value of all tokens. Raises NotReadableError if some are left over."""
        value = self.sum(0)
        if self.next is not None:
            raise NotReadableError
        return value

    def bounded(self, value: Any) -> Any:
        """Return the value itself. Raises TooLargeError if it, or the work so far, exceeds the limits."""
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        self.work += bits
        if bits > MAX_BITS or self.work > MAX_WORK:
            raise TooLargeError(f"numbers of more than {MAX_BITS} bits")
        return value

    def starts_factor(self, token: str) -> bool:
        """Return whether a token that follows a factor without a sign multiplies it."""
        return token in self.FACTORS

    @property
    def next(self) -> str | None:
        """Return the next token without taking it, or None at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, expected: str | None = None) -> str:
        """Take the next token. Raises NotReadableError if there is none, or not the expected one."""
        token = self.next
        if token is None or (expected is not None and token != expected):
            raise NotReadableError
        self.position += 1
        return token

    def sum(self, depth: int) -> Any:
        """Read products joined by plus and minus, and return their sum."""
        value = self.product(depth)
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = self.bounded(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Any:
        """Read factors joined by signs or written next to each other, and return their product."""
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
        """Read a power with at most two signs before it."""
        sign, signs = 1, 0
        while self.next in ("+", "-"):
            sign *= 1 if self.take() == "+" else -1
            signs += 1
        if signs > 2:
            raise NotReadableError
        return sign * self.power(depth)

    def power(self, depth: int) -> Any:
        """Read a primary with its factorial and its exponent."""
        value = self.primary(depth)
        if self.next == "!":
            self.take()
            value = factorial(value)
        if self.next == "^":
            self.take()
            exponent = self.group(depth) if self.next in ("{", "(") else self.signed(next_depth(depth))
            value = _power(value, exponent)
        return value

    def primary(self, depth: int) -> Any:
        """Read a number, a fraction, a binomial or a group."""
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
        r"""Take the fraction of a mixed number, 2\frac{1}{3} or 2 1/3, and return it; return 0 if there is none."""
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
        """Return the value of what one pair of brackets encloses."""
        closing = {"(": ")", "{": "}"}[self.take()]
        value = self.sum(next_depth(depth))
        self.take(closing)
        return value

    def argument(self, depth: int) -> Any:
        """Return the value of a braced argument, such as the two of \\frac."""
        if self.next != "{":
            raise NotReadableError
        return self.group(depth)


def next_depth(depth: int) -> int:
    """Return the depth of a group inside a group of this depth. Raises TooLargeError if that is too deep."""
    if depth >= MAX_DEPTH:
        raise TooLargeError(f"more than {MAX_DEPTH} nested groups")
    return depth + 1


def _literal(token: str) -> Fraction:
    """Return the value of a number as written: 1,234.5, 1.2e-3 or 0.1\\overline{6}."""
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
    """Return base to an integer exponent. Raises NotReadableError for other exponents and for 0^0."""
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
    """Return the factorial. Raises NotReadableError below 0 or between integers, TooLargeError above 5,000."""
    if value.denominator != 1 or value < 0:
        raise NotReadableError
    if value > MAX_FACTORIAL:
        raise TooLargeError(f"the factorial of a number above {MAX_FACTORIAL}")
    return Fraction(math.factorial(int(value)))


@lru_cache(maxsize=64)
def binomial(n: Fraction, k: Fraction) -> Fraction:
    """Return the number of ways to choose k of n. Raises as `factorial` does."""
    if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
        raise NotReadableError
    if max(n, k) > MAX_FACTORIAL:
        raise TooLargeError(f"a binomial of a number above {MAX_FACTORIAL}")
    return Fraction(math.comb(int(n), int(k)))
