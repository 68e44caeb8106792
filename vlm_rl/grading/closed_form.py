r"""Compute exactly with closed forms: quotients of polynomials in letters, \pi and square roots of rationals.

Each \sqrt{p} of a prime is a symbol of its own, whose square is replaced by p. What is left is an integral domain,
so two quotients are equal exactly if their cross products are: `1/\sqrt{3}` and `\sqrt{3}/3`, or `(x-1)(x+1)` and
`x^2-1`, need no symbolic library. The letter i may also be the imaginary unit: equality in either reading counts.

Hostile text costs little: every intermediate result is bounded in terms, exponents and digits, and all of them
together in work.
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
    RationalParser,
    TooLargeError,
    binomial,
    factorial,
    next_depth,
    tokenize,
)

MAX_TERMS = 60  # of a polynomial
MAX_EXPONENT = 100
MAX_RADICAND = 10**8
MAX_LENGTH = 1_000  # characters of a text
MAX_COEFFICIENT_BITS = 4_000
MAX_TERMS_IN_ALL = 10_000  # summed over all intermediate results of one text

_TOKEN = re.compile(
    rf" *(?:(?P<number>{NUMBER})|(?P<word>\\(?:frac|binom|cdot|times|div|sqrt|pi)(?![A-Za-z]))"
    r"|(?P<symbol>(?:\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|rho|sigma|tau)(?![A-Za-z])|[A-Za-z])"
    r"(?:_\{[A-Za-z0-9]{1,4}\})?)|(?P<sign>[-+*/^!(){}]))"
)
_CALL = re.compile(r"[fghFGPT] ?\(")  # f(x): a function, not a product
# dy/dx is a derivative, not a quotient.
DIFFERENTIALS = r"\\frac ?\{ ?d(?:\^\{[0-9]\})? ?[A-Za-z]? ?\} ?\{ ?d ?[a-z](?![A-Za-z])"
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}|(?<![A-Za-z\\])(?:ln|lg|or|if|is|no|to|in|of|at)(?![A-Za-z])")
_NOT_ALGEBRA = re.compile(f"{_LETTERS.pattern}|{_CALL.pattern}|{DIFFERENTIALS}")

# (symbol, exponent) of each factor, sorted. The symbol of the square root of a prime is the prime's digits.
Monomial = tuple[tuple[str, int], ...]
Polynomial = Mapping[Monomial, Fraction]
_ONE: Polynomial = {(): Fraction(1)}
# (2 cos(q \pi / 12))^2 by q, for the angles from 0 to a right angle
_SQUARES_OF_TWICE_COSINE = {0: Fraction(4), 2: Fraction(3), 3: Fraction(2), 4: Fraction(1), 6: Fraction(0)}


@dataclass(frozen=True, slots=True, eq=False)
class ClosedForm:
    """A quotient of two polynomials, not reduced."""

    numerator: Polynomial
    denominator: Polynomial = field(default_factory=lambda: _ONE)

    def __add__(self, other: Any) -> ClosedForm:
        other = _as_form(other)
        if self.denominator == other.denominator:
            return ClosedForm(_add(self.numerator, other.numerator), self.denominator)
        return ClosedForm(
            _add(_multiply(self.numerator, other.denominator), _multiply(other.numerator, self.denominator)),
            _multiply(self.denominator, other.denominator),
        )

    def __mul__(self, other: Any) -> ClosedForm:
        other = _as_form(other)
        return ClosedForm(_multiply(self.numerator, other.numerator), _multiply(self.denominator, other.denominator))

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> ClosedForm:
        other = _as_form(other)
        if not other.numerator:
            raise ZeroDivisionError
        return self * ClosedForm(other.denominator, other.numerator)

    def equals(self, other: ClosedForm) -> bool:
        """Return whether two forms have the same value, i being a letter or the imaginary unit."""
        left, right = _multiply(self.numerator, other.denominator), _multiply(other.numerator, self.denominator)
        return left == right or _with_imaginary_unit(left) == _with_imaginary_unit(right)

    def is_proportional(self, other: ClosedForm) -> bool:
        """Return whether this is a rational multiple, not 0, of the other: `2x-y+3` and `y-2x-3`."""
        return bool(self.ratio(other))

    def ratio(self, other: ClosedForm) -> Fraction | None:
        """Return the rational number that gives this when multiplied by the other, or None if there is none.

        The other form must not be 0.
        """
        left, right = _multiply(self.numerator, other.denominator), _multiply(other.numerator, self.denominator)
        if not left:
            return Fraction(0)
        if left.keys() != right.keys():
            return None
        ratios = {left[monomial] / right[monomial] for monomial in left}
        return ratios.pop() if len(ratios) == 1 else None

    def linear_parts(self, symbol: str) -> tuple[ClosedForm, ClosedForm] | None:
        """Return (a, b) if this is a + b * symbol with b not 0, else None."""
        rest = {monomial: value for monomial, value in self.numerator.items() if symbol not in dict(monomial)}
        slope = {
            tuple(factor for factor in monomial if factor != (symbol, 1)): value
            for monomial, value in self.numerator.items()
            if dict(monomial).get(symbol) == 1
        }
        in_denominator = any(symbol in dict(monomial) for monomial in self.denominator)
        if not slope or in_denominator or len(rest) + len(slope) != len(self.numerator):
            return None
        return ClosedForm(rest, self.denominator), ClosedForm(slope, self.denominator)

    @property
    def symbols(self) -> set[str]:
        """Return the symbols that occur, roots of primes included, except for \\pi."""
        polynomials = self.numerator, self.denominator
        return {name for terms in polynomials for monomial in terms for name, _ in monomial} - {"\\pi"}

    def as_rational(self) -> Fraction | None:
        """Return the value if it is a rational number, else None."""
        if self.numerator.keys() <= {()} and self.denominator.keys() == {()}:
            return self.numerator.get((), Fraction(0)) / self.denominator[()]
        return None


@lru_cache(maxsize=256)
def parse_closed_form(text: str) -> ClosedForm | None:
    """Return the exact value of a `clean` text, or None if it is not a closed form or grows too large."""
    if len(text) > MAX_LENGTH or _NOT_ALGEBRA.search(text):
        return None
    try:
        return ClosedFormParser(tokenize(text, _TOKEN)).parse()
    except (NotReadableError, TooLargeError, ZeroDivisionError):
        return None


class ClosedFormParser(RationalParser):
    """Read letters, roots and \\pi besides numbers; count terms instead of bits."""

    def starts_factor(self, token: str) -> bool:
        """Tell whether a factor can begin with this token: a root, \\pi or a letter too."""
        return super().starts_factor(token) or token in ("\\sqrt", "\\pi") or _is_symbol(token)

    def bounded(self, value: Any) -> Any:
        """Count the terms of a result and return it. Raises TooLargeError if that is too much."""
        self.count_terms(value)
        return value  # _add and _multiply check the size of each polynomial

    def count_terms(self, value: Any, times: int = 1) -> None:
        """Add the terms of a result to the work so far. Raises TooLargeError if that is too much."""
        form = _as_form(value)
        self.work += times * (len(form.numerator) + len(form.denominator))
        if self.work > MAX_TERMS_IN_ALL:
            raise TooLargeError(f"more than {MAX_TERMS_IN_ALL} terms on the way")

    def power(self, depth: int) -> Any:
        """Read a primary with its factorial and exponent; e to an imaginary power becomes cosine and sine."""
        value = self.primary(depth)
        if self.next == "!":
            self.take()
            value = _as_form(factorial(_rational(value)))
        if self.next == "^":
            self.take()
            exponent = self.group(depth) if self.next in ("{", "(") else self.signed(next_depth(depth))
            if (point := _on_unit_circle(value, exponent)) is not None:
                return point
            value = _power(_as_form(value), _rational(exponent))
            self.count_terms(value, times=int(abs(_rational(exponent))))
        return value

    def primary(self, depth: int) -> Any:
        """Read a number, a letter, a root, \\pi, a binomial or a group."""
        token = self.next
        if token == "\\sqrt":
            self.take()
            return _root(_rational(self.argument(depth)))
        if token is not None and (token == "\\pi" or _is_symbol(token)):
            return ClosedForm({((self.take(), 1),): Fraction(1)})
        if token == "\\binom":
            self.take()
            return _as_form(binomial(_rational(self.argument(depth)), _rational(self.argument(depth))))
        return _as_form(super().primary(depth))


_I = ClosedForm({(("i", 1),): Fraction(1)})


def _is_symbol(token: str) -> bool:
    return token[0].isalpha() or (token[0] == "\\" and token not in ("\\frac", "\\binom", "\\sqrt", "\\pi"))


def _as_form(value: Any) -> ClosedForm:
    """Return a number as a closed form; a closed form stays as it is."""
    if isinstance(value, ClosedForm):
        return value
    return ClosedForm({(): Fraction(value)} if value else {})


def _rational(value: Any) -> Fraction:
    """Return the value as a fraction. Raises NotReadableError if it is not a rational number."""
    number = value.as_rational() if isinstance(value, ClosedForm) else value
    if number is None:
        raise NotReadableError
    return number


def _add(left: Polynomial, right: Polynomial) -> Polynomial:
    total = dict(left)
    for monomial, coefficient in right.items():
        total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    return _within_limits(total)


def _with_imaginary_unit(terms: Polynomial) -> Polynomial:
    """Return the polynomial with i^2 replaced by -1."""
    total: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms.items():
        exponent = dict(monomial).get("i", 0)
        rest = tuple(factor for factor in monomial if factor[0] != "i" or exponent % 2)
        rest = tuple((name, 1 if name == "i" else power) for name, power in rest)
        total[rest] = total.get(rest, Fraction(0)) + coefficient * (-1) ** (exponent // 2)
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def _multiply(left: Polynomial, right: Polynomial) -> Polynomial:
    if left is _ONE or right is _ONE:
        return right if left is _ONE else left
    if len(left) * len(right) > 10 * MAX_TERMS:
        raise TooLargeError("a product of too many terms")
    total: dict[Monomial, Fraction] = {}
    for first, a in left.items():
        for second, b in right.items():
            monomial, factor = _multiply_monomials(first, second)
            total[monomial] = total.get(monomial, Fraction(0)) + a * b * factor
    return _within_limits(total)


def _multiply_monomials(first: Monomial, second: Monomial) -> tuple[Monomial, int]:
    """Return (monomial, factor) of a product of two monomials; the square of a root of a prime is the factor."""
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


def _within_limits(terms: dict[Monomial, Fraction]) -> Polynomial:
    """Return the terms without those of coefficient 0. Raises TooLargeError if they exceed a limit."""
    terms = {monomial: coefficient for monomial, coefficient in terms.items() if coefficient}
    if len(terms) > MAX_TERMS:
        raise TooLargeError(f"more than {MAX_TERMS} terms")
    for value in terms.values():
        if value.numerator.bit_length() + value.denominator.bit_length() > MAX_COEFFICIENT_BITS:
            raise TooLargeError(f"a coefficient of more than {MAX_COEFFICIENT_BITS} bits")
    return terms


def _power(base: ClosedForm, exponent: Fraction) -> ClosedForm:
    """Return a base to an integer exponent, or a rational base to half an integer.

    Raises NotReadableError for other exponents and for 0^0, TooLargeError above the limits.
    """
    if exponent.denominator == 2:
        return _power(_root(_rational(base)), Fraction(exponent.numerator))
    if exponent.denominator != 1:
        raise NotReadableError
    if abs(exponent) > MAX_EXPONENT:
        raise TooLargeError(f"an exponent above {MAX_EXPONENT}")
    if exponent <= 0 and not base.numerator:
        raise NotReadableError
    if exponent < 0:
        base = ClosedForm(base.denominator, base.numerator)
    value = ClosedForm(_ONE)
    for _ in range(abs(int(exponent))):
        value = value * base
    return value


def _on_unit_circle(base: Any, exponent: Any) -> ClosedForm | None:
    r"""Return e^{i\pi q} as \cos q\pi + i \sin q\pi where both are roots of rationals; None for any other power."""
    if not isinstance(exponent, ClosedForm) or _as_form(base).numerator != {(("e", 1),): 1}:
        return None
    half_turns = exponent.ratio(ClosedForm({(("\\pi", 1), ("i", 1)): Fraction(1)}))
    if half_turns is None or ((6 * half_turns).denominator > 1 and (4 * half_turns).denominator > 1):
        return None
    return _cosine(half_turns) + _I * _cosine(half_turns - Fraction(1, 2))


def _cosine(half_turns: Fraction) -> ClosedForm:
    """Return the cosine of so many half turns, a multiple of 1/6 or 1/4."""
    half_turns = abs((half_turns + 1) % 2 - 1)
    if half_turns > Fraction(1, 2):
        return -1 * _cosine(1 - half_turns)
    return Fraction(1, 2) * _root(_SQUARES_OF_TWICE_COSINE[int(12 * half_turns)])


@lru_cache(maxsize=1024)
def _root(number: Fraction) -> ClosedForm:
    r"""Return \sqrt{a/b} as \sqrt{ab} / b, with every prime of ab under a root of its own; \sqrt{-1} is i.

    Raises NotReadableError if ab is too large to factor here.
    """
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
