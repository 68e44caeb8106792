"""Refuse a tokenizer that makes a short text so long that memory ends, which aborts the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.json_object import read_object

_MOST = 64  # times the characters of a text; published tokenizers put one character in the place of one


def check_growth(file: Path) -> None:
    """Raise UserError where the replacements of a tokenizer.json, one after the other, multiply a text's length."""
    try:
        tree = read_object(file.read_bytes())
        grown = {part: _growth(tree.get(part)) for part in ("normalizer", "decoder")}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model.path: {file} cannot be read: {error}") from None
    for part, factor in grown.items():
        if factor > _MOST:
            raise UserError(
                f"model.path: {file}: its {part} makes a text up to {factor:.3g} times as long: "
                "use a different tokenizer"
            )


def _growth(part: Any) -> float:
    """Return by how much a normalizer or a decoder may multiply the characters of a text."""
    if not isinstance(part, dict):
        return 1.0
    factor = 1.0
    for key in ("normalizers", "decoders"):
        for step in part[key] if isinstance(part.get(key), list) else []:
            factor *= _growth(step)
    if part.get("type") == "Replace" and isinstance(part.get("pattern"), dict):
        literal = part["pattern"].get("String")
        # A regular expression may match a single character, or the empty place between two.
        shortest = len(literal) if isinstance(literal, str) and literal else 1
        added = 0 if isinstance(literal, str) and literal else 1
        factor *= max(1.0, len(str(part.get("content", ""))) / shortest + added)
    return factor
