"""DynaMath (DynaMath/DynaMath_Sample, Apache-2.0): ten variants of each seed problem.

Average accuracy; worst case: a seed counts only if all of its variants are right; reasoning robustness: worst
case over average. The published rule reads the JSON reply's "short answer": a float within 0.001, a letter
among the first three characters, a text that contains the gold (so "not 5" is 5: marked as a free point).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.fields import options_in, required, text_field
from vlm_rl.evaluation.benchmarks.items import Answer, Judgement, Question
from vlm_rl.types import AnswerType

_TYPES: dict[str, AnswerType] = {"float": "float", "multiple choice": "choice", "text": "text"}
TOLERANCE = 0.001


def read_question(row: Mapping[str, Any], where: str) -> Question:
    kind = str(required(row, "answer_type", where))
    if kind not in _TYPES:
        raise UserError(f"{where}: answer_type is {kind!r}; known: {', '.join(_TYPES)}")
    seed = text_field(row, "id" if row.get("key") in (None, "") and "id" in row else "key", where)
    variant = text_field(row, "trial", where)
    return Question(
        id=f"{seed}-v{variant}",
        gold=str(row["ground_truth"] if row.get("ground_truth") is not None else required(row, "answer", where)),
        answer_type=_TYPES[kind],
        choices=options_in(str(row.get("question", ""))) if kind == "multiple choice" else (),
        meta={"tolerance": TOLERANCE} if kind == "float" else {},
        facets={
            "subject": (str(row.get("subject", "")),),
            "level": (str(row.get("level") or row.get("knowledge_level") or ""),),
            "answer_type": (kind,),
        },
        problem=seed,
        part=variant,
    )


def judge(question: Question, answer: Answer) -> Judgement:
    if answer.published is not None and not answer.text and answer.extraction is None:
        verdict = "correct" if answer.published else "wrong"
        return Judgement(verdict, None, "the file holds this verdict, and no answer", "published verdict")
    short = answer.extraction if answer.extraction is not None else short_answer(answer.text)
    if question.answer_type == "float":
        value, gold = _number(short), _number(question.gold)
        right = value is not None and gold is not None and abs(value - gold) <= TOLERANCE
        return Judgement(
            "correct" if right else "wrong", short, f"{value} against {question.gold}, within {TOLERANCE}"
        )
    if question.answer_type == "choice":
        right = short == question.gold if len(short) == 1 else question.gold in short[:3]
        return Judgement("correct" if right else "wrong", short, f"{short[:3]!r} holds {question.gold}: {right}")
    right = question.gold in short
    note = "free point" if right and short.strip() != question.gold.strip() else ""
    return Judgement(
        "correct" if right else "wrong", short, f"the text contains {question.gold!r:.60}: {right}", note
    )


def short_answer(response: str) -> str:
    """The "short answer" of the JSON reply; without one, the last line less its last character, as published."""
    start, end = response.find("{"), response.rfind("}")
    body = response[start : end + 1].replace("\\", "") if 0 <= start < end else response
    try:
        tree = json.loads(body, strict=False)
    except (ValueError, RecursionError):
        return body.split("\n")[-1][:-1]
    return str(tree.get("short answer")) if isinstance(tree, dict) else ""


def _number(text: str) -> float | None:
    """The published reading: the first word, "2π" as two times pi."""
    word = text if text.isdigit() else text.split(" ")[0]
    head, pi, _ = word.partition("π")
    try:
        return float(head) * (math.pi if pi else 1.0)
    except ValueError:
        return None


def worst_case(scores: Iterable[tuple[Question, float]]) -> dict[str, float]:
    """Seed -> the lowest score among its variants."""
    by_seed: dict[str, list[float]] = defaultdict(list)
    for question, score in scores:
        by_seed[question.problem].append(score)
    return {seed: min(found) for seed, found in by_seed.items()}
