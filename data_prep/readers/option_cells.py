"""Read a row's options in their usual forms, and make its gold the letter of one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_rl.data.golds import LETTERS
from vlm_rl.data_prep.readers.cells import cell
from vlm_rl.data_prep.readers.image_files import by_number
from vlm_rl.data_prep.readers.written_values import is_missing, is_written, parse_written, plain_text
from vlm_rl.data_prep.records import Fields, RowError

# The forms of an answer that is the number of its option, with the number of the first.
FIRST_NUMBER: Mapping[str, int] = {"option_number": 0, "option_number_from_1": 1}
# A column for each option: option1, option_a, Choice B, opa, ending0, answerA.
OPTION_COLUMN = re.compile(
    r"(?i)((?:.*\.)?(?:(?:option|choice|opt|ending|sol|op)s?[-_ ]?(?=[a-j]$|\d{1,2}$)"
    r"|(?:answer|ans)[-_ ]?(?=[a-j]$)))"  # answer1 and answer2 may be of two annotators
    r"([a-j]|\d{1,2})"
)

_LABEL_KEYS = ("label", "key", "letter", "id", "index", "option_label")
_TEXT_KEYS = ("text", "value", "content", "option", "choice", "answer", "option_text")
# Labels in a text that lists options, the most specific first: (A)  A.  a)  1.
_MARKS = tuple(
    re.compile(pattern, re.M)
    for pattern in (
        r"(?:^|(?<=[\s;；,，|/]))[(（]([A-Za-z]|\d{1,2})[)）][.:]?",
        r"(?:^|(?<=[\s;；,，|/]))(?:([A-Za-z])[.:)．：）、]|(\d{1,2})(?:[.)](?=\s)|[．）、]))",
    )
)
_SEPARATORS = ("\n", ";", "；", "||", "|", "\t")
_LETTER = re.compile(r"[(（\[]?([A-J])[)）\]]?[.:]?")
_LOOSE_LETTER = re.compile(
    r"(?i)(?:the )?(?:correct )?(?:answer|option|choice)?(?: is)?[\s_-]*:?\s*[(（\[]?([a-z])[)）\]]?[.:]?"
)
_LETTER_AND_TEXT = re.compile(
    r"(?is)(?:(?:answer|option|choice)\s*:?\s*)?(?:[(（\[]([a-z])[)）\]][.:]?\s*|([a-z])\s*[.:)．：）、]\s*|([a-z])\s+[-–—]?\s*)(.+)"
)
_LETTERS_LIST = re.compile(r"[A-J](?:(?:\s*[,;&、]\s*(?:and )?|\s+and\s+|\s*)[A-J])+")


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The options of a row."""

    texts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # what the data calls each; () where it has no names for them


def options_of(row: Fields, columns: list[str]) -> RowOptions:
    """Return the options of a row; none if their columns are empty.

    They are the values of several columns or, in one:

    - a list of texts, or of objects with a label and a text
    - an object of label: text, or the hub's object of two lists, text and label
    - one of these printed as text
    - a text with labelled options, or with one on each line or between semicolons

    Raises RowError for anything else, and for more options than there are letters.
    """
    options = _of_columns(row, columns) if len(columns) > 1 else _of_value(row, columns)
    if len(options.texts) > len(LETTERS):
        raise RowError("bad_options", f"has {len(options.texts)} options; at most {len(LETTERS)} can be asked")
    return options


def _of_columns(row: Fields, columns: list[str]) -> RowOptions:
    there = [(column, value) for column in columns if not is_missing(value := cell(row, column))]
    texts = tuple(_text(value, column) for column, value in there)
    matches = [OPTION_COLUMN.fullmatch(column) for column, _ in there]
    labels = [
        match[2] if match else column.rpartition(".")[2] for match, (column, _) in zip(matches, there, strict=True)
    ]
    is_named = all(len(label) == 1 or label.isdecimal() for label in labels)
    return RowOptions(texts, tuple(labels) if is_named else ())


