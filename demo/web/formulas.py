r"""Find the mathematics in a text. The page's script draws it with KaTeX, which gradio ships.

A formula becomes a span that holds its source as text, so that a page without the script shows the source. KaTeX gets
that text, trusts nothing in it, and where it does not understand it the source stays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_MAX_FORMULA = 2_000  # characters; longer ones stay text
MAX_FORMULAS = 200  # of one text
TAGS = re.compile(r"(</?(?:answer|think)>)")
_START = re.compile(r"\\boxed\s*\{|\$\$|\\\[|\\\(|\$(?=[^\s$])")
_ENDS = {"$$": "$$", r"\[": r"\]", r"\(": r"\)"}
_COMMAND = re.compile(r"\\[a-zA-Z]+|[\^_]\{")


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A stretch of a text; `kind` is also the CSS class that it gets."""

    kind: Literal["text", "tag", "tex", "tex display"]
    text: str  # of a formula the source, without its delimiters


def spans_of(text: str) -> list[TextSpan]:
    """Split a text into plain text, tags of the response template, and formulas."""
    spans: list[TextSpan] = []
    position = 0
    for _ in range(MAX_FORMULAS):
        formula = _next_formula(text, position)
        if formula is None:
            break
        start, end, source, is_display = formula
        before = text[position:start]
        spans += _plain(before.rstrip() if is_display else before)
        spans.append(TextSpan("tex display" if is_display else "tex", source))
        position = end
        if is_display:  # the white space around a formula on its own lines would be drawn as more lines
            position += len(text[end:]) - len(text[end:].lstrip())
    return spans + _plain(text[position:])


def value_spans(text: str) -> list[TextSpan]:
    """Split a short value such as an answer: it is one formula where it has a command, an exponent or an index."""
    if _START.search(text) or len(text) > _MAX_FORMULA:
        return spans_of(text)
    return [TextSpan("tex" if _COMMAND.search(text) else "text", text)]


def _plain(text: str) -> list[TextSpan]:
    return [TextSpan("tag" if TAGS.fullmatch(part) else "text", part) for part in TAGS.split(text) if part]


def _next_formula(text: str, position: int) -> tuple[int, int, str, bool] | None:
    """Return (start, end, source, is display) of the next formula at or after `position`; None without one."""
    for start in _START.finditer(text, position):
        formula = formula_at(text, start.start())
        if formula is not None:
            return start.start(), *formula
    return None


def formula_at(text: str, position: int) -> tuple[int, str, bool] | None:
    """Return (end, source, is display) of the formula that begins at `position`; None without one."""
    start = _START.match(text, position)
    if start is None:
        return None
    opened = start.group()
    if opened.startswith(r"\boxed"):
        end = _after_closing_brace(text, start.end())
        source = text[position:end]
    else:
        end = _after_closing_delimiter(text, start.end(), opened)
        source = text[start.end() : end - len(_ENDS.get(opened, "$"))]
    if end and source.strip() and len(source) <= _MAX_FORMULA:
        return end, source, opened in ("$$", r"\[")
    return None


def _after_closing_delimiter(text: str, position: int, opened: str) -> int:
    """Return the position after the closing delimiter; 0 without one.

    A single dollar closes on its own line, and not before a digit.
    """
    if opened != "$":
        closing = text.find(_ENDS[opened], position, position + _MAX_FORMULA + 2)
        return closing + len(_ENDS[opened]) if closing >= 0 else 0
    match = re.compile(r"[^\n$]*?[^\s$\\]\$(?!\d)").match(text, position)
    return match.end() if match else 0


def _after_closing_brace(text: str, position: int) -> int:
    """Return the position after the brace that closes the one before `position`; 0 if it is never closed."""
    depth = 1
    for index in range(position, min(len(text), position + _MAX_FORMULA)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if not depth:
                return index + 1
    return 0
