r"""What the text benchmarks share: their rows differ in column names and in the form of the gold.

A gold is a text, a number (AMC's 27.0 is "27"), the last box of a solution (Minerva), a list of alternatives (Minerva
in POLARIS' files), or a list of one text that may hold several answers (OlympiadBench).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_rl.data.golds import infer_answer_type, plain_number
from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkReport,
    BenchmarkRows,
    PublishedRule,
    RawRow,
    Response,
)
from vlm_rl.evaluation.benchmarks.final_answers import final_answer
from vlm_rl.evaluation.benchmarks.protocols import EvalProtocol
from vlm_rl.evaluation.benchmarks.raw_rows import (
    UnusableRowError,
    first_of,
    id_text,
    problem_of,
    shown_columns,
    text,
    unwrapped,
)
from vlm_rl.templates import boxes
from vlm_rl.types import AnswerType, Problem

_IDS = ("unique_id", "id", "ID", "idx", "problem_idx", "url", "problem_id", "_key", "_number")
_GOLDS = ("answer", "Answer", "final_answer", "ground_truth")


def text_benchmark(
    name: str,
    *,
    files: BenchmarkFiles,
    protocol: EvalProtocol,
    data_license: str = "",
    category: str = "category",
    difficulties: Mapping[str, str] | None = None,
) -> Benchmark:
    """Return a benchmark whose problems are answered in free form and compared by the grader.

    Args:
        name: ours.
        files: where its rows are.
        protocol: how it is measured where the command line says nothing.
        data_license: of the data, where its authors state one.
        category: the facet that the problems' category is.
        difficulties: level -> the facet difficulty.
    """

    def read_row(row: RawRow) -> Problem:
        return read_text_row(name, row)

    def facets(problem: Problem) -> Mapping[str, Any]:
        level = problem.meta.get("level")
        values = {
            "level": level,
            "difficulty": (difficulties or {}).get(str(level)),
            category: problem.category,
            "kind": problem.meta.get("kind"),
        }
        return {facet: value for facet, value in values.items() if value not in (None, "")}

    return Benchmark(
        name=name,
        license=data_license,
        protocol=protocol,
        files=files,
        rows=BenchmarkRows(read_row=read_row, images=images, response_ids=_IDS),
        rule=PublishedRule(
            judgement=official_rule,
            needs_judge_model=True,
            emulation="never compared with a published judge's verdicts on the same responses",
        ),
        report=BenchmarkReport(facets=facets),
    )


def read_text_row(benchmark: str, row: RawRow) -> Problem:
    """Return the problem of a row; its meta has the alternatives of the gold, a tolerance and a unit, if any."""
    golds = _golds(row)
    answer_type: AnswerType = "list" if row.get("is_multiple_answer") else infer_answer_type(golds[0])
    tolerance = _tolerance(row.get("error"))
    question, context = text(row, "problem", "question", "Problem"), row.get("context")
    return problem_of(
        benchmark,
        id_text(row, *_IDS),
        f"{context}\n\n{question}" if context and question else question,
        gold=golds[0],
        answer=golds[0],
        answer_type=answer_type if tolerance is None else "float",
        category=first_of(row, "subject", "type", "subfield"),
        meta={
            "level": row.get("level"),
            "alternatives": golds[1:] or None,
            "kind": row.get("answer_type"),
            "unit": str(row["unit"]) if row.get("unit") else None,
            "tolerance": tolerance,
        },
    )


def _golds(row: RawRow) -> list[str]:
    """Return the gold and its alternatives. Raises UnusableRowError without one."""
    column = next((name for name in _GOLDS if row.get(name) not in (None, "")), None)
    if column is None:
        return [_last_box(row)]
    value = row[column]
    if column == "final_answer" and not (isinstance(value, list) and len(value) == 1):
        raise UnusableRowError("bad_type", f"final_answer must be a list of one text, not {value!r:.60}")
    golds = [_gold(item, column) for item in (value if isinstance(value, list) else [value])]
    if not golds:
        raise UnusableRowError("answer_missing", f"the list in {column} is empty")
    return list(dict.fromkeys(golds))


def _gold(value: Any, column: str) -> str:
    if isinstance(value, str):
        gold = plain_number(unwrapped(value))
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        gold = plain_number(value)
    else:
        shown = f"{type(value).__name__} {value!r:.40}"
        raise UnusableRowError("bad_type", f"{column} must be text or a number, not {shown}")
    if not gold:
        raise UnusableRowError("answer_missing", f"{column} is empty: {value!r:.40}")
    return gold


def _last_box(row: RawRow) -> str:
    solution = row.get("solution")
    solution = str(solution[-1] if isinstance(solution, list) and solution else solution or "")
    contents = boxes(solution.replace(r"\fbox", r"\boxed"))
    if not contents:
        columns = shown_columns(row)
        raise UnusableRowError("answer_missing", f"no gold in {', '.join(_GOLDS)}, no box in a solution: {columns}")
    return unwrapped(contents[-1])


def _tolerance(stated: Any) -> float | None:
    """Return the tolerance of a row if it is one number; a list of them belongs to several answers."""
    try:
        return float(stated) if stated else None
    except (TypeError, ValueError):
        return None


def images(row: RawRow) -> Sequence[Any]:
    """Return the images image_1 ... image_9 that a row of OlympiadBench's multimodal files has."""
    return [row[name] for number in range(1, 10) if row.get(name := f"image_{number}")]


def official_rule(_: Problem, response: Response) -> str:
    """Return the final answer, wherever it is, for the grader to compare."""
    return final_answer(response.text if response.extraction is None else response.extraction)
