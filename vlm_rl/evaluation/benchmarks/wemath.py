"""We-Math (We-Math/We-Math, CC BY-NC 4.0): problems of two or three steps, and how they are mastered.

A problem's steps and its whole ("multi") are separate rows. Four cases, over the problems: complete mastery
(CM), inadequate generalisation (IG: all steps right, the whole wrong), insufficient knowledge (IK: the whole
and some step wrong), rote memorisation (RM: the whole right without its steps; strict: any step wrong, loose:
all steps wrong). Score = CM + IG / 2 over the problems. The published extraction is a rule, no judge model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from vlm_rl.evaluation.benchmarks.fields import options_in, required, text_field
from vlm_rl.evaluation.benchmarks.items import Answer, Judgement, Question

Case = Literal["CM", "IG", "IK", "RM"]
_WORTH: dict[Case, float] = {"CM": 1.0, "IG": 0.5, "IK": 0.0, "RM": 0.0}
_DROPPED = re.compile("[<>:.]")


def read_question(row: Mapping[str, Any], where: str) -> Question:
    problem, key = text_field(row, "ID", where), text_field(row, "key", where)
    return Question(
        id=f"{problem}-{key}",
        gold=str(required(row, "answer", where)).strip(),
        answer_type="choice",
        choices=options_in(str(row.get("option") or "")),
        facets={"step": (key,), "concept": (str(row.get("knowledge concept", "")),)},
        problem=problem,
        part=key.rpartition("_")[2],
    )


def judge(question: Question, answer: Answer) -> Judgement:
    """The published rule: the first character after the last "Answer", punctuation removed."""
    tail = _DROPPED.sub("", answer.text.split("Answer")[-1].strip()).strip()
    letter = tail[0] if tail and tail[0] in "ABCDEFGH" else None
    if letter is None:
        return Judgement("no_answer", None, "no letter A to H follows the last 'Answer'")
    return Judgement("correct" if letter == question.gold else "wrong", letter, f"{letter} for {question.gold}")


def case_of(steps: Sequence[bool], whole: bool, *, loose: bool) -> Case:
    """Which of the four a problem is."""
    if not whole:
        return "IG" if all(steps) else "IK"
    mastered = any(steps) if loose else all(steps)
    return "CM" if mastered else "RM"


def four_cases(rights: Iterable[tuple[Question, bool]], *, loose: bool) -> dict[str, Case]:
    """Problem -> its case; problems of which a step or the whole has no answer are left out."""
    parts: dict[str, dict[str, bool]] = defaultdict(dict)
    for question, right in rights:
        parts[question.problem][question.part] = right
    cases = {}
    for problem, found in parts.items():
        steps = [found[name] for name in sorted(found) if name != "multi"]
        if "multi" in found and len(steps) == _num_steps(problem):
            cases[problem] = case_of(steps, found["multi"], loose=loose)
    return cases


def score_of(cases: Mapping[str, Case]) -> dict[str, float]:
    """Problem -> its worth: their mean is the published score."""
    return {problem: _WORTH[case] for problem, case in cases.items()}


def rates(cases: Mapping[str, Case]) -> dict[str, float | None]:
    """Shares of the problems; RM as published: of the problems whose whole is right."""
    count = {case: sum(found == case for found in cases.values()) for case in _WORTH}
    whole_right = count["CM"] + count["RM"]
    shares: dict[str, float | None] = {
        case: count[case] / len(cases) if cases else None for case in ("IK", "IG", "CM")
    }
    return shares | {"RM": count["RM"] / whole_right if whole_right else None}


def _num_steps(problem: str) -> int:
    return 3 if problem.startswith("3") else 2
