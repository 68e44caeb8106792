"""Measure a policy on problems: sampler, then grader, to one record per response and a summary.

    params = SamplingParams(temperature=0, max_tokens=256, responses=1)         # greedy
    evaluation = evaluate(problems, sampler=sampler, builder=builder, grader=grader, params=params, seed=0, step=60)
    run.write_eval("toy-test", 60, evaluation.records, evaluation.summary)

Scoring is strict (the final box after the reasoning, and none means wrong) unless `mode` is official: the published
rule of the benchmark that the problems come from. Under torchrun every rank calls `evaluate` with the same problems,
answers its share, and gets the whole evaluation back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import all_gather, gather_shares, share
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    JudgedResponse,
    Judgement,
    Mode,
    PublishedPrompt,
    Response,
)
from vlm_rl.evaluation.benchmarks.judge_model import JudgeModel
from vlm_rl.evaluation.benchmarks.judging import benchmark_scores, judge, judge_facts, rule_name
from vlm_rl.evaluation.benchmarks.registry import benchmark_of
from vlm_rl.evaluation.image_controls import ImageMode, image_digests, with_images
from vlm_rl.evaluation.journal import Journal
from vlm_rl.evaluation.pipeline import overlapped
from vlm_rl.grading.grader import GRADER_VERSION, Grader, task_of
from vlm_rl.run.eval_record import EvalRecord
from vlm_rl.samplers.base import Sampler, SampleRequest, SamplingParams
from vlm_rl.samplers.remote.servers import ServersGoneError
from vlm_rl.stats import score_interval
from vlm_rl.templates import Template, states_answer
from vlm_rl.types import Grade, Problem, Prompt, Rollout, name_videos

_KEPT_IMAGE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What one policy answered on one set, and how well."""

    records: list[EvalRecord]  # problems in their order, samples 0 .. k-1
    summary: dict[str, Any]  # plain JSON; `summarise` and `evaluate` say what it holds


def evaluate(
    problems: Sequence[Problem],
    *,
    sampler: Sampler,
    builder: PromptBuilder,
    grader: Grader,
    params: SamplingParams,
    seed: int,
    step: int,
    images: ImageMode = "real",
    batch_size: int = 64,
    advance: Callable[..., object] | None = None,
    journal: Journal | None = None,
    mode: Mode = "strict",
    prompt: PublishedPrompt | None = None,
    judge_model: JudgeModel | None = None,
) -> Evaluation:
    """Answer every problem `params.responses` times (the k of avg@k) and grade the responses.

    Beside the numbers of `summarise`, and those of the problems' benchmark, the summary holds how they came about:
    mode, rule, images, sampling, seed, step, template, sampler, policy and grader version.

    Args:
        images: other than real is a control; see `with_images`.
        batch_size: prompts that are answered together. Three times as many are in memory: while a batch is answered,
            the next one is built and the last one graded.
        advance: called as `advance(n, note=...)` when n more of this rank's problems are done, with the score so far.
        journal: keeps finished problems; those that it already holds are not answered again.
        mode: strict, or official for the published rule of the problems' benchmark.
        prompt: asks in a benchmark's own words.
        judge_model: takes the place of the published rule's judge, with mode official.

    Raises:
        UserError: problems that cannot be rendered or do not fit, or official for problems of no known benchmark.
        ServersGoneError: on every rank, where one has lost all its rollout servers.
    """
    shown = with_images(problems, images, seed=seed)
    if not shown:
        raise UserError(
            f"nothing to evaluate: {len(problems)} problems, none of which can be shown {images} images; "
            "use a set with images"
        )
    benchmark = benchmark_of(shown)
    if mode == "official" and benchmark is None:
        sources = ", ".join(sorted({problem.source or "no named source" for problem in shown}))
        raise UserError(
            f"mode official needs problems of one known benchmark; these are of {sources}; use mode strict"
        )
    grader.check_programs(shown)
    mine = share(shown)
    answered = dict(journal.done) if journal is not None else {}
    left = [problem for problem in mine if problem.id not in answered]
    if advance is not None and len(left) < len(mine):
        advance(len(mine) - len(left), note=_score_so_far(answered))
    batches = [left[start : start + batch_size] for start in range(0, len(left), batch_size)]
    batches += [[]] * (max(all_gather(len(batches))) - len(batches))  # ranks that share an engine answer together
    official = benchmark if mode == "official" else None
    cost = dict(judge_model.cost) if judge_model is not None else {}
    answering = overlapped(
        batches,
        before=lambda batch: [builder.build(prompt.applied(problem) if prompt else problem) for problem in batch],
        heavy=lambda prompts: sampler.generate(SampleRequest(prompts, params, seed=seed, step=step)),
        after=partial(
            _grade_batch,
            grader=grader,
            template=builder.template,
            official=official,
            journal=journal,
            judge_model=judge_model,
        ),
    )
    lost: ServersGoneError | None = None
    with closing(answering):
        try:
            for batch, graded in zip(batches, answering, strict=True):
                answered |= zip((problem.id for problem in batch), graded, strict=True)
                if advance is not None:
                    advance(len(batch), note=_score_so_far(answered))
        except ServersGoneError as error:
            lost = error
    if reasons := [reason for reason in all_gather(str(lost) if lost else "") if reason]:
        raise lost or ServersGoneError(reasons[0])  # on all ranks, which then save together
    records = [record for group in gather_shares([answered[p.id] for p in mine]) for record in group]
    if benchmark is not None:  # here, so that problems of an older journal have it too
        clusters = {problem.id: benchmark.cluster_of(problem) for problem in shown}
        records = [replace(record, cluster=clusters[record.problem_id]) for record in records]
    if judge_model is not None:
        spent = all_gather({name: number - cost[name] for name, number in judge_model.cost.items()})
        cost = {name: sum(rank_cost[name] for rank_cost in spent) for name in cost}
    conditions = {
        "mode": mode,
        "rule": rule_name(benchmark, mode, judge_model),
        **judge_facts(benchmark, mode, judge_model, cost),
        "images": images,
        "left_out": len(problems) - len(shown),  # by the control
        "sampling": asdict(params),
        "seed": seed,
        "step": step,
        "template": builder.template.name,
        "sampler": sampler.name,
        "policy_version": sampler.policy_version,
        "grader_version": GRADER_VERSION,
    }
    summary = summarise(records) | _benchmark_scores(benchmark, shown, records) | conditions
    return Evaluation(_with_kept_images(records, shown, samples=params.responses), summary)


