r"""Text forms of an answer: one spelling for many notations, top-level splitting, units.

`clean` removes what never changes a value (delimiters, spacing, \left, \text{}, fraction sizes);
`canonical` also drops the insignificant spaces and is what two answers are compared by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "‐": "-", "﹣": "-", "－": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ",
        "÷": "/", "π": "\\pi ", "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "∈": "\\in ", "±": "\\pm ", "°": "^\\circ ",
        "℃": "^\\circ C", "℉": "^\\circ F", "²": "^{2}", "³": "^{3}", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "∠": "\\angle ", "√": "\\sqrt ",
        "，": ",", "；": ";", "：": ":", "（": "(", "）": ")", "。": ".", "％": "%", "“": '"', "”": '"', "’": "'",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\ufeff": "", "\t": " ", "\n": " ", "\r": " ",
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    }
)  # fmt: skip
_TEXT = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal)|operatorname|mbox|hbox|boldsymbol|bm)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"(?<!\\)\\\$", r" \\dollar "),
        (r"\$|(?<!\\)\\[()\[\]](?![A-Za-z])|\\displaystyle(?![A-Za-z])", " "),
        (r"(?<!\\)\\(?:[,;:! ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z])|enspace(?![A-Za-z]))|~", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*(?:\.(?![0-9]))?", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\geq(?:slant)?(?![A-Za-z])|>=", r"\\ge "),
        (r"\\leq(?:slant)?(?![A-Za-z])|<=", r"\\le "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r":=", "="),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\%", "%"),
        (r"\{\s*,\s*\}", ","),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\+\s*\\infty", r"\\infty"),
        (r"\*\*", ""),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"\^\s*(-?[0-9]+|[A-Za-z])", r"^{\1}"),
        (r"_\s*([0-9A-Za-z])", r"_{\1}"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}"),
        (r"\\(frac|binom|sqrt)\s+(?=[{\[])", r"\\\1"),
        (r"\\sqrt\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\s+", " "),
        (r" (?=\^)", ""),
    )
)
_OPEN, _CLOSE = frozenset(["(", "[", "{", "\\{"]), frozenset([")", "]", "}", "\\}"])
_PIECE = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)


def clean(text: str) -> str:
    r"""One spelling for what looks the same: no math delimiters, spacing macros, \left or \text."""
    text = text.translate(_UNICODE)
    for _ in range(3):
        text = _TEXT.sub(r" \1 ", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return _strip(text)


def _strip(text: str) -> str:
    for _ in range(12):  # bounded: hostile text may nest thousands of groups
        before = text
        text = text.strip()
        if text.endswith((".", ",", ";", ":", "\\\\")) and not text.endswith(".."):
            text = text[: -2 if text.endswith("\\\\") else -1]
        text = text.lstrip(":")
        if text.startswith("\\boxed"):
            inner = text.removeprefix("\\boxed").strip()
            text = inner if _is_one_group(inner) else text
        elif _is_one_group(text):
            text = text[1:-1]
        if text == before:
            break
    return text


def _is_one_group(text: str) -> bool:
    """True for `{...}` whose first brace closes at the very end."""
    if not (text.startswith("{") and text.endswith("}") and not text.endswith("\\}")):
        return False
    depth = 0
    for piece in _PIECE.finditer(text):
        depth += {"{": 1, "}": -1}.get(piece.group(), 0)
        if depth == 0:
            return piece.end() == len(text)
    return False


def canonical(text: str) -> str:
    """`clean` text without the spaces that mean nothing; a space between two words or numbers stays."""
    return re.sub(r" (?![A-Za-z0-9])|(?<![A-Za-z0-9]) ", "", text)


def split_top(text: str, separators: frozenset[str]) -> list[str]:
    r"""Split at separators outside all brackets. A separator is one character or a command (`\cup`)."""
    parts, start, depth = [], 0, 0
    for piece in _PIECE.finditer(text):
        token = piece.group()
        if token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth -= 1
        elif depth == 0 and token in separators:
            parts.append(text[start : piece.start()].strip())
            start = piece.end()
    return [*parts, text[start:].strip()]


def enclosed(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) if one pair of brackets spans the whole text; `(a]` counts as a pair."""
    depth, opening = 0, ""
    for piece in _PIECE.finditer(text):
        token = piece.group()
        if piece.start() == 0:
            if token not in _OPEN:
                return None
            opening = token
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth == 0:
            if piece.end() != len(text):
                return None
            return opening, text[len(opening) : piece.start()].strip(), token
    return None


