"""Read the Markdown of a model's text, for templates/markdown.html to write as HTML.

markdown-it-py parses it. Nothing that a model wrote may act, lead elsewhere or vanish: HTML, links, images and
backslash escapes stay text, and single stars stay signs, since `2*3*4` is a product. Formulas are those of
demo/web/formulas.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.rules_inline.state_inline import Delimiter
from markdown_it.token import Token

from vlm_rl.demo.web.formulas import MAX_FORMULAS, TAGS, formula_at
from vlm_rl.grading.moves import LABELS, Segment

MAX_MARKDOWN = 60_000  # characters; a longer text stays as it is, which keeps the next problem quick
_FORMULAS = ("tex", "tex display")
_SIGN = "\U0001bc9f"  # a full stop of Chinook shorthand: to Markdown a sign like any other
_BLOCK_START = re.compile(r"(?:(?:[-*+>]|#{1,6}|\d{1,9}[.)])[ \t]+)+")  # of a line: what makes it a list or a heading
_TEXT_RULES = ("html_block", "html_inline", "link", "image", "autolink", "entity", "escape", "reference")
_ODD_RULES = ("code", "lheading")  # an indented line is not code, and a line of dashes makes no heading
_TAGS_OF = {
    "paragraph": "p", "bullet_list": "ul", "ordered_list": "ol", "list_item": "li", "blockquote": "blockquote",
    "strong": "strong",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A start or an end of an element, or some text in one."""

    kind: Literal["open", "close", "text", "mark", "break", "rule", "code", "block", "tag", "tex", "tex display"]
    text: str = ""  # of `open` and `close` the element's name
    style: str = ""  # the element's class; of a formula that of the mark around it
    label: str = ""  # of a marked text: what begins here, for readers
    number: str = ""  # of a list's item, as the model wrote it


def pieces_of(text: str) -> list[Piece]:
    """Return a text as pieces in the order in which they are written."""
    if len(text) > MAX_MARKDOWN:
        return [Piece("open", "p", "long"), Piece("text", text), Piece("close", "p")]
    return list(_pieces(_PARSER.parse(text, {})))


def marked_pieces_of(text: str, segments: Sequence[Segment]) -> list[Piece]:
    """Return a text as pieces, with those of its marked stretches that are plain text as pieces of kind `mark`.

    A sign that no text holds is put at each end of a stretch while Markdown is read. Where it would change what
    Markdown makes of the text, or the text holds it already, the text comes back unmarked.
    """
    plain = pieces_of(text)
    if not segments or _SIGN in text or len(text) > MAX_MARKDOWN:
        return plain
    ends: list[tuple[int, Segment | None]] = []
    for segment in segments:
        start = _BLOCK_START.match(text, segment.start, segment.end)
        ends += [(start.end() if start else segment.start, segment), (segment.end, None)]
    parts, position = [], 0
    for end, _ in ends:
        parts.append(text[position:end])
        position = end
    signed = pieces_of(_SIGN.join([*parts, text[position:]]))
    marked = _read_signs(signed, [segment for _, segment in ends])
    return marked if marked is not None and _merged(marked) == _merged(plain) else plain


