r"""Take an answer apart into a value, a unit and a percent sign, and compare two values within a margin.

Units are compared by name and exponent and never converted: a different unit is a different answer. No float is used.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from vlm_rl.grading.chinese_numerals import NUMERALS
from vlm_rl.grading.number_words import COUNTING, parse_words
from vlm_rl.grading.rational import NUMBER, parse_rational

_UNIT_NAMES = {
    "m": "m meter metre", "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre",
    "dm": "dm decimeter decimetre", "km": "km kilometer kilometre", "nm": "nm nanometer nanometre",
    "um": "um micrometer micrometre micron", "ha": "ha hectare", "acre": "acre", "light year": "ly",
    "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "g": "g gram gramme", "kg": "kg kilogram kilos", "mg": "mg milligram", "lb": "lb lbs pound", "oz": "oz ounce",
    "t": "tonne ton", "s": "s sec second", "min": "min minute", "h": "h hr hour", "ms": "ms millisecond",
    "day": "day", "week": "week", "month": "month", "year": "year yr",
    "L": "L liter litre", "mL": "mL ml milliliter millilitre", "cc": "cc", "gal": "gal gallon",
    "N": "N newton", "J": "J joule", "W": "W watt", "V": "V volt", "A": "A amp ampere", "K": "K kelvin",
    "C": "C coulomb", "F": "F farad", "T": "T tesla", "H": "H henry", "Wb": "Wb weber", "nF": "nF", "pF": "pF",
    "mH": "mH", "kV": "kV", "mW": "mW", "dB": "dB decibel", "hp": "hp", "AU": "AU", "rpm": "rpm", "kB": "kB",
    "MB": "MB", "GB": "GB", "Hz": "Hz hertz", "kHz": "kHz", "MHz": "MHz", "GHz": "GHz",
    "Pa": "Pa pascal", "kPa": "kPa", "MPa": "MPa", "atm": "atm", "kJ": "kJ", "kW": "kW", "MW": "MW", "kWh": "kWh",
    "kN": "kN", "mV": "mV", "mA": "mA", "eV": "eV", "cal": "cal calorie", "kcal": "kcal", "mol": "mol mole",
    "degree": "degree deg", "rad": "rad radian", "dollar": "dollar usd", "cent": "cent", "euro": "euro eur",
    "ohm": "ohm Ohm", "bit": "bit", "byte": "byte",
}  # fmt: skip
_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}
_COMPOUND = {"kph": "km/h", "kmph": "km/h", "mph": "mi/h", "mps": "m/s"}
# Words that change the number in front of them, or say that it is not the answer: none of them is a unit.
_MODIFIERS = """
    or and not no if is was are be more less than least most about approx approximately score gross pi half halves
    quarter quarters fold doubled tripled halved times over plus minus plusminus below above under off short fewer
    higher lower smaller greater larger bigger longer shorter max maximum maximal min minimum minimal unless except
    excluding without exclusive never nothing cannot neither unlikely impossible power exponent inverse wrong
    incorrect invalid inaccurate mod modulo sqrt root sin cos tan log ln arcsin arccos arctan sinh cosh tanh cot csc
    exp to by of the remainder choose base option choice undefined infinite infinity negative positive true false
    yes with where for all any some maybe perhaps hardly guess unsure doubtful unknown nor but either else possibly
    probably versus vs ish so something oder und oppure sqr rounded estimated around roughly near between even odd
    twice thrice
"""
# Multiples, parts and functions of the number, which are none in the plural either. The zeros of 5 zeros are counted.
_FACTORS = """
    dozen lakh lac crore mln bln mil mill mille mio mrd bil tril milliard myriad googol quadrillion quintillion
    sextillion septillion octillion nonillion decillion kilo mega giga tera peta milli micro nano pico centi deci
    deca hecto permille permil permyriad percentage percentile bps basis reciprocal factorial
