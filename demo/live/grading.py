"""Grade what a model answered live, where a stored problem was asked unchanged.

The rules are those of training and evaluation. The problem's row in the prepared set decides where that set is on
this machine; otherwise the gold in the evaluation's record does, and its form says what kind of answer it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.data.golds import infer_answer_type
from vlm_rl.data.sets import problem_of_row
from vlm_rl.demo.numbers.problem_images import set_of
from vlm_rl.grading.grader import Grader, task_of
from vlm_rl.run.directory import EvalResult
from vlm_rl.templates import Template
from vlm_rl.types import Grade, Problem


def problem_to_grade(record: Mapping[str, Any], result: EvalResult, sets: Sequence[str]) -> Problem | None:
    """Return the problem of an evaluation's record without its images; None if the grader could not judge it.

    That is where no gold is known, and where a part of the reward decided in the grader's place.

    Args:
        record: a row of the evaluation's records.
        result: the evaluation.
        sets: the folders that its run evaluates on.
    """
    if result.summary.get("accuracy_part"):
        return None
    benchmark = result.benchmark
    name, gold = str(record["problem_id"]), str(record["gold"] or "")
    if (path := set_of(benchmark, sets)) is not None and (problem := _from_set(path, name)) is not None:
        return problem
    return Problem(name, str(record["question"] or ""), (), gold, infer_answer_type(gold)) if gold else None


@lru_cache(maxsize=64)
def _from_set(path: Path, name: str) -> Problem | None:
    try:
        columns = [column for column in pq.read_schema(path).names if column != "images"]
        rows = pq.read_table(path, columns=columns, filters=[("id", "==", name)]).to_pylist()
        return problem_of_row(rows[0], images=()) if rows else None
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None


def grade_reply(problem: Problem, text: str, template: Template) -> Grade:
    """Grade a finished reply, its prefill included."""
    with Grader(workers=1) as grader:  # a worker is started for an answer that needs algebra, and ends with it
        return grader.grade_many([task_of(problem, text, template)])[0]