def _of_value(row: Fields, columns: list[str]) -> RowOptions:
    value = cell(row, columns[0]) if columns else None
    if is_missing(value):
        return RowOptions()
    if isinstance(value, str):
        if not is_written(value):
            return _in_text(value, columns[0])
        try:
            value = parse_written(value)
        except ValueError as error:
            raise RowError("bad_type", f"{columns[0]} must be a list: {error}") from None
    texts, labels = _texts_and_labels(value)
    for items in (texts, labels):
        if not isinstance(items, list):
            raise RowError("bad_type", f"{columns[0]} must be a list of texts, not {items!r:.60}")
    if len(labels) not in (0, len(texts)):
        raise RowError("bad_type", f"{columns[0]} has {len(texts)} texts with {len(labels)} labels")
    options = RowOptions(
        tuple(_text(item, columns[0]) for item in texts), tuple(_text(item, columns[0]) for item in labels)
    )
    return options if options.labels else _without_own_labels(options.texts)


def _texts_and_labels(value: Any) -> tuple[Any, Any]:
    """Return the texts and labels of a list or an object; what has a different form comes back as it is."""
    if isinstance(value, Mapping) and {"text", "label"} <= {*value}:
        return value["text"] or [], value["label"] or []
    if isinstance(value, Mapping):
        labels = sorted((key for key in value if not is_missing(value[key])), key=lambda key: by_number(str(key)))
        return [value[key] for key in labels], labels
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        if all(len(item) == 1 for item in value) and not {*value[0]} & {*_TEXT_KEYS}:
            return [next(iter(item.values())) for item in value], [next(iter(item)) for item in value]
        text = next((key for key in _TEXT_KEYS if all(key in item for item in value)), None)
        label = next((key for key in _LABEL_KEYS if all(key in item for item in value)), None)
        if text is not None:
            return [item[text] for item in value], [item[label] for item in value] if label else []
    return value, []


def _text(value: Any, column: str) -> str:
    text = plain_text(value)
    if text is None:
        raise RowError("bad_type", f"{column} must be a list of texts, not {value!r:.60}")
    return text


def _in_text(text: str, column: str) -> RowOptions:
    """Return the options that one text lists. Raises RowError if it shows no division."""
    if (options := _labelled(text)) is not None:
        return options
    for separator in _SEPARATORS:
        parts = [part.strip() for part in text.split(separator)]
        if len(parts := [part for part in parts if part]) > 1:
            return RowOptions(tuple(parts))
    raise RowError(
        "bad_options",
        f"{column} is {text!r:.60}; write options as a list, with their letters, a line each, or between semicolons",
    )


def _labelled(text: str) -> RowOptions | None:
    """Return options that begin with labels in order from A, a, 1 or 0; None if the text does not list any."""
    text = text.strip()
    for pattern in _MARKS:
        marks = list(pattern.finditer(text))
        if not marks or marks[0].start() or _label(marks[0]) not in ("A", "a", "1", "0"):
            continue
        run = [marks[0]]
        for mark in marks[1:]:
            if _label(mark) == _after(_label(run[-1])):
                run.append(mark)
        ends = [mark.start() for mark in run[1:]] + [len(text)]
        texts = tuple(text[mark.end() : end].strip(" \t\r\n;；,，|/") for mark, end in zip(run, ends, strict=True))
        if len(run) > 1 and all(texts):
            return RowOptions(texts, tuple(map(_label, run)))
    return None


def _label(mark: re.Match[str]) -> str:
    return mark[mark.lastindex or 0]


def _after(label: str) -> str:
    return str(int(label) + 1) if label.isdecimal() else chr(ord(label) + 1)


def _without_own_labels(texts: tuple[str, ...]) -> RowOptions:
    """Return options that each begin with their letter or number without it; others stay as they are."""
    options = _labelled("\n".join(texts)) if len(texts) > 1 else None
    if options is None or len(options.texts) != len(texts):
        return RowOptions(texts)
    whole = all(text.strip().endswith(inner) for text, inner in zip(texts, options.texts, strict=True))
    return options if whole else RowOptions(texts)


# -- golds -----------------------------------------------------------------------------------------


def counts_from(golds: Sequence[tuple[str, RowOptions]], first: int) -> bool:
    """Say whether every gold is the number of an option, counted from `first`."""
    return all(gold.isdecimal() and first <= int(gold) < first + len(options.texts) for gold, options in golds)


