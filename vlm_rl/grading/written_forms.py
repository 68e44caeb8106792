"""Read numerals with signs between them that are no calculation: scores, ranges, years, sizes, phone numbers.

3-2         score or range: 3–2 and 3 to 2, but neither 1 nor 4-3
2019/20     a season: a year and the year after it
3 x 4       size: 3\\times 4 and 3 by 4, but neither 12 nor 4 x 3
555-0123    phone number, also (212) 555-0123: the same groups of digits
10.0.0.1    address, version, number of a part, square of chess (2.10.0, v2.1, H1N1, e2-e4): the same characters

A gold is a final answer, so that one of these is never the difference or the product that its signs could mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from vlm_rl.grading.quantities import Quantity, split_quantity
from vlm_rl.grading.rational import NUMBER, parse_rational

MAX_LENGTH = 120  # characters of a form
_PLAIN = re.compile(rf"-?(?:{NUMBER})")
_SIGNED = re.compile(rf"-?(?:[0-9]+ ?/ ?[0-9]+|{NUMBER})")
_PHONE = re.compile(r"\+?[0-9]{0,3}[-. ]?\(?[0-9]{2,5}\)?[-. ]?[0-9]{2,5}(?:[-. ][0-9]{2,5}){0,3}")
_DIGITS = re.compile(r"[0-9]+")
_SLASHED = re.compile(r"[0-9]{1,4}(?: ?/ ?[0-9]{1,4}){1,3}")
_DASH = re.compile(r"(?<=[0-9A-Za-z%}¥€£₹\u4e00-\u9fff]) ?(?:-{1,3}|\bto\b|\bthrough\b|至|到) ?(?=[-.0-9\\$€£¥₹])")
_TIMES = re.compile(r"(?<=[0-9A-Za-z%}\u4e00-\u9fff]) ?(?:\\times(?![A-Za-z])|\*|\bby\b) ?(?=[.0-9])")
_CROSS = re.compile(r"(?<=[0-9]) ?[xX] ?(?=[.0-9])|(?<=[A-Za-z]) [xX] (?=[.0-9])")
# A letter in front of a digit is no factor: 2x is a product, x2 a name.
_CODE = re.compile(
    r"[vV]?\.? ?[0-9]+(?:\.[0-9]+){2,}(?:[:/][0-9]+)?|[vV]\.? ?[0-9]+(?:\.[0-9]+)+|0[xX][0-9A-Fa-f]+"
    r"|(?!sqrt|cbrt)(?=[A-Za-z]*[0-9])[A-Za-z][A-Za-z0-9]*|(?=.*[A-Z])(?=.*[A-Za-z][0-9])[A-Za-z][A-Za-z0-9]*(?:[-.][A-Za-z0-9]+)+"
    r"|[a-h][1-8]-[a-h][1-8]"
)
_YEAR = re.compile("1[0-9]{3}|20[0-9]{2}")
_RANGE = re.compile(r"^(?:from|between) ", re.IGNORECASE)
_BETWEEN = re.compile(r"^between (.*[0-9].*) and (?=.*[0-9])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WrittenForm:
    """Numerals in the order in which they are written, with their unit."""

    kind: str  # dash, times, slash, code
    terms: tuple[str, ...]  # numbers in one spelling, but 007 as it stands
    unit: str = ""

    def equals(self, other: WrittenForm, *, any_order: bool = False) -> bool:
        """Return whether both have the same terms, in the same order unless any will do, and no different units."""
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if any_order:
            return sorted(self.terms) == sorted(other.terms)
        return self.terms == other.terms


def parse_form(text: str) -> WrittenForm | None:
    """Return the form that a `clean` text writes out with signs, or None if it is something else.

    `3 to 2` alone may be a ratio and is no form; `written_like` reads it.
    """
    text = _without_brackets(text)
    if len(text) > MAX_LENGTH or _PLAIN.fullmatch(text) or not any(character.isdigit() for character in text):
        return None
    if _CODE.fullmatch(text) and parse_rational(text) is None:
        return _code(text)
    if _SLASHED.fullmatch(text):
        return _slashed(text)
    if "(" in text:
        return WrittenForm("dash", tuple(_DIGITS.findall(text))) if _is_phone(text) else None
    if "-" in text[1:]:
        return _joined(text, "dash")
    return _joined(text, "times")


def written_like(form: WrittenForm, text: str) -> WrittenForm | None:
    """Return the form of an answer to a gold of a given form, also where words join its terms; None for another."""
    text = _without_brackets(text)
    if len(text) > MAX_LENGTH:
        return None
    if form.kind == "code":
        return _code(text)
    if form.kind == "dash" and _is_phone_number(form.terms) and re.fullmatch(r"[-+. ()0-9]*", text):
        return WrittenForm("dash", tuple(_DIGITS.findall(text)))
    if form.kind == "slash":
        other = parse_form(text)
        is_season = other is not None and len(form.terms) == len(other.terms) == 2 and other.kind in ("slash", "dash")
        return _as_season(other) if other and is_season else other
    if form.kind == "dash":
        text = text.replace("/", "-") if _SLASHED.fullmatch(text) and _slashed(text) else text
        text = _RANGE.sub("", _BETWEEN.sub(r"\1 to ", text))
    return _joined(text, form.kind)


def same_range(gold: str, answer: str) -> bool:
    """Return whether the answer is the gold's range with a dash: 6-8 for `6 to 8`."""
    given = parse_form(answer) if " to " in gold else None
    wanted = _joined(gold, "dash") if given and given.kind == "dash" else None
    return given is not None and wanted is not None and wanted.equals(given)


