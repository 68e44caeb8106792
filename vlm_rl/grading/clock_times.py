"""Read times on a clock: `4:30`, `04:30:00`, `4:30 PM`, `16:30`, `5 o'clock`, and ranges of them."""

from __future__ import annotations

import math
import re

_HALF = r"(?: ?(?P<{0}>[ap])\.? ?m\.?)"
_TIME = re.compile(
    rf"(?P<hour>[01]?[0-9]|2[0-4]) ?: ?(?P<minute>[0-5][0-9])(?: ?: ?(?P<second>[0-5][0-9]))?{_HALF.format('half')}?"
    rf"|(?P<whole>1[0-2]|0?[1-9])(?:{_HALF.format('part')}| ?o ?'? ?clock)",
    re.IGNORECASE,
)

_FROM = re.compile(r"^(?:from|between) |^从", re.IGNORECASE)
_RANGE = re.compile(r" ?(?:-{1,3}|~| (?:to|until|till|and) |至|到) ?", re.IGNORECASE)
_RATIO = re.compile(r"([1-9][0-9]{0,5}) ?: ?([1-9][0-9]{0,5})")


def parse_time(text: str) -> tuple[int, bool] | None:
    """Return (seconds since midnight, whether the half of the day is known), or None if a `clean` text is not a time.

    4:30 may be in the morning or in the afternoon; 4:30 PM and 16:30 are the same time.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    hour, half = int(match["hour"] or match["whole"]), (match["half"] or match["part"] or "").lower()
    if half and not 1 <= hour <= 12:
        return None
    is_known = bool(half) or not 1 <= hour <= 12
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return 3600 * (hour % 24) + 60 * int(match["minute"] or 0) + int(match["second"] or 0), is_known


def parse_time_range(text: str) -> tuple[tuple[int, bool], tuple[int, bool]] | None:
    """Return both ends of `9:00-17:00`, `9 am to 5 pm` or `from 9:00 to 17:00`; None if a `clean` text is no such."""
    parts = _RANGE.split(_FROM.sub("", text))
    if len(parts) != 2:
        return None
    start, end = map(parse_time, parts)
    return None if start is None or end is None else (start, end)


def may_be_ratio(time: str, other: str) -> bool:
    """Return whether a time may be a ratio after all: 1:12 may, and so may 10:15 beside 2:3, but not 4:30 or 9:05."""
    return _RATIO.fullmatch(time) is not None and (_is_reduced(time) or _is_reduced(other))


def _is_reduced(text: str) -> bool:
    match = _RATIO.fullmatch(text)
    return match is not None and math.gcd(int(match[1]), int(match[2])) == 1
