"""Read the boxes and points that a response gives, in the forms that models write them.

    read_boxes('{"bbox_2d": [1, 2, 3, 4]}')     # [Box(1, 2, 3, 4)]
    read_boxes(r"\boxed{1, 2, 3, 4}")           # the same
    read_boxes("(1,2),(3,4)")                   # the same: Qwen2-VL's corners

A text may have numbers in several forms. The first form of these counts alone: behind a key of JSON or in a tag
(bbox, bbox_2d, box); named corners (x1, y1, x2, y2; x0, y0, x1, y1; xmin ...; left, top, right, bottom; x, y, width,
height); bare numbers in brackets, or two corners, which may be called top-left and bottom-right. A text that is
nothing but four numbers with commas is a box too. Numbers may have a sign, quotation marks and px.

Two opposite corners give a box in any order: (3,4),(1,2) is (1,2),(3,4).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

_N = r"[\"']?([-+]?(?:\d{1,6}(?:\.\d{1,20})?|\.\d{1,20}))(?:\s?(?:px|pixels?)\b)?[\"']?"
_SPACE = r"\s{0,9}"
_NEXT = rf"(?:{_SPACE}[,;]{_SPACE}|\s{{1,9}})"  # between two numbers
_FOUR = _SPACE + _NEXT.join([_N] * 4) + _SPACE
_TWO = _SPACE + _NEXT.join([_N] * 2) + _SPACE
_OPEN, _CLOSE = r"[\[({]", r"[\])}]"
_CORNER = (
    r"(?:(?:the|its) )?[\"']?(?:(?:top|bottom|upper|lower)[- _]?(?:left|right)|[左右][上下]角?"
    r"|[上下][左右]角?|\(x\d, ?y\d\))"
    r"(?: corner)?[\"']?(?: is| at|是|为)?\s?[:=]?"
)
_BETWEEN = (
    rf"{_SPACE}(?:\({_CORNER}\)|{_CORNER})?(?:,|;|-|to|and|, and)?{_SPACE}(?:{_CORNER})?{_SPACE}"  # two corners
)
_CORNERS = rf"[\[(]{_TWO}[\])]{_BETWEEN}[\[(]{_TWO}[\])]"
_KEY = r"[\"']?\s{0,9}[:=]\s{0,9}"
_KEYED_BOX = re.compile(rf"\b(?:bbox|box|bounding_box)(?:_2d)?{_KEY}(?:[\[(]{_FOUR}[\])]|\[?{_CORNERS}\]?)", re.I)
_TAGGED_BOX = re.compile(rf"<(?:bbox|box)(?:_2d)?>(?:{_FOUR}|{_CORNERS})</", re.I)
_BARE_BOX = re.compile(rf"{_OPEN}{_FOUR}{_CLOSE}|{_CORNERS}", re.I)
_WHOLE = re.compile(_SPACE + rf"{_SPACE}[,;]{_SPACE}".join([_N] * 4) + _SPACE)
_KEYED_POINT = re.compile(rf"\bpoint(?:_2d)?{_KEY}[\[(]{_TWO}[\])]", re.I)
_BARE_POINT = re.compile(rf"{_OPEN}{_TWO}{_CLOSE}")
_NAMED_NUMBER = re.compile(rf"\b([a-z]+(?:_?[a-z]+)?_?[0-2]?){_KEY}{_N}(?![\d.])", re.I)
_CORNER_NAMES = (
    ("x1", "y1", "x2", "y2"),
    ("x0", "y0", "x1", "y1"),
    ("xmin", "ymin", "xmax", "ymax"),
    ("left", "top", "right", "bottom"),
    ("x", "y", "width", "height"),
    ("x", "y", "w", "h"),
    ("left", "top", "width", "height"),
)


class Box(NamedTuple):
    """A box, x to the right and y down."""

    x1: float
    y1: float
    x2: float
    y2: float

    @property
    def area(self) -> float:
        """Return the area, 0 where a corner is on the wrong side."""
        return max(0.0, self.x2 - self.x1) * max(0.0, self.y2 - self.y1)


def read_boxes(text: str) -> list[Box]:
    """Return the different boxes that a text gives, in their order, each by its upper left and lower right corner."""
    text = _plain(text)
    forms = (_matches(_KEYED_BOX, text), _matches(_TAGGED_BOX, text), _named_boxes(text), _matches(_BARE_BOX, text))
    for found in forms:
        if boxes := [_upright(*numbers) for numbers in found]:
            return list(dict.fromkeys(boxes))
    whole = _WHOLE.fullmatch(text)
    return [_upright(*map(float, whole.groups()))] if whole else []


def _upright(x1: float, y1: float, x2: float, y2: float) -> Box:
    """Return the box between two opposite corners."""
    return Box(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))


def read_point(text: str) -> tuple[float, float] | None:
    """Return the only point that a text gives, as it is written; None if there is none, or several that differ."""
    text = _plain(text)
    for pattern in (_KEYED_POINT, _BARE_POINT):
        if given := {*_matches(pattern, text)}:
            return (next(iter(given))[0], next(iter(given))[1]) if len(given) == 1 else None
    return None


def _plain(text: str) -> str:
    r"""Return the text with full-width signs as ASCII, and without LaTeX's math signs, spaces, \left and \right."""
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-")
    text = re.sub(r"\\(?:left|right)(?=[\[\](){}|.\\])|\\[()\[\]]|\$", "", text)
    return re.sub(r"\\[,;:! ]|\\(?=[{}])|\*\*", " ", text)


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[tuple[float, ...]]:
    for match in pattern.finditer(text):
        yield tuple(float(number) for number in match.groups() if number)


def _named_boxes(text: str) -> Iterator[tuple[float, ...]]:
    """Yield boxes whose corners have names: one for each object of JSON, or for each run of the four names."""
    numbers: dict[str, float] = {}
    for match in _NAMED_NUMBER.finditer(text):
        name = match[1].lower().replace("_", "")
        if name in numbers:  # the next object
            numbers = {}
        numbers[name] = float(match[2])
        for names in _CORNER_NAMES:
            if numbers.keys() >= {*names}:
                a, b, c, d = (numbers[name] for name in names)
                if names[2] not in ("width", "w"):
                    yield (a, b, c, d)
                elif c >= 0 and d >= 0:
                    yield (a, b, a + c, b + d)
                numbers = {}
                break
