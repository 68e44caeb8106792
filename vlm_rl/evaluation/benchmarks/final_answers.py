"""Find by rules what a judge model would be asked for: the letter of a response, or its final value.

Used where a benchmark's published rule needs such a model. The result is called emulated, because a different
extractor finds different answers in the same text.
"""

from __future__ import annotations

import re

from vlm_rl.templates import END_THINK, boxes

_TAIL = 2_000  # characters from the end in which a closing phrase is looked for
_CLOSING = re.compile(
    r"(?i)\b(?:final |correct |right )?(?:answer|option|choice)s?\b(?: is| are|:| =|\*\*:)+\s*([^\n]*)"
)
_NOT = r"(?!\s+(?:is|are)(?:\s+not\b|n't\b))"
_LETTER = r"[(\[*]*[A-I](?![A-Za-z'])[)\]*.:]*"
_LETTERS = re.compile(
    r"(?![AI]\s+(?!and\b)[a-z])"  # "A circle" and "I am" name none
    rf"(?>{_LETTER}(?:\s*(?:,|and|&)\s*{_LETTER})*){_NOT}"
)
_ONE_LETTER = re.compile(r"(?<![A-Za-z])([A-I])(?![A-Za-z'])")
_MARKED = re.compile(rf"\(([A-I])\){_NOT}")
_OPENING = re.compile(rf"\W*([A-I])\s?[).:](?![\w.]){_NOT}")
_OPTION_LINE = re.compile(r"(?m)^\W*([A-I])\s?[).:](?![\w.])")
_LAST_WORD = re.compile(r"(?:\b(?i:is|be|option|choice|answer) )([A-I])\W*$")


def final_answer(response: str) -> str:
    """Return the last box after the reasoning, else what follows the last closing phrase, else the last line."""
    text = response.rpartition(END_THINK)[2].strip()
    contents = [box.strip() for box in boxes(text) or [] if box.strip()]
    if contents:
        return contents[-1]
    closing = list(_CLOSING.finditer(text[-_TAIL:]))
    line = closing[-1][1] if closing else text[-_TAIL:].rpartition("\n")[2]
    return line.strip().strip("*$").rstrip(".").strip()


def final_letters(response: str) -> tuple[str, ...]:
    """Return the option letters A to I that a response names in the end, sorted; () if it names none clearly.

    The final answer begins with them. Else a letter is the last word ("would be B."), or the only one in brackets, or
    the response opens with it ("C) ... is correct.") and no other line begins with another option's letter.
    """
    if match := _LETTERS.match(final_answer(response)):
        return tuple(sorted(set(_ONE_LETTER.findall(match[0]))))
    text = response.rpartition(END_THINK)[2].strip()
    if match := _LAST_WORD.search(text):
        return (match[1],)
    marked = set(_MARKED.findall(text))
    if len(marked) != 1 and _OPENING.match(text):
        marked = set(_OPTION_LINE.findall(text))
    return tuple(marked) if len(marked) == 1 else ()
