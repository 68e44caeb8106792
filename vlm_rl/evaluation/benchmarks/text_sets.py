"""Text benchmarks: AIME, AMC, MATH-500 (by level and subject), Minerva and OlympiadBench.

Their golds come in the shapes that their publishers chose: a number stored as 27.0 or "073", the last box of
a solution, a list of alternatives (Minerva), a list of one string that holds several answers (OlympiadBench).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.extraction import final_answer
from vlm_rl.evaluation.benchmarks.fields import number_text, type_of_gold, unwrapped
from vlm_rl.evaluation.benchmarks.items import Answer, Question
from vlm_rl.templates import boxes

_IDS = ("unique_id", "id", "ID", "idx", "problem_id")
_GOLDS = ("answer", "final_answer", "Answer", "ground_truth")


def read_question(row: Mapping[str, Any], where: str) -> Question:
    golds = _golds(row, where)
    names = {"level": "level", "subject": "subject", "type": "type", "subfield": "subfield", "kind": "answer_type"}
    question = Question(
        id=str(next((row[key] for key in _IDS if row.get(key) not in (None, "")), row.get("_number", ""))),
        gold=golds[0],
        answer_type=type_of_gold(golds[0]),
        facets={facet: (str(row[key]),) for facet, key in names.items() if row.get(key) not in (None, "")},
        other_golds=tuple(golds[1:]),
    )
    if row.get("is_multiple_answer"):
        question = replace(question, answer_type="list")
    tolerance, unit = _number(row.get("error")), row.get("unit")
    if tolerance is not None:
        question = replace(question, answer_type="float")
    meta = {**({} if tolerance is None else {"tolerance": tolerance}), **({"unit": str(unit)} if unit else {})}
    return replace(question, meta=meta)


def _number(text: Any) -> float | None:
    """A row's tolerance; a list of them belongs to several answers, and is none of ours."""
    try:
        return float(text) if text else None
    except (TypeError, ValueError):
        return None


def judge(_question: Question, answer: Answer) -> str:
    """The final answer wherever it stands; the grader compares it."""
    return final_answer(answer.text)


def _golds(row: Mapping[str, Any], where: str) -> list[str]:
    value = next((row[key] for key in _GOLDS if row.get(key) not in (None, "")), None)
    if value is None and row.get("solution"):
        solution = row["solution"][-1] if isinstance(row["solution"], list) else row["solution"]
        value = (boxes(str(solution)) or [None])[-1]
    values = value if isinstance(value, list) else [value]
    found = [unwrapped(number_text(gold)) for gold in values if gold is not None]
    if not found:
        raise UserError(f"{where}: no gold: none of {', '.join(_GOLDS)}, and no box in a solution")
    return [gold for gold in found if gold] or found