def _read_signs(pieces: list[Piece], states: Sequence[Segment | None]) -> list[Piece] | None:
    """Return the pieces without signs, marked by the state that each sign begins; None if signs were lost."""
    marked: list[Piece] = []
    here: Segment | None = None
    labels: tuple[str, ...] = ()  # that wait for the first text of their stretch
    number = 0
    for piece in pieces:
        if piece.kind != "text":
            style = " ".join(here.kinds) if here and piece.kind in _FORMULAS else piece.style
            text, item = piece.text.replace(_SIGN, ""), piece.number.replace(_SIGN, "")
            marked.append(replace(piece, text=text, number=item, style=style))
        for place, part in enumerate(piece.text.split(_SIGN)):
            if place:
                if number == len(states):
                    return None
                here = states[number]
                labels = here.begins if here else ()
                number += 1
            if piece.kind == "text" and part and here:
                label = " · ".join(LABELS[kind] for kind in labels)
                marked.append(Piece("mark", part, " ".join(here.kinds), label))
                labels = ()
            elif piece.kind == "text" and part:
                marked.append(Piece("text", part))
    return marked if number == len(states) else None


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces with neighbouring texts as one, marked or not."""
    merged: list[Piece] = []
    for piece in pieces:
        if piece.kind in _FORMULAS:
            merged.append(replace(piece, style=""))
        elif piece.kind not in ("text", "mark"):
            merged.append(piece)
        elif merged and merged[-1].kind == "text":
            merged[-1] = Piece("text", merged[-1].text + piece.text)
        elif piece.text:
            merged.append(Piece("text", piece.text))
    return merged


def _pieces(tokens: list[Token]) -> Iterator[Piece]:
    for token in tokens:
        if token.hidden:
            continue
        name = token.type.removesuffix("_open").removesuffix("_close")
        if token.type == "inline":
            yield from _pieces(token.children or [])
        elif name == "heading":
            yield Piece("open", "p", "heading") if token.nesting > 0 else Piece("close", "p")
        elif token.nesting > 0:
            yield Piece("open", _TAGS_OF[name], number=token.info if name == "list_item" else "")
        elif token.nesting < 0:
            yield Piece("close", _TAGS_OF[name])
        elif name in ("softbreak", "hardbreak"):
            yield Piece("break")
        elif name == "hr":
            yield Piece("rule")
        elif name == "code_inline":
            yield Piece("code", token.content)
        elif name == "fence":
            yield Piece("block", f"{token.info}\n{token.content}" if token.info else token.content)
        elif token.content:
            yield Piece(token.type if token.type in ("tag", "tex", "tex display") else "text", token.content)


# -- rules of our own ----------------------------------------------------------------------------


def _formula(state: StateInline, silent: bool) -> bool:
    """Read a formula; a text has at most MAX_FORMULAS of them, which also bounds the search for their ends."""
    if state.src[state.pos] not in "$\\":
        return False
    state.env["tried"] = tried = state.env.get("tried", 0) + 1
    formula = formula_at(state.src, state.pos) if tried <= 2 * MAX_FORMULAS else None
    if formula is None:
        return False
    end, source, is_display = formula
    if not silent:
        state.push("tex display" if is_display else "tex", "", 0).content = source
    state.pos = end
    return True


def _formula_block(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    """Read a formula on lines of its own, in which a leading minus begins no list."""
    start = state.bMarks[first] + state.tShift[first]
    formula = formula_at(state.src, start) if state.src.startswith(("$$", "\\["), start) else None
    if formula is None or not formula[2]:
        return False
    line = next((line for line in range(first, last) if state.eMarks[line] >= formula[0]), None)
    if line is None or state.src[formula[0] : state.eMarks[line]].strip():
        return False
    if not silent:
        state.push("tex display", "", 0).content = formula[1]
        state.line = line + 1
    return True


def _tag(state: StateInline, silent: bool) -> bool:
    """Read a tag of the response template."""
    tag = TAGS.match(state.src, state.pos)
    if tag is None:
        return False
    if not silent:
        state.push("tag", "", 0).content = tag.group()
    state.pos = tag.end()
    return True


def _bold(state: StateInline, silent: bool) -> bool:
    """Read the two stars before or after a bold text. Those within a word stay: `2**3` is a power."""
    start = state.pos
    if silent or state.src[start] != "*" or state.src[start - 1 : start] == "*":
        return False
    scanned = state.scanDelims(start, False)
    if scanned.length != 2:
        return False
    for _ in range(2):
        state.push("text", "", 0).content = "*"
        place = len(state.tokens) - 1
        state.delimiters.append(Delimiter(ord("*"), 2, place, -1, scanned.can_open, scanned.can_close))
    state.pos += 2
    return True


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark").disable([*_TEXT_RULES, *_ODD_RULES])
    parser.inline.ruler.at("emphasis", _bold)
    parser.inline.ruler.before("backticks", "formula", _formula)
    parser.inline.ruler.before("formula", "tag", _tag)
    parser.block.ruler.before("fence", "formula", _formula_block, {"alt": ["paragraph", "blockquote", "list"]})
    return parser


_PARSER = _parser()