"""
_GROUPS = "pair couple duo trio triplet quartet quintet"  # 6 pairs are twelve, but 6 ordered pairs are six pairs
_NOT_FIRST = {f"{word}{ending}" for word in _GROUPS.split() for ending in ("", "s")}
_NOT_UNITS = COUNTING | {f"{word}s" for word in COUNTING - {"zero", "one"}} | frozenset(_MODIFIERS.split())
_NOT_UNITS |= {f"{word}{ending}" for word in _FACTORS.split() for ending in ("", "s")}
_NO_UNIT = frozenset(["unit", "units"])  # "12 square units" is 12, whatever the unit is
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_WORD = r"[A-Za-z]+(?:\^\{-?[0-9]\})?"
_UNIT_TAIL = re.compile(rf"(?P<space> ?)(?<![\\A-Za-z])(?P<unit>{_WORD}(?:(?: ?/ ?| ?\\cdot ?| ){_WORD}){{0,4}})$")
_FRACTION_TAIL = re.compile(rf"(?<=[0-9.)}}]) ?\\frac\{{ ?({_WORD}) ?\}}\{{ ?({_WORD}) ?\}}$")
_DEGREE_TAIL = re.compile(
    r" ?(?:\^\\circ|(?<![A-Za-z])(?i:degrees?|deg)(?![A-Za-z])) ?(?P<scale>C|F|(?i:celsius|fahrenheit))?$"
)
_ORDINAL_TAIL = re.compile(r"(?<=[0-9])(?:st|nd|rd|th)$")
_PRIME_TAIL = re.compile(r"(?<=[0-9}]) ?(?P<primes>'{1,2}|\")$")  # arc minutes or feet, not the bare number
_PERCENT_TAIL = re.compile(r" ?(?:%|(?<![A-Za-z])(?i:percents?|percentages?|per cent|pct)|प्रतिशत)$")
_OF_A = re.compile(r"(?: of)? an?$", re.IGNORECASE)
_CHINESE_PERCENT_HEAD = re.compile("^百分之")
_MONEY_HEAD = re.compile(r"^(?P<sign>-?) ?(?:US)? ?(?P<coin>\\dollar|[€£¥₹]|USD|EUR|GBP)(?![A-Za-z]) ?(?=[0-9.])")
_MONEY_TAIL = re.compile(r"(?<=[0-9]) ?(?P<coin>\\dollar|[€£¥₹¢])$")
_MEASURED = re.compile(rf"({NUMBER}) ?(\^\\circ|'{{1,2}}|\"|[A-Za-z]+)\.?(?:[, ]+|$|(?=[0-9]))")
# How many of a smaller unit make one of the larger, for measures of two or three parts.
_PARTS_OF = {
    ("degree", "min"): 60, ("degree", "s"): 3600, ("h", "min"): 60, ("h", "s"): 3600, ("min", "s"): 60,
    ("day", "h"): 24, ("week", "day"): 7, ("ft", "in"): 12, ("yd", "ft"): 3, ("lb", "oz"): 16, ("m", "cm"): 100,
    ("km", "m"): 1000, ("kg", "g"): 1000, ("dollar", "cent"): 100, ("L", "mL"): 1000, ("year", "month"): 12,
}  # fmt: skip
_PART_OF_A_DEGREE = {"'": "min", "''": "s", '"': "s"}
_BRACKETED_TAIL = re.compile(r"(?<=[0-9)}]) ?(?:\[ ?([A-Za-z/^{}0-9 ]{2,20}) ?\]|\( ?([A-Za-z/^{}0-9 ]{2,20}) ?\))$")
# Chinese: a unit or a counted noun may follow, but no character that changes the number or puts it in doubt.
_CHINESE_MODIFIERS = "〇零一二三四五六七八九十百千万亿半多余几约以左右上下内外大小等或和与不是非无未负倍成折的错误"
# Directly after the number: dozens, 10^12 (but not 兆帕, a megapascal), its root, absolute value, opposite, ...
_CHINESE_FACTORS = "打|兆(?![帕瓦赫欧字])|[平立]方根|绝对值|相反数|倒数|阶乘"
_CHINESE_TAIL = re.compile(
    rf"(?:(?<=[0-9)}}])|(?<=\\pi)) ?((?!{_CHINESE_FACTORS})"
    rf"(?:[平立]方|千(?=[克米瓦])|小(?=时))?(?:(?![{_CHINESE_MODIFIERS}])[\u4e00-\u9fff]){{1,4}}"
    rf"(?:/(?:小(?=时))?(?:(?![{_CHINESE_MODIFIERS}])[\u4e00-\u9fff]){{1,3}})?)$"
)
# After a numeral in characters only a counter or a unit: 三角形 is a triangle, not three of something.
_CHINESE_COUNTER = re.compile(
    rf"(?<=[{NUMERALS}])((?:[个個名位只条张本棵辆台枚](?:(?![{_CHINESE_MODIFIERS}])[\u4e00-\u9fff]){{0,3}}"
    r"|(?:[平立]方)?(?:厘米|毫米|分米|千米|米)|公里|公斤|千?克|吨|秒|分钟?|小?时|天|周|月|年|毫?升|度|元|人|次|种|岁))$"
)
_CHINESE_UNITS = {
    "米": "m", "厘米": "cm", "毫米": "mm", "分米": "dm", "千米": "km", "公里": "km", "克": "g", "千克": "kg",
    "公斤": "kg", "吨": "t", "秒": "s", "分": "min", "分钟": "min", "时": "h", "小时": "h", "天": "day",
    "周": "week", "月": "month", "年": "year", "升": "L", "毫升": "mL", "度": "degree", "元": "yuan",
    "角": "jiao", "千瓦": "kW", "公顷": "ha",
}  # fmt: skip
_CHINESE_POWERS = {"平方": 2, "立方": 3}
# Hindi: up to three words, none of which changes the number or puts it in doubt.
_HINDI_WORD = r"[\u0900-\u0963\u0971-\u097f]+"
_HINDI_TAIL = re.compile(rf"(?:(?<=[0-9)}}])|(?<=\\pi)) ?({_HINDI_WORD}(?:[ /]{_HINDI_WORD}){{0,2}})$")
_HINDI_MODIFIERS = """
    सौ हज़ार हजार लाख करोड़ अरब दर्जन गुना गुणा गुनी आधा बटा दशमलव भाग से तक अधिक ज्यादा ज़्यादा कम लगभग करीब या और
    नहीं न घात वर्गमूल प्रतिशत प्रति शायद अथवा
