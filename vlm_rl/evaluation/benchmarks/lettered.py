"""LogicVista (Apache-2.0) and MathVerse (MIT): their published rules ask a judge model, ours name the letter.

LogicVista: by skill; the sets of named and of right letters must be equal (three rows have two right ones).
MathVerse: by version of the problem; a judge model extracts and another one compares. Here a letter is found
by rules, and a free-form answer goes to this project's grader. Both are emulations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlm_rl.evaluation.benchmarks.extraction import final_answer, final_letters
from vlm_rl.evaluation.benchmarks.fields import (
    object_field,
    options_in,
    required,
    text_field,
    texts_field,
    type_of_gold,
    unwrapped,
)
from vlm_rl.evaluation.benchmarks.items import Answer, Judgement, Question

_LETTER_GOLD = re.compile(r"[A-I](\s*,\s*[A-I])*")


def read_logicvista(row: Mapping[str, Any], where: str) -> Question | None:
    """None for the row that is published without an answer (v1_382)."""
    gold, question = str(row.get("answer") or "").strip(), str(row.get("question", ""))
    if not gold:
        return None
    letters = _LETTER_GOLD.fullmatch(gold) is not None
    return Question(
        id=text_field(row, "key", where),
        gold=gold,
        answer_type="choice" if letters else type_of_gold(gold),
        choices=options_in(question) if letters else (),
        facets={
            "skill": texts_field(row, "skill", where),
            "capability": texts_field(row, "broad_capability" if "broad_capability" in row else "capability", where),
        },
    )


def judge_logicvista(question: Question, answer: Answer) -> Judgement:
    text = answer.text.split("ASSISTANT:")[1] if "ASSISTANT:" in answer.text else answer.text
    text = text.strip()
    wanted = sorted(letter.lower() for letter in re.split(r"\s*,\s*", question.gold))
    if len(text) == 1:
        named = [text.lower()] if text.isnumeric() or text.lower() in "abcde" else []
    else:
        named = [letter.lower() for letter in final_letters(text)] or [final_answer(text).lower()]
    shown = ", ".join(named)
    return Judgement("correct" if named == wanted else "wrong", shown, f"{shown!r:.60} for {', '.join(wanted)}")


def read_mathverse(row: Mapping[str, Any], where: str) -> Question:
    gold = str(required(row, "answer", where)).strip()
    is_choice = row.get("question_type") == "multi-choice"
    meta = object_field(row, "metadata" if row.get("metadata") else "category", where)
    return Question(
        id=text_field(row, "sample_index" if "sample_index" in row else "problem_id", where),
        gold=gold.strip("()") if is_choice else unwrapped(gold),  # a few letters are published in brackets
        answer_type="choice" if is_choice else type_of_gold(gold),
        choices=options_in(str(row.get("question_for_eval") or row.get("question") or "")) if is_choice else (),
        facets={
            "version": (str(row.get("problem_version", "")),),
            "question_type": (str(row.get("question_type", "")),),
            "subject": (str(meta.get("subject", "")),),
            "subfield": (str(meta.get("subfield", "")),),
        },
        problem=str(row.get("problem_index", "")),
    )


def judge_mathverse(question: Question, answer: Answer) -> Judgement | str:
    """A verdict for a letter; for everything else the extracted text, which the grader compares."""
    text = answer.text if answer.extraction is None else answer.extraction
    if question.answer_type != "choice":
        return final_answer(text)
    letters = final_letters(text)
    right = letters == (question.gold,)
    return Judgement("correct" if right else "wrong", ", ".join(letters), f"names {letters} for {question.gold}")
