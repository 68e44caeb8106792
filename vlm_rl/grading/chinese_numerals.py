"""Read numbers in Chinese: `五`, `一百零五`, `12万`, `三点五`, `二又三分之一`, `一半`, `两个半`, `负七`, `负7`."""

from __future__ import annotations

import re
from fractions import Fraction

from vlm_rl.grading.rational import NUMBER, parse_rational

_DIGITS = "零一二三四五六七八九"
_PLACES = {"千": 1000, "百": 100, "十": 10}
_SCALES = {"亿": 10**8, "万": 10**4}
_VARIANTS = str.maketrans("〇两兩壹贰叁肆伍陆柒捌玖拾佰仟萬億負點", "零二二一二三四五六七八九十百千万亿负点")
NUMERALS = "".join((_DIGITS, *_PLACES, *_SCALES)) + "〇两兩壹贰叁肆伍陆柒捌玖拾佰仟萬億"
_MIXED = re.compile("([^又]+)又([^又]+)")
_DIGITS_AND_SCALE = re.compile(rf"({NUMBER}) ?([{''.join((*_PLACES, *_SCALES))}])")


def parse_chinese(text: str) -> Fraction | None:
    """Return the number that the whole text names, or None."""
    text = text.strip().translate(_VARIANTS)
    if len(text) > 40:
        return None
    positive = text[1:] if text.startswith(("负", "-")) else text
    value = _parse_positive(positive)
    if value is None and text.startswith("负") and positive[:1].isdecimal():
        value = parse_rational(positive)  # 负2, 负1/2
    return -value if value is not None and positive != text else value


def _parse_positive(text: str) -> Fraction | None:
    if text in ("半", "一半"):
        return Fraction(1, 2)
    if match := _MIXED.fullmatch(text):
        whole, share = (_parse_positive(part) or parse_rational(part) for part in match.groups())
        if whole is None or share is None or whole.denominator != 1 or share >= 1:
            return None
        return whole + share
    if text.endswith(("个半", "個半")):
        whole = _parse_positive(text[:-2]) or parse_rational(text[:-2])
        return None if whole is None or whole.denominator != 1 else whole + Fraction(1, 2)
    below, share, above = text.partition("分之")
    if share:
        parts = [parse_rational(part) if part.isdecimal() else _parse_positive(part) for part in (above, below)]
        return parts[0] / parts[1] if parts[0] is not None and parts[1] else None
    if match := _DIGITS_AND_SCALE.fullmatch(text):
        number = parse_rational(match[1])
        return None if number is None else number * (_SCALES | _PLACES)[match[2]]
    whole, point, decimals = text.partition("点")
    value = _whole_number(whole)
    if value is None or (point and not decimals) or not all(digit in _DIGITS for digit in decimals):
        return None
    return value + sum(Fraction(_DIGITS.index(digit), 10**place) for place, digit in enumerate(decimals, start=1))


def _whole_number(text: str) -> Fraction | None:
    """Return the whole number that a text names, or None unless it is written as a number of this value is."""
    total = section = digit = 0
    for character in text:
        if character in _DIGITS:
            digit = _DIGITS.index(character)
        elif character in _PLACES:
            section, digit = section + (digit or 1) * _PLACES[character], 0
        elif character in _SCALES:
            total, section, digit = total + (section + digit) * _SCALES[character], 0, 0
        else:
            return None
    number = total + section + digit
    is_usual = bool(text) and text.replace("一十", "十") == _written(number).replace("一十", "十")
    return Fraction(number) if is_usual else None


def _written(number: int) -> str:
    """Return a number below 10^12 in Chinese: 105 as 一百零五."""
    for scale, size in (_SCALES | _PLACES).items():
        if number >= size:
            many, rest = divmod(number, size)
            gap = "零" if 0 < rest < size // 10 else ""
            return _written(many) + scale + gap + (_written(rest) if rest else "")
    return _DIGITS[number]
