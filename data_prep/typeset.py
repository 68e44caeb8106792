r"""Draw a problem's text as an image: black on white, lines wrapped, formulas between dollars set as formulas.

Matplotlib's mathtext sets a useful part of LaTeX. A formula beyond it (an environment, for example) is shown
as its source in a monospaced font, which a reader or a model can still read. Text in a script that the font
lacks (Chinese) is refused instead of drawn as boxes, and so is one that is written from right to left.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vlm_rl.data_prep.records import RowError

WIDTH = 728  # pixels: 26 visual tokens of 28
MARGIN = 28
FONT_SIZE = 22  # pixels
LINE_GAP = 10
_DPI = 100
_WIDEST = 1_000_000  # pixels of a word: nearly 1,500 lines
_RIGHT_TO_LEFT = frozenset(("R", "AL", "AN", "RLE", "RLO", "RLI"))  # as Unicode classes characters

_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\.|[^$\\])+?)\$", re.S
)  # display, display, inline, inline
_ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.S)
_EQUATION = re.compile(r"\\(?:begin|end)\{equation\*?\}")  # the same as $$
_REWRITES = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:text|textbf|textit|mbox|textrm)\s*\{([^{}]*)\}"), r"\\text{\1}"),
    (re.compile(r"\\(?:displaystyle|limits|nolimits|!|hfill)(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:le|leqslant)(?![a-zA-Z])"), r"\\leq"),
    (re.compile(r"\\(?:ge|geqslant)(?![a-zA-Z])"), r"\\geq"),
    (re.compile(r"\\ne(?![a-zA-Z])"), r"\\neq"),
    (re.compile(r"\\(?:lvert|rvert)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\implies(?![a-zA-Z])"), r"\\Rightarrow"),
    (re.compile(r"\\iff(?![a-zA-Z])"), r"\\Leftrightarrow"),
    (re.compile(r"\\pmod\s*\{([^{}]*)\}"), r"\\ (\\mathrm{mod}\\ \1)"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A word or a formula on a line."""

    ink: np.ndarray  # uint8 [height, width], 0 white to 255 black
    ascent: int  # rows of ink above the base line
    glue: bool = False  # no space in front of it
    alone: bool = False  # a display formula, which has a line to itself

    @property
    def width(self) -> int:
        return self.ink.shape[1]

    @property
    def descent(self) -> int:
        return self.ink.shape[0] - self.ascent


def typeset(text: str, *, max_pixels: int) -> Image.Image:
    """Return the text as an RGB image, WIDTH pixels wide.

    Raises RowError if the font lacks a character, or if the image would have more than `max_pixels`.
    """
    if backward := next((char for char in text if unicodedata.bidirectional(char) in _RIGHT_TO_LEFT), ""):
        detail = f"{backward!a} is of a script from right to left, and lines are set from left to right"
        raise RowError("typeset_font", detail, known=True)
    lines: list[list[_Piece]] = []
    height = 2 * MARGIN
    for line in _lines(text):
        height += LINE_GAP * bool(lines) + sum(_extent(line))
        lines.append(line)
        if WIDTH * height > max_pixels:  # before the rest is drawn, which may be much
            raise _too_long(f"an image of {WIDTH}x{height} pixels does not hold it; the limit is {max_pixels} pixels")
    return _draw(lines, WIDTH)


def _too_long(detail: str) -> RowError:
    return RowError("typeset_too_long", detail, known=True)


def _lines(text: str) -> Iterator[list[_Piece]]:
    for paragraph in _paragraphs(_EQUATION.sub("$$", text)):
        yield from _wrap(_pieces(paragraph), WIDTH - 2 * MARGIN)


def _paragraphs(text: str) -> list[str]:
    """Cut the text at line breaks, except inside formulas and environments."""
    closed = _FORMULA.sub(lambda match: match.group().replace("\n", " "), text)
    closed = _ENVIRONMENT.sub(lambda match: match.group().replace("\n", " "), closed)
    return [part.strip() for part in closed.split("\n") if part.strip()]


def _pieces(paragraph: str) -> Iterator[_Piece]:
    """Yield the words and formulas of a paragraph in order."""
    position = 0
    for match in _FORMULA.finditer(paragraph):
        before = paragraph[position : match.start()]
        yield from _words(before, glue=_starts_glued(before, position))
        source = next(group for group in match.groups() if group is not None)
        glued = match.start() > 0 and not paragraph[match.start() - 1].isspace()
        yield from _formula(source.strip(), glue=glued, alone=match[1] is not None or match[2] is not None)
        position = match.end()
    rest = paragraph[position:]
    yield from _words(rest, glue=_starts_glued(rest, position))


def _starts_glued(text: str, position: int) -> bool:
    return position > 0 and bool(text) and not text[0].isspace()


