r"""Where the mathematics is in a text. The page's script draws it (KaTeX, from gradio's own files).

Everything is escaped here; a formula becomes <span class='tex'>its escaped source</span>, so that a page
without the script shows the source. KaTeX gets the span's text, trusts nothing in it, and where it does not
understand it the source stays.
"""

from __future__ import annotations

import re

from vlm_rl.report.html import escape

_MAX_FORMULA = 2_000  # characters; longer ones stay text
_MAX_FORMULAS = 200  # of one text
_TAGS = re.compile(r"(&lt;/?(?:answer|think)&gt;)")
_START = re.compile(r"\\boxed\s*\{|\$\$|\\\[|\\\(|\$(?=[^\s$])")
_ENDS = {"$$": "$$", r"\[": r"\]", r"\(": r"\)"}
_COMMAND = re.compile(r"\\[a-zA-Z]+|[\^_]\{")


def math_html(text: str) -> str:
    """HTML of a text with its formulas marked, tags of the template set back; nothing in it is markup."""
    parts, position = [], 0
    for _ in range(_MAX_FORMULAS):
        found = _next(text, position)
        if found is None:
            break
        start, end, source, display = found
        before = text[position:start]
        parts += [_plain(before.rstrip() if display else before), formula(source, display=display)]
        position = end + _blank(text, end) if display else end
    return "".join([*parts, _plain(text[position:])])


def value_html(text: str) -> str:
    """HTML of a short value, an answer: a formula where it has a command, an exponent or an index."""
    if _START.search(text) or len(text) > _MAX_FORMULA:
        return math_html(text)
    return formula(text) if _COMMAND.search(text) else escape(text)


def formula(source: str, *, display: bool = False) -> str:
    """One formula, for the script to draw."""
    return f"<span class='tex{' display' if display else ''}'>{escape(source)}</span>"


def _blank(text: str, position: int) -> int:
    """How much white space follows there: around a formula that stands by itself, it would be drawn as more lines."""
    return len(text) - position - len(text[position:].lstrip())


def _plain(text: str) -> str:
    return _TAGS.sub(r"<span class='tag'>\1</span>", escape(text))


def _next(text: str, position: int) -> tuple[int, int, str, bool] | None:
    """(start, end, source, display) of the next formula at or after `position`."""
    for start in _START.finditer(text, position):
        opened = start.group()
        if opened.startswith(r"\boxed"):
            end = _closing_brace(text, start.end())
            source = text[start.start() : end]
        else:
            end = _end(text, start.end(), opened)
            source = text[start.end() : end - len(_ENDS.get(opened, "$"))]
        if end and source.strip() and len(source) <= _MAX_FORMULA:
            return start.start(), end, source, opened in ("$$", r"\[")
    return None


def _end(text: str, position: int, opened: str) -> int:
    """Behind the closing delimiter; 0 if there is none. A lone dollar closes on its line, before no digit."""
    if opened != "$":
        found = text.find(_ENDS[opened], position, position + _MAX_FORMULA + 2)
        return found + len(_ENDS[opened]) if found >= 0 else 0
    match = re.compile(r"[^\n$]*?[^\s$\\]\$(?!\d)").match(text, position)
    return match.end() if match else 0


def _closing_brace(text: str, position: int) -> int:
    """Behind the brace that closes the one before `position`; 0 if it is never closed."""
    depth = 1
    for index in range(position, min(len(text), position + _MAX_FORMULA)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if not depth:
                return index + 1
    return 0
