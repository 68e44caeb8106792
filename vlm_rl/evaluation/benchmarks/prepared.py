"""Prepared problems as a benchmark's questions: an evaluation is scored as its benchmark defines it.

`questions_of(problems)` is None for sets that are no benchmark's. Answers to the questions are records of an
evaluation, so that the published rule (`official`) and the benchmark's own metrics work on them as on saved files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_rl.evaluation.benchmarks.items import Answer, Judgement, Mode, Question, Row
from vlm_rl.evaluation.benchmarks.metrics import facet_tables, headline_parts, scores
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS, Benchmark
from vlm_rl.evaluation.benchmarks.score import judge_all
from vlm_rl.grading.grader import Grader
from vlm_rl.templates import Template
from vlm_rl.types import Problem

Record = Mapping[str, Any]
# A problem's category and meta, under the names by which its benchmark reports.
_CATEGORY = {
    "mathvista": "task",
    "mathvision": "subject",
    "mathverse": "subject",
    "logicvista": "skill",
    "wemath": "concept",
    "dynamath": "subject",
    "math500": "subject",
    "minerva": "type",
    "olympiadbench": "subfield",
}
_META = {name: name for name in ("level", "skills", "version", "subfield", "kind")} | {"key": "step"}
_QUESTION_TYPES = {"mathvista": ("free_form", "multi_choice"), "mathverse": ("free-form", "multi-choice")}


def benchmark_of(problems: Sequence[Problem]) -> Benchmark | None:
    """The benchmark that all of the problems come from, if it is a known one."""
    sources = {problem.source for problem in problems}
    return BENCHMARKS.get(sources.pop()) if len(sources) == 1 else None


def rule_of(problems: Sequence[Problem], mode: Mode) -> str:
    """strict, official, or emulated: the published rule with rules in the place of its judge model."""
    benchmark = benchmark_of(problems)
    return "emulated" if mode == "official" and benchmark is not None and benchmark.emulated else mode


def question_of(problem: Problem) -> Question:
    """The annotated row behind a prepared problem; MathVista's gold becomes its option's text again."""
    meta = problem.meta
    gold, kind = problem.answer, problem.answer_type
    if problem.source == "mathvista" and kind == "choice":
        gold = problem.choices[ord(gold) - ord("A")]
    if problem.source == "mathvista" and problem.choices:
        kind = "choice"  # also where the gold is none of the options (pids 168 and 849)
    if problem.source == "mathvista" and meta.get("answer_type") == "list":
        kind = "list"
    group = meta.get("seed", meta.get("problem", ""))
    part = meta.get("variant", str(meta.get("key", "")).rpartition("_")[2])
    known = {name: meta[name] for name in ("precision", "tolerance", "unit") if meta.get(name) is not None}
    others = tuple(meta.get("alternatives") or ())
    return Question(
        problem.id,
        gold,
        kind,
        problem.choices,
        known,
        _facets(problem),
        problem=str(group),
        part=str(part),
        other_golds=others,
    )


def _facets(problem: Problem) -> dict[str, tuple[str, ...]]:
    """What the benchmark reports by, under its own names: the same tables as `vlm-rl score` prints."""
    meta = problem.meta
    values = {facet: meta.get(name) for name, facet in _META.items()} | meta.get("reported_by", {})
    values[_CATEGORY.get(problem.source, "category")] = problem.category
    if problem.source in _QUESTION_TYPES:
        has_choices = problem.answer_type == "choice" or bool(problem.choices)
        values["question_type"] = _QUESTION_TYPES[problem.source][has_choices]
    if problem.source == "mathvista":
        values["answer_type"] = meta.get("answer_type")
    if problem.source == "dynamath":
        values["answer_type"] = "multiple choice" if problem.answer_type == "choice" else problem.answer_type
    return {facet: _values(value) for facet, value in values.items() if value not in (None, "", [], ())}


def _values(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def official_judgements(
    problems: Sequence[Problem], texts: Sequence[Sequence[str]], *, grader: Grader, template: Template
) -> list[list[Judgement]]:
    """Per problem the published rule's opinion on each of its responses. The problems are one benchmark's."""
    benchmark = benchmark_of(problems)
    assert benchmark is not None
    answers = [
        Answer(problem.id, text, sample)
        for problem, group in zip(problems, texts, strict=True)
        for sample, text in enumerate(group)
    ]
    questions = [question_of(problem) for problem in problems]
    rows = iter(judge_all(benchmark, questions, answers, mode="official", grader=grader, template=template))
    return [[next(rows).judgement for _ in group] for group in texts]


def benchmark_scores(problems: Sequence[Problem], records: Sequence[Record]) -> dict[str, Any]:
    """What the benchmark reports of these verdicts: its scores, their tables, its headline; {} for other sets."""
    benchmark = benchmark_of(problems)
    if benchmark is None:
        return {}
    questions = {problem.id: question_of(problem) for problem in problems}
    rows = [
        Row(
            questions[record["problem_id"]],
            Answer(record["problem_id"], record["response"], record["sample_index"]),
            Judgement(record["verdict"], record["extracted"], record["reason"]),
            has_box=record["has_box"],
        )
        for record in records
    ]
    return {
        "benchmark": benchmark.name,
        "headline": benchmark.headline,
        "scores": scores(benchmark.name, rows),
        "headline_parts": headline_parts(benchmark.name, rows),
        "by": facet_tables(rows),
    }