def letter_of(gold: str, options: RowOptions, form: str) -> str:
    """Return the letter of the option that a gold names, or several letters with commas.

    Args:
        gold: the gold without its wrapping.
        options: the row's options, at least one.
        form: GenericSet.answer_form: option_text reads texts before letters, and the forms of FIRST_NUMBER count.

    Raises RowError("no_option") where it names no option, or more than one.
    """
    if form in FIRST_NUMBER:
        first = FIRST_NUMBER[form]
        if not counts_from([(gold, options)], first):
            raise RowError(
                "no_option", f"the answer is {gold!r:.40}, no number of {len(options.texts)} options from {first}"
            )
        return LETTERS[int(gold) - first]
    named, texts = (_by_label, _by_letter), (index_of_text,)
    for reader in ((*texts, *named) if form == "option_text" else (*named, *texts)) + (
        _by_letter_and_text,
        _by_loose_letter,
    ):
        if (index := reader(gold, options)) is not None:
            return LETTERS[index]
    letters = re.findall("[A-J]", gold) if _LETTERS_LIST.fullmatch(gold) else []
    if letters == sorted({*letters} & {*LETTERS[: len(options.texts)]}) != []:
        return ", ".join(letters)
    names = f" ({' '.join(options.labels)})" if options.labels else ""
    number = "; if it is a number, answer_form says from where it is counted" * gold.isdecimal()
    raise RowError("no_option", f"the answer {gold!r:.40} is none of the {len(options.texts)} options{names}{number}")


def _by_label(gold: str, options: RowOptions) -> int | None:
    """Return the index of the option with this label; option_b and Option B are B."""
    bare = re.sub(
        r"(?i)^(?:option|choice|opt|ending|sol|op|answer|ans)s?[-_ ]?(?=(?:[a-j]|\d{1,2})$)", "", gold.strip()
    )
    for same in (str, str.casefold):
        for name in (gold.strip(), bare):
            indices = [index for index, label in enumerate(options.labels) if same(label.strip()) == same(name)]
            if len(indices) == 1:
                return indices[0]
    return None


def _by_letter(gold: str, options: RowOptions) -> int | None:
    """Return the index of a capital letter, which may have brackets or a point."""
    match = _LETTER.fullmatch(gold)
    return _index_of_letter(match[1], options) if match else None


def _by_loose_letter(gold: str, options: RowOptions) -> int | None:
    """Return the index of a small letter, or of one behind a word: Option B."""
    match = _LOOSE_LETTER.fullmatch(gold)
    return _index_of_letter(match[1].upper(), options) if match else None


def _index_of_letter(letter: str, options: RowOptions) -> int | None:
    index = LETTERS.find(letter) if not _letters_are_labels(options) else -1
    return index if 0 <= index < len(options.texts) else None


def _letters_are_labels(options: RowOptions) -> bool:
    """Say whether the data's labels are letters other than A, B, C in order: then they alone count."""
    labels = "".join(options.labels).upper()
    return labels.isalpha() and labels != LETTERS[: len(options.texts)]


def index_of_text(gold: str, options: RowOptions) -> int | None:
    """Return the index of the only option with this text; spaces, dollar signs, a last point and case count last."""
    for same in (str.strip, _loose, lambda text: _loose(text).casefold()):
        indices = [index for index, text in enumerate(options.texts) if same(text) == same(gold)]
        if len(indices) > 1:
            raise RowError("no_option", f"the answer {gold!r:.40} is the text of {len(indices)} options")
        if indices:
            return indices[0]
    return None


def _loose(text: str) -> str:
    return " ".join(text.replace("$", " ").split()).removesuffix(".").strip()


def _by_letter_and_text(gold: str, options: RowOptions) -> int | None:
    """Return the index of "A. pear". Raises RowError if the letter and the text are of different options."""
    match = _LETTER_AND_TEXT.fullmatch(gold)
    if match is None:
        return None
    letter, text = match[1] or match[2] or match[3], match[4]
    index, other = _by_label(letter, options), index_of_text(text, options)
    index = _index_of_letter(letter.upper(), options) if index is None else index
    if index is not None and other is not None and index != other:
        raise RowError("no_option", f"the answer is {gold!r:.60}, but that is the text of {LETTERS[other]}")
    return index if other is not None else None
