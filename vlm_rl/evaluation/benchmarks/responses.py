"""The answers in a file's rows: which column holds them, whose they are, and what else the file says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.items import Answer
from vlm_rl.evaluation.benchmarks.tables import Fields

_TEXTS = (
    *("response", "model_response", "prediction", "output", "completion", "model_answer"),
    *("short answer", "answer"),
)
_SHORT = ("_value", "short answer", "answer")  # columns of the answer itself, where the others hold the whole reply
_ANNOTATED = ("question", "problem")  # beside one of these "answer" is the gold
_GOLDS = ("Ground truth", "ground_truth")
_VERDICTS = ("correct", "true_false", "result", "hit", "joker", "judgement")
_RIGHT, _WRONG = ("correct", "true", "1"), ("fail", "false", "wrong", "incorrect", "0")


def answers_in(
    rows: Sequence[tuple[str, Fields]], *, ids: Sequence[str], prefix: str = "", are_short: bool = False
) -> list[Answer]:
    """The answers of one file's rows; repeated ids, or a list in the text column, are samples of one question.

    `ids` are column names (or templates of them, "{ID}-{key}"), tried in order; `prefix` is what our own
    preparation puts in front of an id. All answers are in one column; a row without it has an empty answer.
    `are_short`: the benchmark's rule starts from a short answer, which some columns hold.
    """
    column = _text_column(rows)
    seen: dict[str, int] = {}
    answers: list[Answer] = []
    for where, row in rows:
        name = str(row["problem_id"]).removeprefix(prefix) if "problem_id" in row else _identity(row, ids, where)
        value = row.get(column) if _holds(row, column) else None
        for text in (value or [None]) if isinstance(value, list) else [value]:
            sample = seen.get(name, 0)
            seen[name] = sample + 1
            answers.append(_answer(row, name, text, sample, is_short=are_short and column in _SHORT))
    return answers


def _text_column(rows: Sequence[tuple[str, Fields]]) -> str:
    """The file's column of answers. Raises UserError where there is none, and no extraction to start from either."""
    for name in ("_value", *_TEXTS):
        if any(_holds(row, name) for _, row in rows):
            return name
    if any(row.get("extraction") is not None for _, row in rows):
        return "response"
    where, row = rows[0]
    gold = "; an 'answer' beside the question is taken for the gold" if "answer" in row else ""
    raise UserError(f"{where}: no response: wanted one of {', '.join(_TEXTS)}{gold}; the row has {sorted(row)[:12]}")


def _holds(row: Fields, name: str) -> bool:
    return name in row and not (name == "answer" and any(key in row for key in _ANNOTATED))


def _identity(row: Fields, ids: Sequence[str], where: str) -> str:
    for template in ids:
        names = re.findall(r"\{([^}]+)\}", template) or [template]
        if all(row.get(name) not in (None, "") for name in names):
            if "{" not in template:
                return _plain(row[template])
            return template.format(**{name: _plain(row[name]) for name in names})
    raise UserError(f"{where}: no id: wanted one of {', '.join(ids)}; the row has {sorted(row)[:12]}")


def _plain(value: Any) -> str:
    """An id as people write it: 7, 7.0 and " 7 " are one."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def _answer(row: Fields, name: str, text: Any, sample: int, *, is_short: bool) -> Answer:
    extraction = row.get("extraction")
    if text is None or text != text:  # NaN, which some writers put for nothing
        text = ""
    if isinstance(text, dict):  # DynaMath's reports keep the parsed JSON reply
        extraction, text = str(text.get("short answer")), json.dumps(text, ensure_ascii=False)
    elif is_short and text != "" and "{" not in str(text):
        extraction = text
    return Answer(
        id=name,
        text=str(text),
        sample=sample,
        extraction=str(extraction) if extraction is not None else None,
        published=_published(row),
        gold=next((str(row[key]) for key in _GOLDS if row.get(key) is not None), None),
        length=row.get("length"),
        stop_reason=row.get("stop_reason"),
    )


def _published(row: Fields) -> bool | None:
    for name in _VERDICTS:
        shown = str(row.get(name)).strip().lower()
        if shown in _RIGHT or shown in _WRONG:
            return shown in _RIGHT
    return None
