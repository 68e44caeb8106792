"""The benchmarks that can be scored, one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlm_rl.evaluation.benchmarks import dynamath, lettered, mathvision, mathvista, text_sets, wemath
from vlm_rl.evaluation.benchmarks.items import Answer, Judgement, Question


@dataclass(frozen=True, slots=True)
class Benchmark:
    """How a benchmark's files are read and judged."""

    name: str  # also the prefix of its ids in prepared sets
    read: Callable[[Mapping[str, Any], str], Question | None]
    judge: Callable[[Question, Answer], Judgement | str]  # a text is handed to the grader
    ids: tuple[str, ...]  # columns that name a response's question
    headline: str = "accuracy"
    emulated: bool = True  # the published rule needs a judge model, which rules stand in for
    short: bool = False  # the published rule starts from a short answer, which a file may hold
    carries: bool = False  # files of responses hold the annotations as well


def _text_set(name: str) -> Benchmark:
    ids = ("unique_id", "id", "ID", "idx", "_key", "_number")
    return Benchmark(name, text_sets.read_question, text_sets.judge, ids)


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("mathvista", mathvista.read_question, mathvista.judge, ("pid", "_key", "id"), carries=True),
        Benchmark("mathvision", mathvision.read_question, mathvision.judge, ("id", "_key"), emulated=False),
        Benchmark(
            "mathverse",
            lettered.read_mathverse,
            lettered.judge_mathverse,
            ("sample_index", "problem_id", "_key", "id"),
            carries=True,
        ),
        Benchmark(
            "logicvista",
            lettered.read_logicvista,
            lettered.judge_logicvista,
            ("_key", "key", "id"),
        ),
        Benchmark(
            "wemath",
            wemath.read_question,
            wemath.judge,
            ("{ID}-{key}", "_key", "id"),
            headline="score_strict",
            emulated=False,
            carries=True,
        ),
        Benchmark(
            "dynamath",
            dynamath.read_question,
            dynamath.judge,
            ("{ID}-v{key}", *(f"{{{name}}}-v{{trial}}" for name in ("_key", "id", "ID", "key", "question_id"))),
            headline="worst_case",
            emulated=False,
            short=True,
        ),
        *map(_text_set, ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")),
    )
}
