"""Reading one annotated row: what must be there, and what kind of answer a gold is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.templates import boxes
from vlm_rl.types import AnswerType

_INTEGER = re.compile(r"[-−+]?(\d+|\d{1,3}(,\d{3})+)")
_DECIMAL = re.compile(r"[-−+]?\d*\.\d+")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_OPTION = re.compile(r"(?:^|(?<=[\s;；/,]))\(?([A-J])\s*[.．:：)、]")


def required(row: Mapping[str, Any], key: str, where: str) -> Any:
    """The row's value. Raises UserError naming the place where it is missing."""
    value = row.get(key)
    if value is None or value == "":
        raise UserError(f"{where}: no {key!r}; the row has {sorted(map(str, row))[:12]}")
    return value


def text_field(row: Mapping[str, Any], key: str, where: str) -> str:
    value = required(row, key, where)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise UserError(f"{where}: {key} must be text or a whole number, not {type(value).__name__} {value!r:.40}")
    return str(value)


def texts_field(row: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """The texts of a list; () where there is none. Raises UserError for anything else: a table's text of a list."""
    value = row.get(key)
    if value is not None and not isinstance(value, list | tuple):
        raise UserError(f"{where}: {key} must be a list, not {type(value).__name__} {value!r:.60}")
    return tuple(map(str, value or ()))


def object_field(row: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The row's object; empty where there is none. Raises UserError for anything else."""
    value = row.get(key) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: {key} must be an object, not {type(value).__name__} {value!r:.60}")
    return value


def number_text(value: Any) -> str:
    """A gold that a table stores as a number, as people write it: 27.0 is 27, "073" is 73."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    return str(int(text)) if re.fullmatch(r"0\d+", text) else text


def type_of_gold(gold: str) -> AnswerType:
    """integer, float, text or expression, from the form of an open question's gold."""
    text = unwrapped(gold)
    if _INTEGER.fullmatch(text):
        return "integer"
    if _DECIMAL.fullmatch(text):
        return "float"
    return "text" if _WORDS.fullmatch(text) else "expression"


def unwrapped(gold: str) -> str:
    """The gold without one box and one pair of dollar signs around it."""
    text = gold.replace("\x0crac", r"\frac").strip()
    found = boxes(text)
    if found:
        text = found[-1].strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    return text


def options_in(text: str) -> tuple[str, ...]:
    """The options A, B, C, ... written into a text, in order; () if there are fewer than two."""
    marks: list[re.Match[str]] = []
    for mark in _OPTION.finditer(text):
        if ord(mark[1]) - ord("A") == len(marks):
            marks.append(mark)
    if len(marks) < 2:
        return ()
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    found = tuple(text[mark.end() : end].strip(" \t\r\n;；/,") for mark, end in zip(marks, ends, strict=True))
    return found if all(found) else ()