def is_range(text: str) -> bool:
    """Return whether a `clean` text is a range or a score: numerals with a dash between them."""
    form = parse_form(text)
    return form is not None and form.kind == "dash"


def is_factorization(form: WrittenForm) -> bool:
    """Return whether a product of three or more terms has only primes, so that its order does not count."""
    return form.kind == "times" and len(form.terms) > 2 and all(map(_is_small_prime, form.terms))


def _joined(text: str, kind: str) -> WrittenForm | None:
    r"""Return the terms between dashes, or between \times, x and "by"; None unless all are numerals of one unit."""
    text = text if kind == "dash" else _CROSS.sub(r"\\times ", text)
    if kind == "dash" and text.startswith("-"):
        text = text.replace("--", " to -")  # -5--3; in 10--20 LaTeX sets a dash
    parts = (_DASH if kind == "dash" else _TIMES).split(text)
    if len(parts) < 2:
        return None
    quantities = [split_quantity(part.strip()) for part in parts]
    units = {_unit_name(side) for side in quantities} - {""}
    terms = [_term(side.body) for side in quantities]
    if len(units) > 1 or None in terms or (kind == "times" and "^" in text):
        return None
    known = [term for term in terms if term is not None]
    if (
        kind == "dash"
        and len(known) == 2
        and _YEAR.fullmatch(known[0])
        and re.fullmatch("[0-9]{2}", known[1])
        and known[0][2:] < known[1]
    ):
        known[1] = known[0][:2] + known[1]  # 2010-15
    return WrittenForm(kind, tuple(known), "".join(units))


def _code(text: str) -> WrittenForm:
    """Return the characters of a code, in which A_1 is A1."""
    return WrittenForm("code", (re.sub(r"[_{}\s]", "", text),))


def _without_brackets(text: str) -> str:
    """Return `(3-2)` without the brackets around it."""
    return text[1:-1] if text[:1] + text[-1:] == "()" and not re.search("[()]", text[1:-1]) else text


def _slashed(text: str) -> WrittenForm | None:
    """Return three or more numerals between slashes, or a season such as 2019/20; None for a fraction."""
    form = WrittenForm("slash", tuple(_DIGITS.findall(text)))
    return form if len(form.terms) > 2 else _as_season(form) if _is_season(form.terms) else None


def _is_season(terms: Sequence[str]) -> bool:
    first, second = terms
    return len(first) == 4 and 1800 <= int(first) < 2100 and str(int(first) + 1) in (second, first[:2] + second)


def _as_season(form: WrittenForm) -> WrittenForm:
    """Return a season with two digits for its second year: 2019/2020 is 2019/20."""
    return WrittenForm("slash", (form.terms[0], form.terms[1][-2:]), form.unit)


def _is_phone(text: str) -> bool:
    groups = _DIGITS.findall(text)
    return _PHONE.fullmatch(text) is not None and len(groups) > 2 and 7 <= len("".join(groups)) <= 15


def _is_phone_number(terms: Sequence[str]) -> bool:
    """Return whether groups of digits may also stand between spaces, points or brackets: 555 0123."""
    return [*map(len, terms)] == [3, 4] or (len(terms) > 2 and 7 <= len("".join(terms)) <= 15)


def _term(text: str) -> str | None:
    """Return a numeral in one spelling, or as it stands where it begins with a zero; None for all else."""
    text = text.strip()
    if not _SIGNED.fullmatch(text):
        return None
    return text if re.fullmatch("0[0-9]+", text) else str(parse_rational(text))


def _unit_name(side: Quantity) -> str:
    return "%" if side.percent else " ".join(f"{name}^{power}" for name, power in sorted((side.unit or {}).items()))


def _is_small_prime(term: str) -> bool:
    if not term.isdecimal() or not 1 < int(term) < 10**6:
        return False
    return all(int(term) % divisor for divisor in range(2, math.isqrt(int(term)) + 1))
