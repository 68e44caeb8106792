"""Graded responses as records: by the strict rule, by a benchmark's own, and with the images that were shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, Judgement, Response
from vlm_rl.evaluation.benchmarks.judge_model import JudgeModel
from vlm_rl.evaluation.benchmarks.judging import judge
from vlm_rl.evaluation.image_controls import image_digests
from vlm_rl.grading.grader import Grader, task_of
from vlm_rl.rewards.accuracy import AccuracyPart
from vlm_rl.run.eval_record import EvalRecord
from vlm_rl.run.turn_record import turns_column
from vlm_rl.templates import Template, states_answer
from vlm_rl.types import Grade, Problem, Prompt, Rollout, name_videos

_KEPT_IMAGE_BYTES = 32 * 2**20


def grade_groups(
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Rollout]],
    *,
    grader: Grader,
    template: Template,
    accuracy: AccuracyPart | None = None,
) -> list[list[EvalRecord]]:
    """Return per problem the records of its responses, graded with the prompt's prefill in front, without images.

    Args:
        problems: those that were answered.
        prompts: how each problem was asked, in the same order.
        groups: the responses to each problem, in the same order.
        grader: compares the answers with the golds.
        template: where the answer must be in a response.
        accuracy: the part of the reward that decides instead of the grader, where it applies.
    """
    answered = [
        (problem, prompt, rollout)
        for problem, prompt, group in zip(problems, prompts, groups, strict=True)
        for rollout in group
    ]
    texts = [prompt.prefill + rollout.text for _, prompt, rollout in answered]
    grades = grader.grade_many(
        [task_of(problem, text, template) for (problem, *_), text in zip(answered, texts, strict=True)]
    )
    if accuracy is not None:
        grades = accuracy.grades(answered, texts, grades)
    records = iter([_record(*item, grade, template) for item, grade in zip(answered, grades, strict=True)])
    return [[next(records) for _ in group] for group in groups]


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


def _record(problem: Problem, prompt: Prompt, rollout: Rollout, grade: Grade, template: Template) -> EvalRecord:
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
        has_box=states_answer(response, template, is_program=problem.answer_type == "code"),
        category=problem.category,
        image_sha256=image_digests(problem),
        image=None,
        question=name_videos(problem.question, problem.videos),
        turns=turns_column(rollout) or None,
        image_sizes=[f"{image.width}x{image.height}" for image in prompt.pictures],
    )


def with_kept_images(records: Sequence[EvalRecord], problems: Sequence[Problem], *, samples: int) -> list[EvalRecord]:
    """Return the records with the images that were shown, where that stays small: `samples` rows repeat each."""
    images: dict[str, list[bytes]] = {}
    size = 0
    for problem in problems:
        images[problem.id] = list(problem.images)
        size += samples * sum(map(len, images[problem.id]))
        if size > _KEPT_IMAGE_BYTES:
            return list(records)
    return [replace(record, image=images[record.problem_id]) for record in records]
