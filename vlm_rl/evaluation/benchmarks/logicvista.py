"""LogicVista (lscpku/LogicVista, Apache-2.0): by skill and capability.

The published rule asks a judge model to name letters. The sets of named and of right letters must be equal; three
rows have two right ones. Here rules name the letters: an emulation.
"""

from __future__ import annotations

import re
from typing import Any

from vlm_rl.data.golds import infer_answer_type, parse_choices
from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, Judgement, RawRow, Response, one_image
from vlm_rl.evaluation.benchmarks.final_answers import final_answer, final_letters
from vlm_rl.evaluation.benchmarks.raw_rows import UnusableRowError, first_of, problem_of, text, unwrapped
from vlm_rl.types import Problem

_LETTERS = re.compile(r"[A-I](\s*,\s*[A-I])*")


def read_row(row: RawRow) -> Problem:
    """Return the problem of a row of dataset.json or of the hub's table, whose rows have no id but their place.

    A gold may name two letters ("A, C"). Raises UnusableRowError for the row without an answer (v1_382).
    """
    gold, question = str(row.get("answer") or "").strip(), text(row, "question")
    if not gold:
        raise UnusableRowError("answer_missing", "published without an answer", known=True)
    answer = unwrapped(gold)
    are_letters = _LETTERS.fullmatch(answer) is not None
    skills = first_of(row, "skill") or []
    skills = [skills] if isinstance(skills, str) else skills
    capability = first_of(row, "broad_capability", "capability")
    named = first_of(row, "key", "id", "index", "question_id", "_key")
    return problem_of(
        "logicvista",
        str(f"v1_{row.get('_number')}" if named is None else named),
        question,
        gold=answer,
        answer=answer,
        answer_type="choice" if are_letters else infer_answer_type(answer),
        choices=parse_choices(question) if are_letters else (),
        category=skills[0] if skills else "",
        meta={
            "reported_by": {"capability": capability} if capability else None,
            "skills": skills if len(skills) > 1 else None,
        },
    )


def facets(problem: Problem) -> dict[str, Any]:
    """Return the skills, which include the category where the row lists none, and the capabilities."""
    skills = problem.meta.get("skills") or ([problem.category] if problem.category else [])
    return {"skill": skills, "capability": problem.meta.get("reported_by", {}).get("capability", [])}


def official_rule(problem: Problem, response: Response) -> Judgement:
    """Compare the sets of letters."""
    text = response.text.split("ASSISTANT:")[1] if "ASSISTANT:" in response.text else response.text
    text = text.strip()
    wanted = sorted(letter.lower() for letter in re.split(r"\s*,\s*", problem.answer))
    if len(text) == 1:
        named = [text.lower()] if text.isnumeric() or text.lower() in "abcde" else []
    else:
        named = [letter.lower() for letter in final_letters(text)] or [final_answer(text).lower()]
    shown = ", ".join(named)
    return Judgement("correct" if named == wanted else "wrong", shown, f"{shown!r:.60} for {', '.join(wanted)}")


BENCHMARK = Benchmark(
    name="logicvista",
    license="Apache-2.0",
    hub="lscpku/LogicVista",
    tables=("dataset.json", "data/dataset.json", "**/{split}-*.parquet", "dataset*.json"),
    splits=("test",),
    num_rows=(448,),
    images=one_image("image", "imagename"),
    image_folder="images",
    read_row=read_row,
    facets=facets,
    official_rule=official_rule,
    needs_judge_model=True,
    response_ids=("_key", "key", "id"),
)
