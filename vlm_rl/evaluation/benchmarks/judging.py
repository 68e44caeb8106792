"""Judge responses to a benchmark's problems by one of two rules, and sum up.

strict: the final box after the reasoning, compared by this project's grader; no box is wrong. official: the published
rule of the benchmark. Where that needs a judge model and none is given, rules replace it, and the result is called
emulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    JudgedResponse,
    Judgement,
    Mode,
    Response,
    authors_gold,
)
from vlm_rl.evaluation.benchmarks.scores import accuracy_and_pass, facet_tables, health
from vlm_rl.grading.grader import GRADER_VERSION, Grader, task_of
from vlm_rl.templates import TEMPLATES, Template, fenced, states_answer
from vlm_rl.types import Problem

if TYPE_CHECKING:  # it loads an HTTP client
    from vlm_rl.evaluation.benchmarks.judge_model import JudgeModel

Answered = tuple[Problem, Response]


def matched(
    benchmark: Benchmark, problems: Sequence[Problem], responses: Sequence[Response]
) -> tuple[list[Answered], list[str]]:
    """Return the responses with their problems, and the ids that no problem has.

    Raises UserError if no response belongs to a problem, and for files that state different golds.
    """
    known = {benchmark.own_id(problem): problem for problem in problems}
    answered = [(known[response.id], response) for response in responses if response.id in known]
    if not answered:
        raise UserError(
            f"none of the {len(responses)} responses belongs to one of the {len(known)} annotated questions of "
            f"{benchmark.name}: the responses' ids begin {', '.join(response.id for response in responses[:3])}, "
            f"the annotations' {', '.join(list(known)[:3])}; give the annotations of the questions that were answered"
        )
    other = [
        (response, gold)
        for problem, response in answered
        if response.gold not in (None, gold := authors_gold(problem))
    ]
    if 10 * len(other) > len(answered):
        response, gold = other[0]
        raise UserError(
            f"{len(other)} of {len(answered)} responses name a different right answer than the annotations, as "
            f"{response.id}: {response.gold!r} and {gold!r}. The two files are about different questions: give files "
            "that fit. A file of one trial must have the trial in its name (trial3.json) or a column trial"
        )
    return answered, sorted({response.id for response in responses if response.id not in known})


def judge(
    benchmark: Benchmark,
    answered: Sequence[Answered],
    *,
    mode: Mode,
    grader: Grader,
    template: Template,
    judge_model: JudgeModel | None = None,
) -> list[JudgedResponse]:
    """Judge responses, in their order.

    Args:
        mode: strict or official, as in the module's docstring.
        template: where the strict rule looks for the answer.
        judge_model: is asked what the published rule asks a model.
    """
    if mode == "official" and judge_model is not None:
        judgements = judge_model.judgements(benchmark, answered)
    elif mode == "official":
        opinions = [benchmark.rule.judgement(problem, response) for problem, response in answered]
        texts = {place: opinion for place, opinion in enumerate(opinions) if isinstance(opinion, str)}
        boxed = [
            (problem, _as_response(problem, text))
            for place, text in texts.items()
            for problem, _ in [answered[place]]
        ]
        graded = dict(zip(texts, _graded(boxed, grader, TEMPLATES["plain"], allows_undone=True), strict=True))
        judgements = [
            opinion if isinstance(opinion, Judgement) else graded[place] for place, opinion in enumerate(opinions)
        ]
    else:
        judgements = _graded([(problem, response.text) for problem, response in answered], grader, template)
    return [
        JudgedResponse(
            problem,
            response,
            judgement,
            states_answer(response.text, template, is_program=problem.answer_type == "code"),
            benchmark.cluster_of(problem),
        )
        for (problem, response), judgement in zip(answered, judgements, strict=True)
    ]


def _as_response(problem: Problem, answer: str) -> str:
    """Return a response that says nothing but this answer."""
    return fenced(answer) if problem.answer_type == "code" else rf"\boxed{{{answer}}}"


def _graded(
    pairs: Sequence[tuple[Problem, str]], grader: Grader, template: Template, *, allows_undone: bool = False
) -> list[Judgement]:
    tasks = [task_of(problem, text, template) for problem, text in pairs]
    grades = grader.grade_many([replace(task, allows_undone=allows_undone) for task in tasks])
    return [Judgement(grade.verdict, grade.extracted, grade.reason) for grade in grades]


def rule_name(benchmark: Benchmark | None, mode: Mode, judge_model: JudgeModel | None = None) -> str:
    """Return strict, official, or emulated: the published rule with our rules in the place of its judge model.

    With a judge model it is official, and names that model.
    """
    if judge_model is not None:
        return f"{mode}, judge {judge_model.name}"
    return "emulated" if mode == "official" and benchmark is not None and benchmark.rule.needs_judge_model else mode


def judge_facts(
    benchmark: Benchmark | None, mode: Mode, judge_model: JudgeModel | None, cost: Mapping[str, int]
) -> dict[str, Any]:
    """Describe the judge model, or its emulation, for a summary; {} for a rule without one.

    Args:
        benchmark: None where the problems belong to none.
        mode: of the scoring.
        judge_model: that was asked; None if its rule was emulated.
        cost: what it took, by chat_endpoint.batch.COSTS.
    """
    if benchmark is None or mode != "official" or not benchmark.rule.needs_judge_model:
        return {}
    published = benchmark.rule.judge
    theirs = {"authors_model": published.model, "words": published.source} if published else {}
    if judge_model is None:
        emulation = benchmark.rule.emulation
        return {"emulation": emulation} if emulation else {}
    return {"judge": {"model": judge_model.name, **theirs, **cost}}


def benchmark_scores(benchmark: Benchmark, judged: Sequence[JudgedResponse]) -> dict[str, Any]:
    """Return the benchmark's scores, the parts of their headline's mean, and its tables by facet."""
    return {
        "benchmark": benchmark.name,
        "headline": benchmark.report.headline,
        "scores": (benchmark.report.scores or accuracy_and_pass)(judged),
        "headline_parts": benchmark.report.headline_parts(judged),
        "by": facet_tables(benchmark, judged),
    }


def summary_of(
    benchmark: Benchmark,
    judged: Sequence[JudgedResponse],
    *,
    mode: Mode,
    num_problems: int,
    template: str,
    left_out: Sequence[str] = (),
    judge_model: JudgeModel | None = None,
) -> dict[str, Any]:
    """Return everything that is reported about judged responses, as plain JSON.

    Args:
        num_problems: the annotated ones, with a response or without.
        template: name of the template by which the strict rule looked for the answer.
        left_out: ids of responses that no problem has.
        judge_model: was asked for the verdicts.
    """
    is_official = mode == "official"
    shipped = sum(item.response.extraction is not None for item in judged) if is_official else 0
    rule = rule_name(benchmark, mode, judge_model)
    published = benchmark.rule.judge
    if rule == "emulated" and shipped == len(judged) and published and published.takes_extractions:
        rule = "official"
    return {
        "mode": mode,
        "rule": rule,
        **(
            judge_facts(benchmark, mode, judge_model, judge_model.cost if judge_model else {})
            if rule != "official"
            else {}
        ),
        "grader_version": GRADER_VERSION,
        "template": None if is_official else template,
        "num_questions": num_problems,
        "missing": num_problems - len({item.problem.id for item in judged}),
        "left_out": list(left_out),
        "shipped_extractions": shipped,
        **health(judged),
        **benchmark_scores(benchmark, judged),
        "may_differ": [item.response.id for item in judged if item.judgement.note.startswith("may differ")],
        **_by_published_verdicts(judged),
    }


def _by_published_verdicts(judged: Sequence[JudgedResponse]) -> dict[str, Any]:
    """Return the accuracy by the file's own verdicts, if all have one, and what is judged differently here."""
    verdicts = [item.response.published for item in judged]
    if not judged or None in verdicts:
        return {}
    return {
        "published_accuracy": sum(map(bool, verdicts)) / len(judged),
        "judged_otherwise": [item.response.id for item in judged if item.response.published != item.correct],
    }


def response_record(benchmark: Benchmark, item: JudgedResponse) -> dict[str, Any]:
    """Return one judged response as plain JSON: a score can be traced to these."""
    facets = benchmark.facet_values(item.problem).values()
    return {
        "id": item.response.id,
        "sample": item.response.sample,
        "gold": authors_gold(item.problem),
        "extracted": item.judgement.extracted,
        "verdict": item.judgement.verdict,
        "reason": item.judgement.reason,
        "note": item.judgement.note,
        "has_box": item.has_box,
        "published": item.response.published,
        "length": item.response.length,
        "cluster": item.cluster,
        "category": next((value for values in facets for value in values), ""),
    }
