"""Numbers in English words: `five`, `twenty-one`, `minus 3`, `2.5 million`, `one hundred and five`."""

from __future__ import annotations

import re
from fractions import Fraction

from vlm_rl.rational import NUMBER, parse_rational

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_UNITS = {word: value for value, word in enumerate(_SMALL.split())}
_UNITS |= {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SIGN = re.compile(r"(?:minus|negative) ")
_DIGITS_AND_SCALE = re.compile(rf"({NUMBER}) ?({'|'.join(_SCALES)})")


def parse_words(text: str) -> Fraction | None:
    """The number that the whole text names, or None."""
    text = text.strip().casefold()
    if not text.isascii() or len(text) > 100:
        return None
    value = _positive(_SIGN.sub("", text, count=1))
    return -value if value is not None and _SIGN.match(text) else value


def _positive(text: str) -> Fraction | None:
    if match := _DIGITS_AND_SCALE.fullmatch(text):
        number = parse_rational(match[1])
        return None if number is None else number * _SCALES[match[2]]
    words = text.replace("-", " ").replace(" and ", " ").split()
    return _sum(words) if all(word in _UNITS or word in _SCALES for word in words) else parse_rational(text)


def _sum(words: list[str]) -> Fraction | None:
    """Each word adds to the group in front of a scale, or scales it; neither may grow again."""
    total, group, room, last_scale = 0, 0, 100, 10**15
    for word in words:
        if word in _UNITS:
            value = _UNITS[word]
            if value >= room or (value == 0 and len(words) > 1):
                return None
            group, room = group + value, 10 if value >= 20 else 0
        elif word == "hundred":
            if not 0 < group < 100:
                return None
            group, room = 100 * group, 100
        else:
            scale = _SCALES[word]
            if not group or scale >= last_scale:
                return None
            total, group, room, last_scale = total + group * scale, 0, 100, scale
    return Fraction(total + group) if words else None