def _words(text: str, *, glue: bool) -> Iterator[_Piece]:
    for index, word in enumerate(text.split()):
        clean = word.replace(r"\$", "$").replace(r"\%", "%").replace(r"\&", "&")
        yield _word(clean, FONT_SIZE, mono="\\" in clean, glue=glue and index == 0)


def _word(word: str, size: int, *, mono: bool = False, glue: bool = False) -> _Piece:
    name = "DejaVuSansMono.ttf" if mono else "DejaVuSans.ttf"
    if missing := sorted(set(word) - _known_characters(name)):
        raise RowError("typeset_font", f"the font has no {missing[0]!r}, so the text cannot be drawn", known=True)
    font = _font(name, size)
    ascent, descent = font.getmetrics()
    width = max(1, int(np.ceil(font.getlength(word))))
    if width > _WIDEST:
        raise _too_long(f"a word of {len(word):,} characters fills more lines than an image may have")
    canvas = Image.new("L", (width, ascent + descent), 0)
    ImageDraw.Draw(canvas).text((0, 0), word, font=font, fill=255)
    return _Piece(np.asarray(canvas), ascent, glue=glue)


def _formula(source: str, *, glue: bool, alone: bool) -> list[_Piece]:
    """Return the formula as a single piece, or as the words of its source where mathtext cannot set it."""
    clean = source
    for pattern, replacement in _REWRITES:
        clean = pattern.sub(replacement, clean)
    try:
        if not clean.strip():
            raise ValueError("an empty formula")
        parsed = _math_parser().parse(f"${clean.strip()}$", dpi=_DPI, prop=_math_font())
        ink = np.asarray(parsed.image)
        if ink.size == 0:
            raise ValueError("an empty formula")
        return [_Piece(ink.astype(np.uint8), round(ink.shape[0] - parsed.depth), glue=glue, alone=alone)]
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError, RecursionError):  # beyond mathtext
        words = source.split()
        return [_word(word, FONT_SIZE - 3, mono=True, glue=glue and index == 0) for index, word in enumerate(words)]


def _wrap(pieces: Iterable[_Piece], width: int) -> Iterator[list[_Piece]]:
    """Distribute the pieces over lines; a piece that is wider than a line is cut."""
    space = FONT_SIZE // 3
    line: list[_Piece] = []
    used = 0
    for piece in (part for whole in pieces for part in _cut(whole, width)):
        gap = 0 if piece.glue or not line else space
        if line and (piece.alone or line[-1].alone or used + gap + piece.width > width):
            yield line
            line = []
            used = gap = 0
        line.append(piece)
        used += gap + piece.width
    if line:
        yield line


def _cut(piece: _Piece, width: int) -> list[_Piece]:
    if piece.width <= width:
        return [piece]
    parts = [piece.ink[:, start : start + width] for start in range(0, piece.width, width)]
    return [_Piece(part, piece.ascent, glue=piece.glue or index > 0) for index, part in enumerate(parts)]


def _extent(line: Sequence[_Piece]) -> tuple[int, int]:
    """Return the rows of a line above its base line and below."""
    return max(piece.ascent for piece in line), max(piece.descent for piece in line)


def _draw(lines: Sequence[Sequence[_Piece]], width: int) -> Image.Image:
    heights = [_extent(line) for line in lines]
    height = 2 * MARGIN + sum(up + down for up, down in heights) + LINE_GAP * max(len(lines) - 1, 0)
    ink = np.zeros((height, width), dtype=np.uint8)
    top = MARGIN
    for line, (up, down) in zip(lines, heights, strict=True):
        left = MARGIN
        for index, piece in enumerate(line):
            left += 0 if piece.glue or index == 0 else FONT_SIZE // 3
            y = top + up - piece.ascent
            region = ink[y : y + piece.ink.shape[0], left : left + piece.width]
            np.maximum(region, piece.ink[: region.shape[0], : region.shape[1]], out=region)
            left += piece.width
        top += up + down + LINE_GAP
    return Image.fromarray(255 - ink).convert("RGB")


@lru_cache(maxsize=1)
def _math_parser() -> Any:
    from matplotlib.mathtext import MathTextParser

    return MathTextParser("agg")


@lru_cache(maxsize=1)
def _math_font() -> Any:
    from matplotlib.font_manager import FontProperties

    return FontProperties(size=FONT_SIZE * 72 / _DPI, math_fontfamily="dejavusans")


@lru_cache(maxsize=8)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    # The other layout kerns and joins letters, where the machine has the library for it.
    return ImageFont.truetype(str(_font_folder() / name), size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=1)
def _font_folder() -> Path:
    """Return the folder of matplotlib's own fonts: they draw the same images on every machine."""
    import matplotlib as mpl

    return Path(mpl.get_data_path()) / "fonts" / "ttf"


@lru_cache(maxsize=2)
def _known_characters(name: str) -> frozenset[str]:
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(str(_font_folder() / name)).get_charmap()))
