r"""Read a gold answer: its text without wrapping, its type, and the options it chooses among.

Preparation and the benchmarks' readers share these functions, so that both see one answer in one gold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlm_rl.templates import boxes
from vlm_rl.types import AnswerType

LETTERS = "ABCDEFGHIJ"

_LETTER = re.compile(r"\(?([A-J])\)?\.?")
_INTEGER = re.compile(r"[-−+]?(\d+|\d{1,3}(,\d{3})+)")
_FLOAT = re.compile(r"[-−+]?(\d*\.\d+|\d{1,3}(,\d{3})+\.\d+)")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_WORD = re.compile(r"[^\W\d_]{2,}")
_TIME_OF_DAY = re.compile(r"\d{1,2}(:\d{2}){0,2} ?(?i:[ap]\.? ?m\.?)")
_OR = re.compile(
    r",? (?:and|or) |,? ?\\(?:text|mathrm|mbox) ?\{ ?(?:and|or) ?\} ?|\\(?:lor|vee)(?![A-Za-z])"
    r"|(?<=[\d)}]) ?or ?(?=[-+\d(\\]|[a-z] ?=)"  # 2or3
    r"|(?<=[\dA-Za-z)}\]]) ?(?:或者?|或是|以及|并且|[和与及且]) ?(?=[-\dA-Za-z(\\√±])"
)
# The separators in 3,\!250, 3{,}250 and 1,234 cm; a comma alone counts only if all groups have three digits.
_CHINESE_MARKS = str.maketrans("，、；（）", ",,;()")
_THOUSANDS = re.compile(r"(?<=\d)\s*(?:,\s*(?:\\!\s*)+|(?:\\!\s*)+,|\{,\}\s*(?:\\!\s*)*)\s*(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\w^.,])(?<!, )[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "max", "min", "lim"}
# An option's label: "(A)" anywhere, or "A." "A:" "A)" at the start of a word.
_LABELS = (
    re.compile(r"\(([A-J])\)"),
    re.compile(r"(?:^|(?<=[\s;；/,]))([A-J])\s*[.．:：)、]"),
)


def unwrap_gold(answer: str) -> str | None:
    r"""Return the gold inside one `\boxed{}` and inside dollar signs; None if its braces or boxes do not close.

    A form feed followed by "rac" is a `\frac` whose backslash was read as an escape.
    """
    text = answer.replace("\x0crac", r"\frac").strip()
    contents = boxes(text)
    if contents is None or len(contents) > 1:
        return None
    if contents:
        text = contents[0].strip()
    while len(text) > 2 and text[0] == "$" == text[-1] and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    return text


def plain_number(value: float | str) -> str:
    """Return a number as people write it: 27.0 is "27", "073" is "73". A text that is not a whole number stays."""
    if isinstance(value, str):
        return str(int(value)) if re.fullmatch(r"-?\d{1,4000}", value) else value  # int() takes 4,300 digits
    return str(int(value)) if value == int(value) else repr(value)


def infer_answer_type(answer: str) -> AnswerType:
    """Return the type of an unwrapped gold, from its form alone.

    One letter A to J is a choice. Mathematics between commas, "or" or "and", without brackets, is a list. Words and
    times of day are text. Everything else that is not a plain number is an expression, units and percentages too.
    """
    text = _THOUSANDS.sub("", answer.strip().translate(_CHINESE_MARKS))
    if _LETTER.fullmatch(text):
        return "choice"
    if _INTEGER.fullmatch(text):
        return "integer"
    if _FLOAT.fullmatch(text):
        return "float"
    plain = _TEXT_COMMAND.sub(r"\1", text)
    if _is_words(plain) or _TIME_OF_DAY.fullmatch(plain):
        return "text"
    text = _GROUPED.sub(lambda number: number[0].replace(",", ""), text)
    parts = split_list(_OR.sub(", ", text).replace(";", ","))
    if len(parts) > 1 and not any(_is_words(part) for part in parts):
        return "list"
    return "expression"


def split_list(text: str) -> list[str]:
    """Split a text at the commas that no bracket encloses; one part where there is no such comma."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0 and not text[:index].endswith("\\"):  # "\," is a thin space
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def parse_choices(question: str) -> tuple[str, ...]:
    """Return the options written into a question, A first; () unless at least two follow in order.

    An option ends where the next begins; the last one ends with its line.
    """
    best: tuple[str, ...] = ()
    for label in _LABELS:
        marks = list(label.finditer(question))
        for first in (index for index, mark in enumerate(marks) if mark[1] == "A"):
            options = _options_from(question, marks[first:])
            if len(options) >= max(2, len(best)):
                best = options
    return best


def with_choices(question: str, choices: Sequence[str]) -> str:
    """Return the question followed by its options, one a line."""
    lines = [f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, "Choices:", *lines])


def _options_from(question: str, marks: Sequence[re.Match[str]]) -> tuple[str, ...]:
    """Return the options A, B, C, ... from the first mark on; () if one of them is empty."""
    run = []
    for mark in marks:
        if len(run) == len(LETTERS) or mark[1] != LETTERS[len(run)]:
            break
        run.append(mark)
    ends = [mark.start() for mark in run[1:]] + [_line_end(question, run[-1].end())]
    texts = [question[mark.end() : end].strip(" \t\r\n;；/,") for mark, end in zip(run, ends, strict=True)]
    return tuple(texts) if all(texts) else ()


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _is_words(text: str) -> bool:
    """Say whether this is language, not mathematics: it starts with a letter and has a real word."""
    if not text[:1].isalpha() or re.search(r"[\\^_=+*{}<>|]", text):
        return False
    return any(word.lower() not in _FUNCTIONS for word in _WORD.findall(text))
