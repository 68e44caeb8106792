r"""Find sums and products of constants that are left to do: like terms, and squares, cubes and small factorials.

    leaves_like_terms(r"16\pi-4\pi")          # so do 2\sqrt{2}+3\sqrt{2} and \sqrt{2}+\sqrt{8}, but not 2+\sqrt{3}
    leaves_small_powers("20^{2}-3^{2}")       # so do 3^{2}+4 and 5\cdot4!, but not 2^{10}-1, 3\cdot2^{5} or 5!-1

Each term is read as a closed form, which is bounded; the sum itself is not computed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from vlm_rl.grading.closed_form import parse_closed_form
from vlm_rl.grading.latex import split_top_level

SMALL = 1_000  # powers and factorials below it are worked out, and so do not stand beside each other
_RELATIONS = r"\le \ge \ne \to \in \cup \cap \approx \pm \mp \lor \land"
_PARTS = frozenset([*",;=<>|&", *re.findall(r"\\[a-z]+", _RELATIONS)])
_SIGNS = frozenset("+-")
_FACTOR_SIGNS = frozenset(["\\cdot", "\\times", "*"])
_BRACKETS = re.compile(r"[(){}\[\]]")
_CONSTANTS = {"\\pi", "e", "i"}
_POWER = re.compile(r"[0-9)}] ?\^|!")
_TIMES_BRACKET = re.compile(r"(?<=[0-9)!]) ?(?=\()")
_COMMAND = re.compile(r"\\[a-z]+|\*")
_EXPONENT = re.compile(r"\^ ?\{? ?-?([0-9]+)")
_MULTINOMIAL = re.compile(r"\\frac ?\{ ?[0-9]+ ?! ?\} ?\{[0-9!*() ]*(?:\\(?:cdot|times)[0-9!*() ]*)*\}")  # 5!/(2!3!)
_FUNCTION_OF_NUMBER = re.compile(r"(?:[0-9]+|\\frac\{[0-9]+\}\{[0-9]+\})? ?(\\(?:ln|log|lg)(?![A-Za-z])[^A-Za-z\\]+)")


def leaves_like_terms(text: str) -> bool:
    r"""Return whether a sum in a `clean` text has two multiples of one root, of \pi, e or i, or of one logarithm."""
    for terms in _sums(text):
        kinds = Counter(kind for term in terms if (kind := _kind(term)))
        if any(count > 1 for count in kinds.values()):
            return True
    return False


def leaves_small_powers(text: str) -> bool:
    r"""Return whether a sum has two numerals, squares or cubes among them, or two small powers or factorials.

    So does a product that has two numerals, a small factorial among them; powers may stay in it: 3\cdot2^{5}.
    """
    if not _POWER.search(text):
        return False
    text = _MULTINOMIAL.sub("m", text)
    for terms in _sums(text):
        roles = Counter(role for term in terms for role in _roles(term))
        if max(roles.values(), default=0) > 1 or any(map(_multiplies, terms)):
            return True
    return False


def _sums(text: str) -> Iterator[list[str]]:
    """Yield the terms of the sums of a text, at the top and inside brackets; a product is a sum of one term."""
    for inside in (text, *_groups(text)):
        for part in split_top_level(inside, _PARTS):
            yield [term for term in split_top_level(part, _SIGNS) if term]


def _groups(text: str) -> Iterator[str]:
    """Yield what each pair of brackets encloses."""
    starts: list[int] = []
    for bracket in _BRACKETS.finditer(text):
        if bracket[0] in "({[":
            starts.append(bracket.end())
        elif starts:
            yield text[starts.pop() : bracket.start()]


def _kind(term: str) -> object:
    """Return the factor that like terms share, a root or a constant; None for rationals and other letters."""
    if match := _FUNCTION_OF_NUMBER.fullmatch(term):
        return match[1].replace(" ", "")
    form = parse_closed_form(term)
    if form is None or len(form.numerator) != 1 or form.denominator.keys() != {()}:
        return None
    (monomial,) = form.numerator
    are_constants = all(name in _CONSTANTS or name.isdigit() for name, _ in monomial)
    return monomial if monomial and are_constants else None


def _roles(term: str) -> set[str]:
    """Return the roles of a term: numeral, power (factorials too), or both for a square or cube of an integer."""
    number = _rational(term)
    if number is None or "\\binom" in term or _FACTOR_SIGNS & {*_COMMAND.findall(term)}:
        return set()
    exponents = [int(exponent) for exponent in _EXPONENT.findall(term)]
    is_square = "!" not in term and max(exponents, default=1) <= 3 and number.denominator == 1
    roles = {"power"} if "!" in term or exponents else {"numeral"}
    return roles | {"numeral"} if is_square else roles if abs(number) < SMALL else set()


def _multiplies(term: str) -> bool:
    """Return whether a product has two numerals or small factorials, and at least one factorial."""
    if "!" not in term:
        return False
    factors = split_top_level(_TIMES_BRACKET.sub(r"\\cdot ", term), _FACTOR_SIGNS)
    numbers = [_rational(factor) for factor in factors if not re.search(r"\^|\\binom|\\frac", factor)]
    return sum(number is not None and abs(number) < SMALL for number in numbers) > 1


def _rational(text: str) -> Fraction | None:
    form = parse_closed_form(text)
    return None if form is None else form.as_rational()
