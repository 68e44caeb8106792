"""MathVista (AI4Math/MathVista, CC BY-SA 4.0): by task, skill, source, question and answer type.

The published rule: a judge model extracts; the extraction is normalised (a letter becomes its option, other
text the option with the smallest edit distance, numbers are truncated or rounded to the stated precision)
and must equal the gold's text. An empty extraction thus gets the shortest option, right or not: such rows
are marked as free points and counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.extraction import final_answer, final_letters
from vlm_rl.evaluation.benchmarks.fields import object_field, required, text_field, texts_field
from vlm_rl.evaluation.benchmarks.items import Answer, Judgement, Question
from vlm_rl.types import AnswerType

_FACETS = ("question_type", "answer_type", "language", "source", "category", "task", "context", "grade", "skills")
_TYPES: dict[str, AnswerType] = {"text": "text", "integer": "integer", "float": "float", "list": "list"}
_LETTER = re.compile(r"\(([a-zA-Z])\)")
_QUOTED = re.compile(r'The answer is "(.*)"\.')
_MAX_EDIT = 2_000  # characters of an extraction whose edit distance is worked out


def read_question(row: Mapping[str, Any], where: str) -> Question:
    kind, choices = str(required(row, "answer_type", where)), texts_field(row, "choices", where)
    if kind not in _TYPES:
        raise UserError(f"{where}: answer_type is {kind!r}; known: {', '.join(_TYPES)}")
    is_choice = required(row, "question_type", where) == "multi_choice"
    if is_choice and not choices:
        raise UserError(f"{where}: question_type is multi_choice, and there are no choices")
    flat = {**row, **object_field(row, "metadata", where)}
    return Question(
        id=text_field(row, "pid", where),
        gold=str(required(row, "answer", where)),
        answer_type="choice" if is_choice else _TYPES[kind],
        choices=choices if is_choice else (),
        meta={
            **_precision(row, where),
            **({"unit": row["unit"]} if row.get("unit") else {}),
        },
        facets={name: _values(flat.get(name)) for name in _FACETS if flat.get(name) is not None},
    )


def _precision(row: Mapping[str, Any], where: str) -> dict[str, int]:
    """The decimals of a float gold, which one of the two publications stores as 1.0; {} where none is stated."""
    stated = row.get("precision")
    if stated in (None, ""):
        return {}
    try:
        return {"precision": int(float(stated))}
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{where}: precision must be a whole number, not {stated!r:.40}") from None


def judge(question: Question, answer: Answer) -> Judgement:
    """The published normaliser on the shipped extraction, or on one made by rules where none is shipped."""
    shipped = answer.extraction is not None
    extraction = answer.extraction if answer.extraction is not None else extract(question, answer.text)
    normal = normalise(question, extraction)
    right = normal == question.gold
    how = "shipped extraction" if shipped else "extraction by rules"
    empty = question.answer_type == "choice" and not extraction.strip()
    note = "free point" if right and empty else ""
    return Judgement(
        "correct" if right else "wrong", extraction, f"{how} {extraction!r:.60} is read as {normal!r:.60}", note
    )


def extract(question: Question, response: str) -> str:
    """The extraction script's own shortcuts, then rules where it would ask a judge model."""
    text = response.strip()
    if not text or text in question.choices:
        return text
    if question.answer_type in ("integer", "float"):
        try:
            number = float(text)
            return text if question.answer_type == "integer" and text.isdigit() else str(number)
        except ValueError:
            pass
    if quoted := _QUOTED.search(text):
        return quoted[1]
    if question.answer_type == "choice":
        letters = final_letters(text)
        return letters[0] if len(letters) == 1 else final_answer(text)
    answer = final_answer(text)
    if question.answer_type in ("integer", "float"):
        numbers = re.findall(r"[-−]?\d+(?:\.\d+)?", answer.replace(",", ""))
        return numbers[-1].replace("−", "-") if numbers else ""
    return answer


def normalise(question: Question, extraction: str) -> str | None:
    """The published normaliser; None where it gives up, which is no gold."""
    if question.answer_type == "choice":
        return _as_choice(question.choices, extraction.strip())
    try:
        if question.answer_type == "integer":
            return str(int(float(extraction)))
        if question.answer_type == "float":
            return str(round(float(extraction), question.meta.get("precision")))
    except (ValueError, OverflowError):
        return None
    return extraction


def _as_choice(choices: Sequence[str], extraction: str) -> str:
    if letter := _LETTER.search(extraction):
        extraction = letter[1].upper()
    place = ord(extraction) - ord("A") if len(extraction) == 1 else -1
    if 0 <= place < len(choices):
        return choices[place]
    cut = extraction[:_MAX_EDIT]
    return min(choices, key=lambda choice: edit_distance(cut, choice))  # the first of the nearest


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: the fewest insertions, deletions and replacements that turn `a` into `b`."""
    previous = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        current = [i]
        for j, right in enumerate(b, start=1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (left != right)))
        previous = current
    return previous[-1]


def _values(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)
