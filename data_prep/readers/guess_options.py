"""Guess which columns hold the options, and how the answers name them; where two readings fit, ask."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vlm_rl.data.golds import LETTERS, parse_choices
from vlm_rl.data_prep.readers.cells import answer_of, cell, question_of
from vlm_rl.data_prep.readers.option_cells import (
    FIRST_NUMBER,
    OPTION_COLUMN,
    RowOptions,
    counts_from,
    index_of_text,
    letter_of,
    options_of,
)
from vlm_rl.data_prep.readers.row_golds import answers_in, text_of_answer
from vlm_rl.data_prep.readers.sample import Names, Sample, best, message, several
from vlm_rl.data_prep.readers.written_values import unwritten
from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError

CHOICES: Names = (
    ("choices", "options"),
    ("choices.text", "options.text"),
    ("answer_choices", "answer_options", "option", "choice", "opts", "option_list", "choice_list", "mc_choices"),
)
NO_CHOICES = "none"  # as --choices says it

Answer = tuple[str, RowOptions]


def guess_choices(sample: Sample, where: str) -> list[str]:
    """Return the columns of the options: one, or one for each option; [] if there are none.

    Raises UserError for two that fit, and for a column of this name whose form cannot be read.
    """
    columns = best(CHOICES, lambda values: any(map(_are_options, values)), sample)
    if len(columns) > 1:
        raise UserError(several("choices", columns, sample, where))
    columns = columns or _one_each(sample)
    if not columns and (odd := best(CHOICES, lambda values: any(map(_might_list, values)), sample)):
        fault = _fault(sample.columns[odd[0]])
        said = f"{odd[0]!r} looks like the options, but cannot be read: {fault}"
        raise UserError(message(where, sample, f"{said}. If it holds none: --choices {NO_CHOICES}"))
    return columns


def check_no_options(sample: Sample, question: str, answer: str, images: Sequence[str], where: str) -> None:
    """Raise UserError if all answers are letters, and a column that nothing reads has a list with room for each.

    Args:
        sample: the first rows; no column of options was found in them.
        question, answer, images: the columns that are read.
        where: the table, for the message.
    """
    answers = [_answer(row, answer) for row in sample.rows]
    letters = [text.strip("(). ") if isinstance(text, str) else "" for text in answers]
    if not letters or any(len(letter) != 1 or letter not in LETTERS for letter in letters):
        return
    if any(_lists_options(row, question) for row in sample.rows):
        return
    for column in sample.columns:
        lists = [unwritten(cell(row, column)) for row in sample.rows]
        has_room = all(
            isinstance(texts, list | dict) and len(texts) > max(1, LETTERS.index(letter)) and _are_options(texts)
            for texts, letter in zip(lists, letters, strict=True)
        )
        if has_room and column not in (question, answer, *images):
            said = f"the answers are letters, and {column!r} may hold their options. If it does: --choices {column}"
            raise UserError(message(where, sample, f"{said}, else --choices {NO_CHOICES}"))


def _lists_options(row: dict[str, Any], question: str) -> bool:
    try:
        return bool(parse_choices(str(question_of(row, question))))
    except RowError:
        return False


def _one_each(sample: Sample) -> list[str]:
    """Return the columns that each hold an option, by their letters or numbers: A, B; option1, option2; opa, opb."""
    for columns in ([*LETTERS], [*LETTERS.lower()]):  # VLMEvalKit's tables have the first
        there = [column for column in columns if column in sample.columns]
        if there[:2] == columns[:2] and (columns[0] == "A" or there[:3] == columns[:3]) and sample.columns[there[0]]:
            return there
    groups: dict[str, dict[str, str]] = {}
    for column in sample.columns:
        if match := OPTION_COLUMN.fullmatch(column):
            groups.setdefault(match[1].casefold(), {})[match[2].casefold()] = column
    for labels in groups.values():
        first = next((label for label in ("a", "0", "1") if label in labels), "")
        if len(labels) > 1 and first and any(sample.columns[column] for column in labels.values()):
            return [labels[label] for label in sorted(labels, key=lambda label: (len(label), label))]
    return []


def _are_options(value: Any) -> bool:
    """Tell whether a value has a form of options. A broken list written as text has: its row is reported later."""
    try:
        return bool(options_of({"options": value}, ["options"]).texts)
    except RowError:
        return isinstance(value, str) and value.lstrip().startswith("[")


def _might_list(value: Any) -> bool:
    """Say whether a value of a form that is not read might still hold options; one word is an answer."""
    return not isinstance(value, str) or re.search(r"[\s,/]", value.strip()) is not None


def _fault(values: Sequence[Any]) -> str:
    try:
        options_of({"options": values[0]}, ["options"])
    except RowError as error:
        return str(error)
    return f"it is {values[0]!r:.60}"


# -- how answers name them -------------------------------------------------------------------------


def guess_answer_form(sample: Sample, column: str, choices: list[str], where: str) -> Any:
    """Return the form of the answers: a value of GenericSet.answer_form.

    Raises UserError naming the forms where two of them fit and give different golds.
    """
    raw = [answer for row in sample.rows if (answer := _answer(row, column)) is not None]
    _check_lists(raw, sample, column, where)
    texts = [answer for answer in raw if isinstance(answer, str)]
    if raw and len(texts) == len(raw):
        if all("</answer>" in text for text in texts):
            return "tag"
        if all("####" in text for text in texts):
            return "hashes"
        if all(r"\boxed" in text for text in texts) and any(
            not text.lstrip(" $").startswith(r"\boxed") for text in texts
        ):
            return "box"
    answers = _with_options(sample, column, choices)
    if not answers:
        return "plain"
    named, same = (_read(answers, form) for form in ("plain", "option_text"))
    if None not in named and None not in same and named != same:
        raise UserError(
            _ask(("plain", "option_text"), "are both the letters and the texts of options", sample, column, where)
        )
    if all(text in options.labels for text, options in answers):
        return "plain"
    is_text = [_is_text(text, options) for text, options in answers]
    counts = [form for form, first in FIRST_NUMBER.items() if counts_from(answers, first)]
    if all(is_text):
        others = [form for form in counts if _read(answers, form) != same]
        if others:  # options 2, 3, 1 with the answers 2, 3, 1
            said = "are the texts of options, and could be the numbers of options too"
            raise UserError(_ask(("option_text", *others), said, sample, column, where))
        return "option_text"
    if len(counts) > 1:
        raise UserError(_ask(counts, "could be counted from 0 or from 1", sample, column, where))
    if counts:
        return counts[0]
    return "option_text" if 2 * sum(is_text) > len(answers) else "plain"


def _answer(row: dict[str, Any], column: str) -> Any:
    try:
        answer = answer_of(row, column)
    except RowError:
        return None
    return None if answer == "" else answer


def _check_lists(answers: Sequence[Any], sample: Sample, column: str, where: str) -> None:
    """Raise UserError if a list has different answers: any one may be right, or all together."""
    for answer in answers:
        items = answers_in(answer)
        if items is not None and len(set(map(str, items))) > 1:
            said = f"are lists such as {items!r:.60}: any one of them is right, or all together are the answer"
            raise UserError(_ask(("any_of", "all_of"), said, sample, column, where))


def _with_options(sample: Sample, column: str, choices: list[str]) -> list[Answer]:
    """Return the answers of the rows that have options."""
    answers: list[Answer] = []
    for row in sample.rows:
        try:
            answer, options = _answer(row, column), options_of(row, choices)
            items = answers_in(answer)
            if answer is not None and options.texts and not isinstance(answer, bool):
                answers.append((text_of_answer(items[0] if items else answer), options))
        except RowError:
            continue
    return answers


def _read(answers: Sequence[Answer], form: str) -> list[str | None]:
    read: list[str | None] = []
    for text, options in answers:
        try:
            read.append(letter_of(text, options, form))
        except RowError:
            read.append(None)
    return read


def _is_text(text: str, options: RowOptions) -> bool:
    try:
        return index_of_text(text, options) is not None
    except RowError:
        return False


def _ask(forms: Sequence[str], said: str, sample: Sample, column: str, where: str) -> str:
    choice = " or ".join(f"--answer-form {form}" for form in forms)
    return message(where, sample, f"the answers in {column!r} {said}: choose {choice} (answer_form in a YAML file)")
