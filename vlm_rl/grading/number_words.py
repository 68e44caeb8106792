"""Read numbers in words: `five`, `minus 3`, `2.5 million`, `two and a half`, `half a dozen`, and in Chinese."""

from __future__ import annotations

import re
from fractions import Fraction

from vlm_rl.grading.chinese_numerals import parse_chinese
from vlm_rl.grading.rational import NUMBER, parse_rational

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_UNITS = {word: value for value, word in enumerate(_SMALL.split())}
_UNITS |= {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ORDINALS = "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
_ORDINAL_OF: dict[str, str] = dict(zip(_ORDINALS.split(), _SMALL.split(), strict=False))
_ORDINAL_OF |= {word + "th": word for word in (*_SMALL.split()[13:], *_SCALES)}
_ORDINAL_OF |= {word.removesuffix("y") + "ieth": word for word in _TENS.split()}
# Words that count or name a part, so that none of them can be a unit.
COUNTING = frozenset([*_UNITS, *_SCALES, *_ORDINAL_OF, *(f"{word}s" for word in (*_ORDINAL_OF, *_SCALES))])
_SUFFIXED = re.compile(r"([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(st|nd|rd|th)")
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8}
_PARTS |= {"ninth": 9, "tenth": 10}
_SHARE = re.compile(
    rf"(?:(?P<whole>.+) and )?(?:(?:an?|one)|(?P<many>[a-z]+))[ -]"
    rf"(?P<part>{'|'.join(_PARTS)}|halves)(?P<plural>s?)"
)
_MULTIPLES = _SCALES | {"dozen": 12}
_HALF_OF = re.compile(rf"(?:half an? |half |a half )({'|'.join(_MULTIPLES)})")
_ONE_OF = re.compile(rf"^an? (?={'|'.join(_MULTIPLES)})")
_SIGN = re.compile(r"(?:minus|negative) ")
_DIGITS_AND_SCALE = re.compile(rf"({NUMBER}) ?({'|'.join(_SCALES)})")


def parse_words(text: str) -> Fraction | None:
    """Return the number that the whole text names, or None."""
    text = text.strip().casefold()
    if not text.isascii():
        return parse_chinese(text)
    if len(text) > 100:
        return None
    value = _parse_positive(_SIGN.sub("", text, count=1))
    return -value if value is not None and _SIGN.match(text) else value


def parse_ordinal(text: str) -> int | None:
    """Return 57 for `57th`, 3 for `third` or `the third`; None if a `clean` text is not an ordinal number."""
    text = text.strip().casefold().removeprefix("the ").strip()
    if len(text) > 100:
        return None
    if match := _SUFFIXED.fullmatch(text):
        return int(match[1].replace(",", ""))
    head, _, last = text.replace("-", " ").rpartition(" ")
    value = parse_words(f"{head} {_ORDINAL_OF[last]}") if last in _ORDINAL_OF else None
    return None if value is None or value.denominator != 1 else int(value)


def _parse_share(text: str) -> Fraction | None:
    """Return the value of `one third`, `three-quarters` or `two and a half`; None for anything else."""
    if text == "half":
        return Fraction(1, 2)
    match = _SHARE.fullmatch(text)
    if match is None or (match["many"] and match["many"] not in _UNITS) or "dozen" in (match["whole"] or ""):
        return None
    plural = bool(match["plural"]) or match["part"] == "halves"
    whole = _parse_positive(match["whole"]) if match["whole"] else Fraction(0)
    if whole is None or whole.denominator != 1 or plural != bool(match["many"]):
        return None
    return whole + Fraction(_UNITS[match["many"]] if plural else 1, _PARTS.get(match["part"], 2))


def _parse_positive(text: str) -> Fraction | None:
    """Return the number that a text without a sign names, or None."""
    if (share := _parse_share(text)) is not None:
        return share
    if match := _HALF_OF.fullmatch(text):
        return Fraction(_MULTIPLES[match[1]], 2)
    text = _ONE_OF.sub("one ", text)
    if text.endswith((" dozen", " dozens")):
        many = _parse_positive(text.rpartition(" ")[0])
        return None if many is None else 12 * many
    if match := _DIGITS_AND_SCALE.fullmatch(text):
        number = parse_rational(match[1])
        return None if number is None else number * _SCALES[match[2]]
    words = text.replace("-", " ").replace(" and ", " ").split()
    return _add_up(words) if all(word in _UNITS or word in _SCALES for word in words) else parse_rational(text)


def _add_up(words: list[str]) -> Fraction | None:
    """Return the value of number words, or None if they do not follow each other as in a number.

    A word adds to the group in front of the next scale (thousand, million), or is the scale. `room` is what the next
    word of a group must stay below, and each scale must be smaller than the last.
    """
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