# Units. Exponents are kept, nothing is converted: another unit is another answer.
_UNIT_NAMES = {
    "m": "m meter metre", "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre",
    "dm": "dm decimeter decimetre", "km": "km kilometer kilometre", "nm": "nm nanometer nanometre",
    "in": "inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "g": "g gram gramme", "kg": "kg kilogram kilo", "mg": "mg milligram", "lb": "lb lbs pound", "oz": "oz ounce",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "day": "day", "year": "year yr",
    "L": "L liter litre", "mL": "mL ml milliliter millilitre", "cc": "cc",
    "N": "N newton", "J": "J joule", "W": "W watt", "V": "V volt", "A": "A amp ampere", "K": "K kelvin",
    "Hz": "Hz hertz", "Pa": "Pa pascal", "kPa": "kPa", "kJ": "kJ", "kW": "kW", "eV": "eV", "mol": "mol mole",
    "degree": "degree deg", "rad": "rad radian", "dollar": "dollar usd", "cent": "cent", "euro": "euro",
    "mph": "mph", "kmph": "kmph", "ohm": "ohm",
}  # fmt: skip
_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}
# Words that change the number in front of them, or say that it is not the answer.
_MODIFIERS = """
    or and not no if is was are be more less than least most about approx approximately hundred thousand
    million billion trillion dozen pi half halves third thirds quarter quarters fourth fourths fifth fifths
    sixth sixths tenth tenths times over plus minus wrong incorrect mod modulo sqrt root sin cos tan log ln
    exp to by of the remainder squared cubed factorial choose base option choice undefined infinite infinity
    negative positive true false yes with where for all any some maybe perhaps nor but either else square
    cubic sq cu per
"""
_NOT_UNITS = frozenset(_MODIFIERS.split())
_WORD = r"[A-Za-z]+(?:\^\{-?[0-9]\})?"
_UNIT_TAIL = re.compile(rf"(?P<space> ?)(?<![\\A-Za-z])(?P<unit>{_WORD}(?:(?: ?/ ?| ?\\cdot ?| ){_WORD}){{0,4}})$")
_DEGREE_TAIL = re.compile(r" ?\^\\circ ?(?P<scale>[CF]?)$")
_PERCENT_TAIL = re.compile(r" ?(?:%|(?<![A-Za-z])(?:percent|percentage|pct))$")
_MONEY_HEAD = re.compile(r"^(?P<sign>-?) ?(?P<coin>\\dollar|[€£¥])(?![A-Za-z]) ?")
_COINS = {"\\dollar": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen"}

Unit = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer taken apart: the value's text, its unit (name to exponent, None if bare), percent sign."""

    body: str
    unit: Unit | None = None
    percent: bool = False


def quantity(text: str) -> Quantity:
    """Take percent sign or unit off `clean` text; without either the body is the text."""
    if match := _PERCENT_TAIL.search(text):
        return Quantity(text[: match.start()].strip(), percent=True)
    if match := _DEGREE_TAIL.search(text):
        scale = match.group("scale")
        return Quantity(text[: match.start()].strip(), {f"degree {scale}".strip(): 1})
    if match := _MONEY_HEAD.search(text):
        return Quantity(match.group("sign") + text[match.end() :].strip(), {_COINS[match.group("coin")]: 1})
    match = _UNIT_TAIL.search(text)
    if match is None:
        return Quantity(text)
    body = text[: match.start()].strip()
    unit = parse_unit(match.group("unit"), number_before=bool(re.search(r"[0-9.)}]$", body)))
    known = body.endswith(("}", ")", "\\pi")) or body[-1:].isdigit() or body[-1:] == "."
    # `5m` may well be a product: a one-letter unit needs a space, which \text{m} and \mathrm{m} leave.
    if unit is None or not known or (len(match.group("unit")) == 1 and not match.group("space")):
        return Quantity(text)
    return Quantity(body, unit)


def parse_unit(text: str, *, number_before: bool = True) -> Unit | None:
    """`square meters`, `m^{2}`, `km/h` or up to three plain words as exponents by unit; None if neither."""
    exponents: dict[str, int] = {}
    power, side, words = 1, 1, 0
    for token in re.findall(rf"{_WORD}|/", text.replace("\\cdot", " ")):
        if token == "/" or token == "per":
            side = -1
        elif token in ("square", "sq", "cubic", "cu"):
            power = 2 if token.startswith("sq") else 3
        else:
            name, _, exponent = token.partition("^{")
            lower = name.lower() if len(name) > 1 else name
            unit = _UNITS.get(name) or _UNITS.get(lower) or _UNITS.get(lower.removesuffix("s"))
            if unit is None:
                words += 1
                if not number_before or len(name) < 3 or name.lower() in _NOT_UNITS or words > 3:
                    return None
                unit = name.lower().removesuffix("s")
            exponents[unit] = exponents.get(unit, 0) + side * power * int(exponent.removesuffix("}") or 1)
            power = 1
    return exponents or None
