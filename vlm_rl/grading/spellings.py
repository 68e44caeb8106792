r"""Spell a number in other ways: `3,\!250` as 3250 and 3,250.

Data preparation grades these spellings against the gold, since a gold that accepts itself may still be misread. The
rules here share nothing with those of the grader, or both would make the same mistakes.
"""

from __future__ import annotations

import re

from vlm_rl.types import AnswerType

_SEPARATED = re.compile(r"(-?)([1-9]\d{0,2}(?:(?:\\!\s*)*(?:,|\{,\}|\\,)\s*(?:\\!\s*)*\d{3})+)(\.\d+)?")
_DECIMAL_COMMA = re.compile(r"(-?\d+)\{,\}(\d{1,2}|\d{4,})")  # {,} sets a comma that separates nothing
_PLAIN = re.compile(r"(-?)(\d{1,15})(\.\d+)?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d{1,9})\}\{(\d{1,9})\}|(-?)(\d{1,9}) ?/ ?(\d{1,9})")
_MIXED = re.compile(r"(\d{1,6}) ?\\[dt]?frac\{(\d{1,4})\}\{(\d{1,4})\}")


def other_spellings(gold: str, answer_type: AnswerType) -> list[str]:
    """Return other spellings of a gold that is a number, none of which the gold may refuse; [] for any other gold."""
    text = gold.strip().strip("$").strip()
    if answer_type in ("choice", "text") or (answer_type == "list" and not re.search(r"[\\{]", text)):
        return []  # 100,200 of a list may be two numbers
    if match := _DECIMAL_COMMA.fullmatch(text):
        return [f"{match[1]}.{match[2]}"]
    if match := _SEPARATED.fullmatch(text) or _PLAIN.fullmatch(text):
        digits = re.sub(r"\D", "", match[2])
        return [f"{match[1]}{number}{match[3] or ''}" for number in (digits, f"{int(digits):,}")]
    if match := _FRACTION.fullmatch(text):
        sign, above, below = match.groups()[:3] if match[2] else match.groups()[3:]
        return [f"{sign}{above}/{below}", rf"{sign}\dfrac{{{above}}}{{{below}}}"]
    if match := _MIXED.fullmatch(text):
        whole, above, below = map(int, match.groups())
        return [f"{whole * below + above}/{below}"]
    return []
