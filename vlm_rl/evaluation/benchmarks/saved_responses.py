"""Find the responses in a file's rows: their column, the problem each belongs to, and what else the file says."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, RawRow, Response

_TEXTS = (
    *("response", "model_response", "prediction", "output", "completion", "model_answer"),
    *("short answer", "answer"),
)
_ANNOTATED = ("question", "problem")  # beside one of these "answer" is the gold
_GOLDS = ("Ground truth", "ground_truth")
_VERDICTS = ("correct", "true_false", "result", "hit", "joker", "judgement")
_RIGHT, _WRONG = ("correct", "true", "1"), ("fail", "false", "wrong", "incorrect", "0")


def responses_in(benchmark: Benchmark, rows: Sequence[tuple[str, RawRow]]) -> list[Response]:
    """Return the responses of one file's rows.

    All are in one column; a row without it has an empty response. Repeated ids, or a list in the column, are
    samples of one problem. Raises UserError for a file without responses and for a row without an id.
    """
    column = _text_column(rows)
    num_samples: Counter[str] = Counter()
    responses: list[Response] = []
    for where, row in rows:
        is_ours = "problem_id" in row
        name = str(row["problem_id"]).removeprefix(f"{benchmark.name}-") if is_ours else _id(row, benchmark, where)
        value = row.get(column) if _holds(row, column) else None
        for text in (value or [None]) if isinstance(value, list) else [value]:
            responses.append(_response(benchmark, row, name, column, text, num_samples[name]))
            num_samples[name] += 1
    return responses


def _text_column(rows: Sequence[tuple[str, RawRow]]) -> str:
    """Return the file's column of responses. Raises UserError if it has neither one nor extractions."""
    for name in ("_value", *_TEXTS):
        if any(_holds(row, name) for _, row in rows):
            return name
    if any(row.get("extraction") is not None for _, row in rows):
        return "response"
    where, row = rows[0]
    gold = "; an 'answer' beside the question is taken for the gold" if "answer" in row else ""
    raise UserError(
        f"{where}: no response: name its column one of {', '.join(_TEXTS)}{gold}; the row has {sorted(row)[:12]}"
    )


def _holds(row: RawRow, name: str) -> bool:
    return name in row and not (name == "answer" and any(key in row for key in _ANNOTATED))


def _id(row: RawRow, benchmark: Benchmark, where: str) -> str:
    for template in benchmark.rows.response_ids:
        names = re.findall(r"\{([^}]+)\}", template) or [template]
        if all(row.get(name) not in (None, "") for name in names):
            if "{" not in template:
                return _plain(row[template])
            return template.format(**{name: _plain(row[name]) for name in names})
    wanted = ", ".join(benchmark.rows.response_ids)
    raise UserError(f"{where}: no id: give the row one of {wanted}; it has {sorted(row)[:12]}")


def _plain(value: Any) -> str:
    """Write an id as people do: 7, 7.0 and " 7 " are the same."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def _response(benchmark: Benchmark, row: RawRow, name: str, column: str, text: Any, sample: int) -> Response:
    short_answer, extraction = benchmark.rows.short_answer, row.get("extraction")
    if text is None or text != text:  # NaN, which some writers put for nothing
        text = ""
    if isinstance(text, dict):  # a JSON reply, parsed
        extraction = str(text.get(short_answer)) if short_answer else extraction
        text = json.dumps(text, ensure_ascii=False)
    elif short_answer and column in ("_value", short_answer, "answer") and text != "" and "{" not in str(text):
        extraction = text  # these columns hold the short answer itself, the others the whole reply
    return Response(
        id=name,
        text=str(text),
        sample=sample,
        extraction=str(extraction) if extraction is not None else None,
        published=_published(row),
        gold=next((str(row[key]) for key in _GOLDS if row.get(key) is not None), None),
        length=_length(row.get("length")),
        stop_reason=row.get("stop_reason"),
    )


def _length(value: Any) -> int | None:
    """Return a number of tokens, which a table holds as text; None if it is none."""
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return None


def _published(row: RawRow) -> bool | None:
    for name in _VERDICTS:
        shown = str(row.get(name)).strip().lower()
        if shown in _RIGHT or shown in _WRONG:
            return shown in _RIGHT
    return None