def _grade_batch(
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Rollout]],
    *,
    grader: Grader,
    template: Template,
    official: Benchmark | None,
    journal: Journal | None,
    judge_model: JudgeModel | None,
) -> list[list[EvalRecord]]:
    """Return the records of answered problems; a journal has them on the disk as well."""
    graded = grade_groups(problems, prompts, groups, grader=grader, template=template)
    if official is not None:
        graded = by_official_rule(
            official, problems, graded, grader=grader, template=template, judge_model=judge_model
        )
    if journal is not None:
        journal.add(graded)
    return graded


def grade_groups(
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Rollout]],
    *,
    grader: Grader,
    template: Template,
) -> list[list[EvalRecord]]:
    """Return per problem the records of its responses, graded with the prompt's prefill in front, without images.

    Args:
        problems: those that were answered.
        prompts: how each problem was asked, in the same order.
        groups: the responses to each problem, in the same order.
        grader: compares the answers with the golds.
        template: where the answer must be in a response.
    """
    answered = list(zip(problems, prompts, groups, strict=True))
    tasks = [
        task_of(problem, prompt.prefill + rollout.text, template)
        for problem, prompt, group in answered
        for rollout in group
    ]
    grades = iter(grader.grade_many(tasks))
    return [
        [_record(problem, prompt, rollout, next(grades)) for rollout in group] for problem, prompt, group in answered
    ]


def by_official_rule(
    benchmark: Benchmark,
    problems: Sequence[Problem],
    groups: Sequence[Sequence[EvalRecord]],
    *,
    grader: Grader,
    template: Template,
    judge_model: JudgeModel | None = None,
) -> list[list[EvalRecord]]:
    """Return the records with the verdicts of the benchmark's published rule.

    Args:
        benchmark: the benchmark that all problems come from.
        problems: those that were answered.
        groups: the records of each problem's responses, in the same order.
        grader: compares what the rule leaves to it.
        template: where the strict rule would look for the answer.
        judge_model: is asked what the rule asks a model.
    """
    answered = [
        (problem, Response(problem.id, record.response, record.sample_index))
        for problem, group in zip(problems, groups, strict=True)
        for record in group
    ]
    judged = iter(
        judge(benchmark, answered, mode="official", grader=grader, template=template, judge_model=judge_model)
    )
    return [[_judged_officially(record, next(judged).judgement) for record in group] for group in groups]


def _judged_officially(record: EvalRecord, judgement: Judgement) -> EvalRecord:
    return replace(
        record,
        verdict=judgement.verdict,
        extracted=judgement.extracted,
        path="official",
        reason=f"{judgement.reason}; {judgement.note}" if judgement.note else judgement.reason,
    )