"""
_NO_HINDI_UNITS = frozenset(unicodedata.normalize("NFKC", _HINDI_MODIFIERS).split())
_HINDI_NAMES = {
    "m": "मीटर", "cm": "सेमी सेंटीमीटर सेन्टीमीटर", "mm": "मिमी मिलीमीटर", "km": "किमी किलोमीटर", "g": "ग्राम",
    "kg": "किग्रा किलोग्राम किलो", "s": "सेकंड सेकेंड", "min": "मिनट", "h": "घंटे घंटा घण्टे", "day": "दिन",
    "week": "सप्ताह", "month": "महीने माह", "year": "वर्ष साल", "L": "लीटर", "degree": "डिग्री अंश",
    "rupee": "रुपये रुपए रुपया", "dollar": "डॉलर",
}  # fmt: skip
_HINDI_UNITS = {name: unit for unit, names in _HINDI_NAMES.items() for name in names.split()}
_HINDI_POWERS = {"वर्ग": 2, "घन": 3}
_OHM, _MICRO = re.compile(r"(?<=[0-9) ])(k|M)? ?\\Omega$"), re.compile(r"(?<=[0-9) ])\\mu ?(?=[msgFCLA]$)")
_COINS = {"\\dollar": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee", "¢": "cent"}
_COINS |= {"USD": "dollar", "EUR": "euro", "GBP": "pound sterling"}

Unit = Mapping[str, int]  # exponent by name: {"m": 1, "s": -1}


@dataclass(frozen=True, slots=True)
class Quantity:
    """An answer taken apart: the text of its value, its unit and whether it has a percent sign."""

    body: str
    unit: Unit | None = None  # None: a bare number
    percent: bool = False


def split_quantity(text: str) -> Quantity:
    """Take the percent sign or the unit off a `clean` text; without either the body is the whole text."""
    text = _MICRO.sub(" u", _OHM.sub(r" \1ohm", text))
    if match := _PERCENT_TAIL.search(text):
        return Quantity(text[: match.start()].strip(), percent=True)
    if match := _DEGREE_TAIL.search(text):
        scale = (match["scale"] or "")[:1].upper()
        return Quantity(text[: match.start()].strip(), {f"degree {scale}".strip(): 1})
    if match := _ORDINAL_TAIL.search(text):
        return Quantity(text[: match.start()], {"ordinal": 1})
    if match := _PRIME_TAIL.search(text):
        return Quantity(text[: match.start()].strip(), {match["primes"]: 1})
    if match := _MONEY_HEAD.search(text):
        return Quantity(match["sign"] + text[match.end() :].strip(), {_COINS[match["coin"]]: 1})
    if match := _MONEY_TAIL.search(text):
        return Quantity(text[: match.start()].strip(), {_COINS[match["coin"]]: 1})
    if match := _BRACKETED_TAIL.search(text):
        unit = parse_unit(match[1] or match[2], number_before=False)
        return Quantity(text[: match.start()].strip(), unit) if unit else Quantity(text)
    if not text.isascii() and (quantity := _split_foreign(text)):
        return quantity
    if match := _FRACTION_TAIL.search(text):
        unit = parse_unit(f"{match[1]}/{match[2]}", number_before=False)
        return Quantity(text[: match.start()].strip(), unit) if unit else Quantity(text)
    match = _UNIT_TAIL.search(text)
    if match is None:
        return Quantity(text)
    body = text[: match.start()].strip()
    if not body:
        return _split_worded(text)
    ends_in_number = body.endswith(("}", ")", "\\pi", ".")) or body[-1].isdigit()
    unit = parse_unit(match["unit"], number_before=ends_in_number)
    # `5m` may be a product: a unit of a single letter needs a space, which \text{m} and \mathrm{m} leave.
    if unit is None or not ends_in_number or (len(match["unit"]) == 1 and not match["space"]):
        return Quantity(text)
    return Quantity(body, unit or None)


def parse_unit(text: str, *, number_before: bool = True) -> Unit | None:
    """Return the unit that `square meters`, `m^{2}`, `km/h` or up to three plain words name, or None.

    Plain words are a unit only after a number (`6 apples`). The unit of `units` is {}.
    """
    exponents: dict[str, int] = {}
    power, side, words, last = 1, 1, 0, ""
    text = " ".join(_COMPOUND.get(word, word) for word in text.replace("\\cdot", " ").split())
    for token in re.findall(rf"{_WORD}|/", text):
        name, _, exponent = token.partition("^{")
        if token in ("/", "per"):
            side = -1
        elif token in ("squared", "cubed"):
            if not last:
                return None
            exponents[last] *= _POWERS[token]
        elif token in _POWERS:
            power = _POWERS[token]
        elif name in _NO_UNIT:
            power = 1
        else:
            unit = _known_unit(name)
            if unit is None:
                words += 1
                unit = name.lower()
                if not number_before or len(name) < 3 or unit in _NOT_UNITS or words > 3:
                    return None
                if words == 1 and unit in _NOT_FIRST:
                    return None
                unit = unit.removesuffix("s")
            exponents[unit] = exponents.get(unit, 0) + side * power * int(exponent.removesuffix("}") or 1)
            power, last = 1, unit
    names_a_unit = exponents or _NO_UNIT & {word.partition("^{")[0] for word in text.split()}
    return exponents if power == 1 and names_a_unit else None


def compound_measure(text: str) -> list[tuple[Fraction | None, str]] | None:
    """Return (value, unit) of each part of `6 ft 2 in` or `35^\\circ 20'`; None unless there are two or more."""
    parts: list[tuple[Fraction | None, str]] = []
    position = 0
    while match := _MEASURED.match(text, position):
        of_a_degree = bool(parts) and parts[0][1] == "degree"
        unit = _PART_OF_A_DEGREE.get(match[2]) if of_a_degree else None
        unit = unit or ("degree" if match[2] == "^\\circ" else _known_unit(match[2]))
        if unit is None:
            return None
        parts.append((parse_rational(match[1]), unit))
        position = match.end()
    return parts if len(parts) > 1 and position == len(text) else None


def same_measure(gold: str, answer: str) -> bool | None:
    """Return whether `30^\\circ 15'` and `30.25^\\circ` are the same; None unless one side has several parts.

    Two measures of the same units must agree part by part: 5 ft 14 in is not 6 ft 2 in.
    """
    if gold.startswith("-") and answer.startswith("-"):
        gold, answer = gold[1:].strip(), answer[1:].strip()
    sides = [compound_measure(text) for text in (gold, answer)]
    if not any(sides):
        return None
    units = [[unit for _, unit in side or []] for side in sides]
    if all(sides) and units[0] == units[1]:
        return sides[0] == sides[1]
    larger = (units[0] or units[1])[0]
    left, right = (
        _as_one_number(side, larger) if side else _in_unit(text, larger)
        for side, text in zip(sides, (gold, answer), strict=True)
    )
    return left is not None and left == right


def _as_one_number(parts: list[tuple[Fraction | None, str]], larger: str) -> Fraction | None:
    """Return the parts of a measure as a number of the larger unit; None if a unit is no part of it."""
    total = Fraction(0)
    for value, unit in parts:
        size = 1 if unit == larger else _PARTS_OF.get((larger, unit))
        if value is None or size is None:
            return None
        total += value / size
    return total


def _in_unit(text: str, unit: str) -> Fraction | None:
    """Return the number of a `clean` text without a unit or with this one; None for any other."""
    quantity = split_quantity(text)
    if quantity.percent or quantity.unit not in (None, {unit: 1}):
        return None
    number = parse_rational(quantity.body)
    return parse_words(quantity.body) if number is None else number


def _split_foreign(text: str) -> Quantity | None:
    """Take a Chinese or Hindi unit off, or the 百分之 of a percentage; return None if there is none."""
    if match := _CHINESE_PERCENT_HEAD.search(text):
        return Quantity(text[match.end() :], percent=True)
    if match := _CHINESE_TAIL.search(text) or _CHINESE_COUNTER.search(text):
        return Quantity(text[: match.start()].strip(), _chinese_unit(match[1]))
    if match := _HINDI_TAIL.search(text):
        unit = _hindi_unit(match[1])
        return Quantity(text[: match.start()].strip(), unit) if unit else Quantity(text)
    return None


def _split_worded(text: str) -> Quantity:
    """Split `two hours`, a number in words and a unit."""
    words = text.split() if parse_words(text) is None else []
    for size in range(len(words) - 1, 0, -1):
        number, unit = " ".join(words[:size]), parse_unit(" ".join(words[size:]))
        number = _OF_A.sub("", number)  # half an hour
        if unit and parse_words(number) is not None:
            return Quantity(number, unit)
    return Quantity(text)


def _chinese_unit(name: str) -> Unit:
    """Return the unit of 平方米 or 千米/小时; a counted noun is its own unit."""
    exponents: dict[str, int] = {}
    for side, part in zip((1, -1), re.split("[/每]", name, maxsplit=1), strict=False):
        power = _CHINESE_POWERS.get(part[:2], 1)
        part = part[2:] if power > 1 else part
        exponents[_CHINESE_UNITS.get(part, part)] = side * power
    return exponents


def _hindi_unit(name: str) -> Unit | None:
    """Return the unit of वर्ग मीटर or किमी/घंटा; a counted noun is its own unit. None for words that are not a unit."""
    exponents: dict[str, int] = {}
    for side, part in zip((1, -1), name.split("/"), strict=False):
        words = part.split()
        if not words or _NO_HINDI_UNITS.intersection(words):
            return None
        power = _HINDI_POWERS.get(words[0], 1) if len(words) > 1 else 1
        noun = " ".join(words[power > 1 :])
        exponents[_HINDI_UNITS.get(noun, noun)] = side * power
    return exponents


def _known_unit(name: str) -> str | None:
    """Return the symbol of a unit by its symbol or its name, singular or plural; None for other words."""
    lower = name.lower() if len(name) > 1 else name
    return _UNITS.get(name) or _UNITS.get(lower) or _UNITS.get(lower.removesuffix("s"))


@dataclass(frozen=True, slots=True)
class Margin:
    """How far an answer may be from the gold: equal when rounded (MathVista), or within a distance (DynaMath)."""

    places: int | None = None  # decimal places to round to
    distance: Fraction | None = None

    def allows(self, gold: Fraction, answer: Fraction) -> bool:
        """Return whether two numbers are equal within the margin."""
        if gold == answer:
            return True
        if self.distance is not None:
            return abs(gold - answer) <= self.distance
        return self.places is not None and _round(gold, self.places) == _round(answer, self.places)

    def __bool__(self) -> bool:
        """Return whether anything but the exact number is allowed."""
        return self.places is not None or self.distance is not None


def margin_of(meta: Mapping[str, Any]) -> Margin:
    """Return the margin that a problem's meta states; a tolerance takes precedence over a precision."""
    if meta.get("tolerance") is not None:
        return Margin(distance=Fraction(str(meta["tolerance"])))
    return Margin() if meta.get("precision") is None else Margin(places=int(meta["precision"]))


def same_number(
    gold: Fraction,
    answer: Fraction,
    margin: Margin,
    *,
    gold_percent: bool = False,
    answer_percent: bool = False,
    by_numeral: bool = False,
) -> bool:
    """Return whether two numbers are equal within the margin.

    Args:
        gold: The gold's number, without its percent sign.
        answer: The answer's number, without its percent sign.
        margin: How far the answer may be from the gold.
        gold_percent: Whether the gold has a percent sign: 50% is 0.5.
        answer_percent: Whether the answer has one.
        by_numeral: Whether 50 and 50% are equal too.
    """
    if (by_numeral or gold_percent == answer_percent) and margin.allows(gold, answer):
        return True
    shares = gold / 100 if gold_percent else gold, answer / 100 if answer_percent else answer
    return gold_percent != answer_percent and margin.allows(*shares)


def _round(number: Fraction, places: int) -> Fraction:
    """Round to decimal places, half away from zero."""
    scaled = abs(number) * 10**places + Fraction(1, 2)
    result = Fraction(scaled.numerator // scaled.denominator, 10**places)
    return result if number >= 0 else -result
