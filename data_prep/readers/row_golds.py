r"""Read the gold answer of a row; a missing or broken one raises RowError (vlm_rl.data.golds reads its text)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vlm_rl.data.golds import infer_answer_type, parse_choices, plain_number, unwrap_gold
from vlm_rl.data_prep.readers.option_cells import FIRST_NUMBER, RowOptions, letter_of
from vlm_rl.data_prep.readers.written_values import is_written, parse_written, plain_text
from vlm_rl.data_prep.records import RowError
from vlm_rl.templates import boxes
from vlm_rl.types import AnswerType

_TAG = re.compile(r"<answer>(.*?)</answer>", re.S)


def gold_of(answer: Any) -> str:
    """Return the unwrapped gold of a row. Raises RowError if it is missing, broken, or not text."""
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise RowError("answer_missing", "the answer is missing")
    if not isinstance(answer, str):
        raise RowError("bad_type", f"the answer must be text, not {type(answer).__name__} {answer!r:.40}")
    gold = unwrap_gold(answer)
    if gold is None:
        raise RowError("gold_broken", f"the answer's boxes or braces do not close: {answer!r:.80}")
    if not gold:
        raise RowError("answer_missing", f"the answer is empty: {answer!r:.40}")
    return gold


def number_gold(answer: Any) -> str:
    """Return a gold that may be a number in its file: 27.0 is "27", 73 is "73", "073" is "73"."""
    if isinstance(answer, float) and not math.isfinite(answer):
        raise RowError("answer_missing", f"the answer is {answer}")
    text = None if isinstance(answer, str | bool) else plain_text(answer)
    return plain_number(gold_of(answer) if text is None else text)


def golds_in(answer: Any, form: str, options: RowOptions) -> tuple[str, ...]:
    """Return the gold of an answer that is written in a form of GenericSet.answer_form, and its alternatives.

    Where there are options, the gold is the letter of one. A truth value is True or Yes, False or No. A list of
    equal answers is that answer. Raises RowError if the form is not there, and for a list of different answers
    where the form does not say what it means.
    """
    items = answers_in(answer)
    if items is None:
        return _spellings(answer, form, options)
    golds = [_spellings(item, form, options) for item in items]
    if not golds:
        raise RowError("answer_missing", "the answer is an empty list")
    distinct = [spellings for spellings, _ in Counter(golds).most_common()]
    if form == "all_of":
        return (", ".join(spellings[0] for spellings in golds),)
    if len(distinct) > 1 and form != "any_of":
        raise RowError(
            "bad_type",
            f"the answer is a list, {answer!r:.60}; answer_form says whether any one is right (any_of) or all "
            "together are the answer (all_of)",
        )
    return tuple(dict.fromkeys(spelling for spellings in distinct for spelling in spellings))


def answers_in(answer: Any) -> list[Any] | None:
    """Return the answers in a list, also of annotators' objects, or printed as text; None if it is one answer."""
    if isinstance(answer, str) and is_written(answer):
        try:
            answer = parse_written(answer)
        except ValueError:
            return None
        if not isinstance(answer, list) or not all(isinstance(item, str) for item in answer):
            return None  # [0, 1] is an interval
    if not isinstance(answer, list):
        return None
    return [item["answer"] if isinstance(item, Mapping) and "answer" in item else item for item in answer]


def _spellings(answer: Any, form: str, options: RowOptions) -> tuple[str, ...]:
    golds = (str(answer), "Yes" if answer else "No") if isinstance(answer, bool) else (text_of_answer(answer, form),)
    if not options.texts:
        return golds
    for gold in golds[:-1]:
        with suppress(RowError):
            return (letter_of(gold, options, form),)
    return (letter_of(golds[-1], options, form),)


def text_of_answer(answer: Any, form: str = "plain") -> str:
    """Return one answer without its wrapping."""
    if isinstance(answer, str) and form == "box":
        answer = last_box(answer)
    elif isinstance(answer, str) and form in ("hashes", "tag"):
        marked = _TAG.findall(answer)[-1:] if form == "tag" else answer.split("####")[1:][-1:]
        if not marked:
            mark = "<answer> tag" if form == "tag" else "####"
            raise RowError("answer_missing", f"the answer has no {mark}: ...{answer[-60:]!r}")
        answer = marked[0].strip()
    text = gold_of(answer) if isinstance(answer, str) else number_gold(answer)
    return _whole(text) if form in FIRST_NUMBER else text


def _whole(text: str) -> str:
    """Return the number of an option without the zeros that a column of floats writes: 2.0 is "2"."""
    return plain_number(re.sub(r"\.0+$", "", text))


def type_and_choices(gold: str, question: str) -> tuple[AnswerType, tuple[str, ...]]:
    """Return the gold's type, and, if it is a choice, the options that the question lists."""
    kind = infer_answer_type(gold)
    return kind, parse_choices(question) if kind == "choice" else ()


def last_box(solution: str) -> str:
    r"""Return the contents of a solution's last `\boxed{}`. Raises RowError if it has none."""
    contents = boxes(solution.replace(r"\fbox", r"\boxed"))
    if not contents:
        raise RowError("answer_missing", f"the solution has no closed box: ...{solution[-60:]!r}")
    return contents[-1]
