r"""Exact closed forms out of LaTeX: quotients of polynomials in letters, \pi and square roots of rationals.

Two such expressions are equal exactly if their cross products are: \sqrt{p} is reduced by its square, and
what is left is an integral domain, so `1/\sqrt{3}` and `\sqrt{3}/3`, `(x-1)(x+1)` and `x^2-1` need no
symbolic library. An i may be any letter or the imaginary unit: equality in either reading counts.
`parse_closed_form` returns None for anything else, hostile text included: every intermediate result is
bounded in terms, exponents and digits, and all of them together in work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

from vlm_rl.grading.rational import (
    NUMBER,
    NotReadableError,
    Parser,
    TooLargeError,
    binomial,
    deeper,
    factorial,
    tokens,
)

MAX_TERMS = 60
MAX_EXPONENT = 100
MAX_RADICAND = 10**8
MAX_LENGTH = 1_000
MAX_COEFFICIENT_BITS = 4_000
MAX_TERMS_IN_ALL = 10_000  # summed over every intermediate result of one text

_TOKEN = re.compile(
    rf" *(?:(?P<number>{NUMBER})|(?P<word>\\(?:frac|binom|cdot|times|div|sqrt|pi)(?![A-Za-z]))"
    r"|(?P<symbol>(?:\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|rho|sigma|tau)(?![A-Za-z])|[A-Za-z])"
    r"(?:_\{[A-Za-z0-9]{1,4}\})?)|(?P<sign>[-+*/^!(){}]))"
)
_CALL = re.compile(r"[fghFGPT] ?\(")  # a function's name in front of its argument
DIFFERENTIALS = r"\\frac ?\{ ?d(?:\^\{[0-9]\})? ?[A-Za-z]? ?\} ?\{ ?d ?[a-z](?![A-Za-z])"  # no quotient of products
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}|(?<![A-Za-z\\])(?:ln|lg|or|if|is|no|to|in|of|at)(?![A-Za-z])")
_NOT_READ = re.compile(f"{_LETTERS.pattern}|{_CALL.pattern}|{DIFFERENTIALS}")

Monomial = tuple[tuple[str, int], ...]  # (symbol, exponent), sorted; the symbol of the root of a prime is its digits
Polynomial = Mapping[Monomial, Fraction]
_ONE: Polynomial = {(): Fraction(1)}
# (2 cos(q \pi / 12))^2 by q, in the first quarter turn
_SQUARES = {0: Fraction(4), 2: Fraction(3), 3: Fraction(2), 4: Fraction(1), 6: Fraction(0)}


@dataclass(frozen=True, slots=True, eq=False)
class ClosedForm:
    """numerator / denominator, neither of them reduced."""

    above: Polynomial
    below: Polynomial = field(default_factory=lambda: _ONE)

    def __add__(self, other: Any) -> ClosedForm:
        other = _lift(other)
        if self.below == other.below:
            return ClosedForm(_sum(self.above, other.above), self.below)
        return ClosedForm(
            _sum(_product(self.above, other.below), _product(other.above, self.below)),
            _product(self.below, other.below),
        )

    def __mul__(self, other: Any) -> ClosedForm:
        other = _lift(other)
        return ClosedForm(_product(self.above, other.above), _product(self.below, other.below))

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> ClosedForm:
        other = _lift(other)
        if not other.above:
            raise ZeroDivisionError
        return self * ClosedForm(other.below, other.above)

    def equals(self, other: ClosedForm) -> bool:
        left, right = _product(self.above, other.below), _product(other.above, self.below)
        return left == right or _imaginary(left) == _imaginary(right)

    def proportional(self, other: ClosedForm) -> bool:
        """Whether one is a rational multiple, not 0, of the other: `2x-y+3` and `y-2x-3`."""
        return bool(self.multiple(other))

    def multiple(self, other: ClosedForm) -> Fraction | None:
        """The rational number by which `other`, not 0, has to be multiplied to give this; None if there is none."""
        left, right = _product(self.above, other.below), _product(other.above, self.below)
        if not left:
            return Fraction(0)
        if left.keys() != right.keys():
            return None
        ratios = {left[monomial] / right[monomial] for monomial in left}
        return ratios.pop() if len(ratios) == 1 else None

    def linear(self, symbol: str) -> tuple[ClosedForm, ClosedForm] | None:
        """(a, b) of a + b * symbol, b not 0; None if it is not of that form."""
        rest = {monomial: value for monomial, value in self.above.items() if symbol not in dict(monomial)}
        slope = {
            tuple(factor for factor in monomial if factor != (symbol, 1)): value
            for monomial, value in self.above.items()
            if dict(monomial).get(symbol) == 1
        }
        below_has_it = any(symbol in dict(monomial) for monomial in self.below)
        if not slope or below_has_it or len(rest) + len(slope) != len(self.above):
            return None
        return ClosedForm(rest, self.below), ClosedForm(slope, self.below)

    @property
    def symbols(self) -> set[str]:
        """The letters in it; not \\pi, not the roots."""
        return {
            name for side in (self.above, self.below) for monomial in side for name, _ in monomial
        } - {"\\pi"}  # fmt: skip

    def rational(self) -> Fraction | None:
        if self.above.keys() <= {()} and self.below.keys() == {()}:
            return self.above.get((), Fraction(0)) / self.below[()]
        return None


@lru_cache(maxsize=256)
def parse_closed_form(text: str) -> ClosedForm | None:
    """The exact value of `clean` text, or None if it is not such an expression or grows too large."""
    if len(text) > MAX_LENGTH or _NOT_READ.search(text):
        return None
    try:
        return _Parser(tokens(text, _TOKEN)).whole()
    except (NotReadableError, TooLargeError, ZeroDivisionError):
        return None


class _Parser(Parser):
    def starts_factor(self, token: str) -> bool:
        return super().starts_factor(token) or token in ("\\sqrt", "\\pi") or _is_symbol(token)

    def bounded(self, value: Any) -> Any:
        self.spend(value, 1)
        return value  # sums and products check their own size

    def spend(self, value: Any, times: int) -> None:
        form = _lift(value)
        self.work += times * (len(form.above) + len(form.below))
        if self.work > MAX_TERMS_IN_ALL:
            raise TooLargeError(f"more than {MAX_TERMS_IN_ALL} terms on the way")

    def power(self, depth: int) -> Any:
        value = self.primary(depth)
        if self.next == "!":
            self.take()
            value = factorial(_rational(value))
        if self.next == "^":
            self.take()
            exponent = self.group(depth) if self.next in ("{", "(") else self.signed(deeper(depth))
            if (point := _on_unit_circle(value, exponent)) is not None:
                return point
            value = _power(_lift(value), _rational(exponent))
            self.spend(value, int(abs(_rational(exponent))))
        return value

    def primary(self, depth: int) -> Any:
        token = self.next
        if token == "\\sqrt":
            self.take()
            return _root(_rational(self.argument(depth)))
        if token is not None and (token == "\\pi" or _is_symbol(token)):
            return ClosedForm({((self.take(), 1),): Fraction(1)})
        if token == "\\binom":
            self.take()
            return _lift(binomial(_rational(self.argument(depth)), _rational(self.argument(depth))))
        return _lift(super().primary(depth))


_I = ClosedForm({(("i", 1),): Fraction(1)})


def _is_symbol(token: str) -> bool:
    return token[0].isalpha() or (token[0] == "\\" and token not in ("\\frac", "\\binom", "\\sqrt", "\\pi"))


def _lift(value: Any) -> ClosedForm:
    if isinstance(value, ClosedForm):
        return value
    return ClosedForm({(): Fraction(value)} if value else {})


def _rational(value: Any) -> Fraction:
    number = value.rational() if isinstance(value, ClosedForm) else value
    if number is None:
        raise NotReadableError
    return number


def _sum(left: Polynomial, right: Polynomial) -> Polynomial:
    total = dict(left)
    for monomial, coefficient in right.items():
        total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    return _checked(total)


def _imaginary(terms: Polynomial) -> Polynomial:
    """The same with i^2 = -1."""
    total: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms.items():
        exponent = dict(monomial).get("i", 0)
        rest = tuple(factor for factor in monomial if factor[0] != "i" or exponent % 2)
        rest = tuple((name, 1 if name == "i" else power) for name, power in rest)
        total[rest] = total.get(rest, Fraction(0)) + coefficient * (-1) ** (exponent // 2)
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    if left is _ONE or right is _ONE:
        return right if left is _ONE else left
    if len(left) * len(right) > 10 * MAX_TERMS:
        raise TooLargeError("a product of too many terms")
    total: dict[Monomial, Fraction] = {}
    for first, a in left.items():
        for second, b in right.items():
            monomial, factor = _merge(first, second)
            total[monomial] = total.get(monomial, Fraction(0)) + a * b * factor
    return _checked(total)


def _merge(first: Monomial, second: Monomial) -> tuple[Monomial, int]:
    """The product of two monomials; the square of a root is its prime, taken out as a factor."""
    exponents = dict(first)
    factor = 1
    for name, exponent in second:
        exponent += exponents.pop(name, 0)
        if name.isdigit():
            factor *= int(name) ** (exponent // 2)
            exponent %= 2
        if exponent > MAX_EXPONENT:
            raise TooLargeError(f"an exponent above {MAX_EXPONENT}")
        if exponent:
            exponents[name] = exponent
    return tuple(sorted(exponents.items())), factor


def _checked(terms: dict[Monomial, Fraction]) -> Polynomial:
    terms = {monomial: coefficient for monomial, coefficient in terms.items() if coefficient}
    if len(terms) > MAX_TERMS:
        raise TooLargeError(f"more than {MAX_TERMS} terms")
    for value in terms.values():
        if value.numerator.bit_length() + value.denominator.bit_length() > MAX_COEFFICIENT_BITS:
            raise TooLargeError(f"a coefficient of more than {MAX_COEFFICIENT_BITS} bits")
    return terms


def _power(base: ClosedForm, exponent: Fraction) -> ClosedForm:
    if exponent.denominator == 2:
        return _power(_root(_rational(base)), Fraction(exponent.numerator))
    if exponent.denominator != 1:
        raise NotReadableError
    if abs(exponent) > MAX_EXPONENT:
        raise TooLargeError(f"an exponent above {MAX_EXPONENT}")
    if exponent <= 0 and not base.above:
        raise NotReadableError
    if exponent < 0:
        base = ClosedForm(base.below, base.above)
    value = ClosedForm(_ONE)
    for _ in range(abs(int(exponent))):
        value = value * base
    return value


def _on_unit_circle(base: Any, exponent: Any) -> ClosedForm | None:
    r"""e^{i\pi q} as \cos q\pi + i \sin q\pi where both are roots of rationals; None for any other power."""
    if not isinstance(exponent, ClosedForm) or _lift(base).above != {(("e", 1),): 1}:
        return None
    turns = exponent.multiple(ClosedForm({(("\\pi", 1), ("i", 1)): Fraction(1)}))
    if turns is None or ((6 * turns).denominator > 1 and (4 * turns).denominator > 1):
        return None
    return _cosine(turns) + _I * _cosine(turns - Fraction(1, 2))


def _cosine(turns: Fraction) -> ClosedForm:
    """The cosine of that many half turns, a multiple of 1/6 or 1/4."""
    turns = abs((turns + 1) % 2 - 1)
    if turns > Fraction(1, 2):
        return -1 * _cosine(1 - turns)
    return Fraction(1, 2) * _root(_SQUARES[int(12 * turns)])


@lru_cache(maxsize=1024)
def _root(number: Fraction) -> ClosedForm:
    r"""\sqrt{a/b} = \sqrt{ab} / b, with every prime of ab under a root of its own; \sqrt{-1} is i."""
    if number < 0:
        return _I * _root(-number)
    radicand = number.numerator * number.denominator
    if radicand > MAX_RADICAND:
        raise NotReadableError
    outside, primes = Fraction(1, number.denominator), []
    divisor = 2
    while divisor * divisor <= radicand:
        while radicand % (divisor * divisor) == 0:
            radicand //= divisor * divisor
            outside *= divisor
        if radicand % divisor == 0:
            radicand //= divisor
            primes.append(divisor)
        divisor += 1
    if radicand == 0:
        return ClosedForm({})
    if radicand > 1:
        primes.append(radicand)
    return ClosedForm({tuple((name, 1) for name in sorted(map(str, primes))): outside})
