"""Refuse a tokenizer that makes a short text so long that memory ends, which aborts the process."""

from __future__ import annotations

import base64
import math
import struct
from pathlib import Path
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.untrusted.json_object import read_object

_MOST = 64  # times the characters of a text; published tokenizers put one character in the place of one
_MOST_TOGETHER = 128  # of the parts that encode; XLM-R's come to 72, since Unicode has a character for 18 others
_ENCODING = ("normalizer", "pre_tokenizer", "model")  # one after the other
_STEPS = ("normalizers", "pretokenizers", "processors", "decoders")  # of a part that is a sequence of others
_BYTES = 4  # of a character in UTF-8, each of which becomes a character of its own


def check_growth(file: Path) -> None:
    """Raise UserError if the parts of a tokenizer.json, one after the other, multiply a text's length."""
    try:
        tree = read_object(file.read_bytes())
        parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
        grown = {part: _growth(tree.get(part)) for part in parts}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model.path: {file} cannot be read: {error}") from None
    for part, factor in grown.items():
        if factor > _MOST:
            raise UserError(
                f"model.path: {file}: its {part} makes a text up to {factor:.3g} times as long: "
                "use a different tokenizer"
            )
    if (factor := math.prod(grown[part] for part in _ENCODING)) > _MOST_TOGETHER:
        raise UserError(
            f"model.path: {file}: its {', '.join(_ENCODING)} together make a text up to {factor:.3g} times as long: "
            "use a different tokenizer"
        )


def _growth(part: Any) -> float:
    """Return by how much a part of a tokenizer may multiply the characters or tokens of a text of one character."""
    if not isinstance(part, dict):
        return 1.0
    factor = 1.0
    for key in _STEPS:
        for step in part[key] if isinstance(part.get(key), list) else []:
            factor *= _growth(step)
    match part.get("type"):
        case "Replace" if isinstance(part.get("pattern"), dict):
            literal = part["pattern"].get("String")
            # A regular expression may match a single character, or the empty place between two.
            shortest = len(literal) if isinstance(literal, str) and literal else 1
            added = 0 if isinstance(literal, str) and literal else 1
            factor *= max(1.0, len(str(part.get("content", ""))) / shortest + added)
        case "Prepend":
            factor *= 1 + len(str(part.get("prepend", "")))
        case "Metaspace":  # one more character for each piece, and a piece may be a character
            factor *= 2
        case "ByteLevel":
            factor *= _BYTES + bool(part.get("add_prefix_space"))
        case "Precompiled":
            factor *= max(1, _longest_mapped(part.get("precompiled_charsmap")))
        case "TemplateProcessing":
            factor *= max(_template_growth(part, form) for form in ("single", "pair"))
        case _:  # a model's marks are put at each character that it looks up
            marks = ("continuing_subword_prefix", "end_of_word_suffix", "prefix", "suffix")
            factor *= max([1, *(len(mark) for name in marks if isinstance(mark := part.get(name), str))])
    return factor


def _longest_mapped(table: Any) -> int:
    """Return how many characters the longest text has that SentencePiece's table puts in the place of another.

    The table is a trie behind its size, and then the texts, each of which a zero ends. Raises ValueError for others.
    """
    if not isinstance(table, str):
        return 1
    data = base64.b64decode(table)
    if len(data) < 4:
        return 1
    (size,) = struct.unpack("<I", data[:4])
    return max(len(text.decode(errors="replace")) for text in data[4 + size :].split(b"\0"))


def _template_growth(part: dict[str, Any], form: str) -> int:
    """Return the tokens that a template makes of a single one."""
    special = part.get("special_tokens")
    count = 0
    for piece in part[form] if isinstance(part.get(form), list) else []:
        named = piece.get("SpecialToken") if isinstance(piece, dict) else None
        token = special.get(named.get("id")) if isinstance(special, dict) and isinstance(named, dict) else None
        ids = token.get("ids") if isinstance(token, dict) else None
        count += len(ids) if isinstance(ids, list) else 1
    return max(1, count)