def _record(problem: Problem, prompt: Prompt, rollout: Rollout, grade: Grade) -> EvalRecord:
    response = prompt.prefill + rollout.text
    return EvalRecord(
        problem_id=problem.id,
        sample_index=rollout.index,
        prompt_text=prompt.text,
        response=response,
        length=len(rollout.ids),
        stop_reason=rollout.stop_reason,
        extracted=grade.extracted,
        gold=problem.answer,
        verdict=grade.verdict,
        path=grade.path,
        reason=grade.reason,
        has_box=states_answer(response, is_program=problem.answer_type == "code"),
        category=problem.category,
        image_sha256=image_digests(problem),
        image=None,
        question=name_videos(problem.question, problem.videos),
        image_sizes=[f"{image.width}x{image.height}" for image in prompt.pictures],
    )


def _with_kept_images(
    records: Sequence[EvalRecord], problems: Sequence[Problem], *, samples: int
) -> list[EvalRecord]:
    """Return the records with the images that were shown, where that stays small: `samples` rows repeat each."""
    images: dict[str, list[bytes]] = {}
    size = 0
    for problem in problems:
        images[problem.id] = list(problem.images)
        size += samples * sum(map(len, images[problem.id]))
        if size > _KEPT_IMAGE_BYTES:
            return list(records)
    return [replace(record, image=images[record.problem_id]) for record in records]


# -- scores ----------------------------------------------------------------------------------------


def _benchmark_scores(
    benchmark: Benchmark | None, problems: Sequence[Problem], records: Sequence[EvalRecord]
) -> dict[str, Any]:
    """Return what the benchmark reports of these verdicts; {} for other sets."""
    if benchmark is None:
        return {}
    problem_of = {problem.id: problem for problem in problems}
    judged = [
        JudgedResponse(
            problem_of[record.problem_id],
            Response(record.problem_id, record.response, record.sample_index),
            Judgement(record.verdict, record.extracted, record.reason),
            has_box=record.has_box,
            cluster=record.cluster,
        )
        for record in records
    ]
    return benchmark_scores(benchmark, judged)


def _score_so_far(answered: Mapping[str, Sequence[EvalRecord]]) -> str:
    """Return the note of the progress line."""
    verdicts = [record.correct for group in answered.values() for record in group]
    return f"accuracy {np.mean(verdicts):.3f}" if verdicts else ""


def summarise(records: Sequence[EvalRecord]) -> dict[str, Any]:
    """Return the scores of an evaluation as plain JSON; a mean over nothing is None.

    accuracy            avg@k: the mean over problems of the share of right samples
    interval            its 95 % interval over problems, or their clusters (stats.score_interval)
    *_share             of the responses
    timeouts, errors    responses that the grader could not judge; they count as wrong
    *_length            tokens, the end-of-sequence token included
    """
    right: dict[str, list[bool]] = defaultdict(list)
    clusters: dict[str, str] = {}
    for record in records:
        right[record.problem_id].append(record.correct)
        clusters[record.problem_id] = record.cluster or record.problem_id
    score_P = np.array([np.mean(samples) for samples in right.values()])
    correct = np.array([record.correct for record in records], dtype=bool)
    length = np.array([record.length for record in records], dtype=np.float64)
    return {
        "num_problems": len(right),
        "num_responses": len(records),
        "k": max(map(len, right.values()), default=0),
        "accuracy": _mean(score_P),
        "interval": list(score_interval(score_P, [*clusters.values()])) if len(score_P) else None,
        "box_share": _mean([record.has_box for record in records]),
        "truncated_share": _mean([record.stop_reason == "length" for record in records]),
        "timeouts": sum(record.verdict == "timeout" for record in records),
        "errors": sum(record.verdict == "error" for record in records),
        "mean_length": _mean(length),
        "median_length": _quantile(length, 0.5),
        "p90_length": _quantile(length, 0.9),
        "mean_length_correct": _mean(length[correct]),
        "mean_length_wrong": _mean(length[~correct]),
    }


def score_line(name: str, summary: Mapping[str, Any]) -> str:
    """Return one set's result as a line: the benchmark's own number first, then what it takes to believe it."""
    k = f" avg@{summary['k']}" if summary["k"] > 1 else ""
    headline = summary.get("headline", "accuracy")
    own = summary["scores"][headline] if headline != "accuracy" else None
    return (
        f"{name}: "
        + (f"{headline} {_with_ends(own['score'], own['interval'])} of {own['n']}, " if own and own["n"] else "")
        + f"accuracy{k} {_with_ends(summary['accuracy'], summary['interval'])}, n {summary['num_problems']}, "
        f"box {summary['box_share']:.2f}, truncated {summary['truncated_share']:.2f}, "
        f"timeouts {summary['timeouts']}, errors {summary['errors']}, mean length {summary['mean_length']:.1f}"
    )


def _with_ends(score: float, interval: Sequence[float]) -> str:
    return f"{score:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _mean(values: Sequence[Any] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _quantile(values: np.ndarray, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None
