"""Measure a policy on Problems: sampler, then grader, to one record per response and a summary.

    params = SamplingParams(temperature=0, max_tokens=256, responses=1)         # greedy
    evaluation = evaluate(problems, sampler=sampler, builder=builder, grader=grader, params=params, seed=0, step=60)
    run.write_eval("toy-test", 60, evaluation.records, evaluation.summary)

Scoring is strict (the final box after the reasoning, and none means wrong) unless `mode` is official: the published
rule of the benchmark that the problems come from. Under torchrun every rank
calls this with the same problems, answers its share, and gets the whole evaluation back.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from PIL import Image

from vlm_rl.data.images import DEFAULT_LIMITS, TEST_LIMITS, decode_image, encode_png
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import gather_shares, share
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import JudgedResponse, Judgement, Mode, PublishedPrompt, Response
from vlm_rl.evaluation.benchmarks.judging import benchmark_scores, rule_name
from vlm_rl.evaluation.benchmarks.registry import benchmark_of
from vlm_rl.evaluation.journal import Journal
from vlm_rl.evaluation.pipeline import overlapped
from vlm_rl.grading.grader import GRADER_VERSION, Grader, task_of
from vlm_rl.samplers.base import Sampler, SamplingParams
from vlm_rl.stats import random_derangement, score_interval
from vlm_rl.templates import Template, boxes
from vlm_rl.types import Grade, Problem, Prompt, Rollout

ImageMode = Literal["real", "blank", "shuffled"]
Record = dict[str, Any]

_GREY = (128, 128, 128)
_KEPT_IMAGE_BYTES = 32 * 2**20
_SHUFFLES = 20


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What one policy answered on one set, and how well."""

    records: list[Record]  # the columns of runs.EVAL_SCHEMA, problems in their order, samples 0 .. k-1
    summary: dict[str, Any]  # plain JSON; `summarise` and `evaluate` say what is in it


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
    wording: PublishedPrompt | None = None,
) -> Evaluation:
    """Answer every problem `params.responses` times (the k of avg@k) and grade the answers.

    `images` other than real is a control: see `with_images`. While `batch_size` prompts are answered, the next ones
    are built and the last ones graded, beside the engine: three times as many are in memory.
    `advance(n, note=...)` is called when n more of this rank's problems are done, with the score so far; `journal`
    keeps finished problems, and those that it already holds are not answered again; `wording` asks in a benchmark's
    own words. Beside `summarise`'s numbers, and those of the problems' benchmark, the summary holds how they came
    about: mode, rule, images, sampling, seed, step, template, sampler, policy and grader version.
    Raises UserError for problems that cannot be rendered or do not fit.
    """
    shown = with_images(problems, images, seed=seed)
    if not shown:
        raise UserError(f"nothing to evaluate: {len(problems)} problems, none of which can be shown {images} images")
    if mode == "official" and benchmark_of(shown) is None:
        raise UserError("mode official needs problems of one known benchmark; these are of " + _sources(shown))
    mine = share(shown)
    answered = dict(journal.done) if journal is not None else {}
    left = [problem for problem in mine if problem.id not in answered]
    if advance is not None and len(left) < len(mine):
        advance(len(mine) - len(left), note=_running(answered))
    batches = [left[start : start + batch_size] for start in range(0, len(left), batch_size)]
    answering = overlapped(
        batches,
        before=lambda batch: [builder.build(wording.worded(problem) if wording else problem) for problem in batch],
        heavy=lambda prompts: sampler.generate(prompts, params, seed=seed, step=step),
        after=partial(
            _grade_batch, grader=grader, template=builder.template, published=mode == "official", journal=journal
        ),
    )
    with closing(answering):
        for batch, graded in zip(batches, answering, strict=True):
            answered |= zip((problem.id for problem in batch), graded, strict=True)
            if advance is not None:
                advance(len(batch), note=_running(answered))
    records = [record for group in gather_shares([answered[p.id] for p in mine]) for record in group]
    _attach_images(records, shown, samples=params.responses)
    origin = {
        "mode": mode,
        "rule": rule_of(shown, mode),
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
    return Evaluation(records, summarise(records, seed=seed) | benchmark_scores(shown, records) | origin)


def _grade_batch(
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Rollout]],
    *,
    grader: Grader,
    template: Template,
    published: bool,
    journal: Journal | None,
) -> list[list[Record]]:
    """The records of answered problems, and on the disk too where there is a journal."""
    graded = grade_groups(problems, prompts, groups, grader=grader, template=template)
    if published:
        graded = _by_published_rule(problems, graded, grader=grader, template=template)
    if journal is not None:
        journal.add(graded)
    return graded


def _by_published_rule(
    problems: Sequence[Problem], groups: Sequence[Sequence[Record]], *, grader: Grader, template: Template
) -> list[list[Record]]:
    """The same records with the verdicts of the benchmark's published rule."""
    texts = [[record["response"] for record in group] for group in groups]
    judged = official_judgements(problems, texts, grader=grader, template=template)
    return [
        [
            {
                **record,
                "verdict": opinion.verdict,
                "extracted": opinion.extracted,
                "path": "official",
                "reason": f"{opinion.reason}; {opinion.note}" if opinion.note else opinion.reason,
            }
            for record, opinion in zip(group, opinions, strict=True)
        ]
        for group, opinions in zip(groups, judged, strict=True)
    ]


def _running(answered: Mapping[str, Sequence[Record]]) -> str:
    """The score so far, for the progress line."""
    verdicts = [record["verdict"] == "correct" for group in answered.values() for record in group]
    return f"accuracy {np.mean(verdicts):.3f}" if verdicts else ""


def _sources(problems: Sequence[Problem]) -> str:
    return ", ".join(sorted({problem.source or "no named source" for problem in problems}))


def grade_groups(
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Rollout]],
    *,
    grader: Grader,
    template: Template,
) -> list[list[Record]]:
    """Per problem the records of its responses, graded with the prompt's prefill in front, images left out."""
    pairs = list(zip(problems, prompts, groups, strict=True))
    tasks = [
        task_of(problem, prompt.prefill + rollout.text, template)
        for problem, prompt, group in pairs
        for rollout in group
    ]
    grades = iter(grader.grade_many(tasks))
    return [
        [_record(problem, prompt, rollout, next(grades)) for rollout in group] for problem, prompt, group in pairs
    ]


def summarise(records: Sequence[Record], *, seed: int) -> dict[str, Any]:
    """Scores of an evaluation as plain JSON; a mean over nothing is None.

    accuracy: avg@k, the mean over problems of the share of right samples; interval: its 95 % interval over
    problems (statistics.score_interval); *_share: of responses; timeouts and errors: responses that the grader could
    not judge (they count as wrong); *_length: tokens, the end-of-sequence token included.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        right[record["problem_id"]].append(record["verdict"] == "correct")
    score_P = np.array([np.mean(samples) for samples in right.values()])
    correct = np.array([record["verdict"] == "correct" for record in records], dtype=bool)
    length = np.array([record["length"] for record in records], dtype=np.float64)
    return {
        "num_problems": len(right),
        "num_responses": len(records),
        "k": max(map(len, right.values()), default=0),
        "accuracy": _mean(score_P),
        "interval": list(score_interval(score_P, seed=seed)) if len(score_P) else None,
        "box_share": _mean([record["has_box"] for record in records]),
        "truncated_share": _mean([record["stop_reason"] == "length" for record in records]),
        "timeouts": sum(record["verdict"] == "timeout" for record in records),
        "errors": sum(record["verdict"] == "error" for record in records),
        "mean_length": _mean(length),
        "median_length": _quantile(length, 0.5),
        "p90_length": _quantile(length, 0.9),
        "mean_length_correct": _mean(length[correct]),
        "mean_length_wrong": _mean(length[~correct]),
    }


def score_line(name: str, summary: Mapping[str, Any]) -> str:
    """One set's result with what it takes to believe it; the benchmark's own number where that is another."""
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


# -- controls ------------------------------------------------------------------------------------


def with_images(problems: Sequence[Problem], how: ImageMode, *, seed: int) -> list[Problem]:
    """The problems with other images: what a policy that does not look scores just as well on.

    blank: each image a grey one of its own size. shuffled: every problem gets the images of another
    problem that has as many, by a random derangement of the set (equal images are kept apart where the
    set allows it). Problems that cannot be shown so are left out: those without images, and for
    shuffled those that are alone with their number of images.
    """
    if how == "real":
        return list(problems)
    if how == "blank":
        return [replace(problem, images=_blank_images(problem)) for problem in problems if problem.images]
    donors = _donors(problems, np.random.default_rng(seed))
    return [replace(problem, images=problems[donors[i]].images) for i, problem in enumerate(problems) if i in donors]


def _donors(problems: Sequence[Problem], rng: np.random.Generator) -> dict[int, int]:
    """Index of a problem -> index of the one whose images it gets."""
    by_count: dict[int, list[int]] = defaultdict(list)
    for index, problem in enumerate(problems):
        if problem.images:
            by_count[len(problem.images)].append(index)
    pictures = {index: _digests(problems[index]) for members in by_count.values() for index in members}
    donors: dict[int, int] = {}
    for members in by_count.values():
        if len(members) < 2:
            continue
        tries = [random_derangement(len(members), rng) for _ in range(_SHUFFLES)]
        shown = [pictures[index] for index in members]
        best = min(tries, key=lambda order: sum(shown[i] == shown[j] for i, j in enumerate(order)))
        donors |= {members[i]: members[j] for i, j in enumerate(best.tolist())}
    return donors


def _blank_images(problem: Problem) -> tuple[bytes, ...]:
    limits = TEST_LIMITS if problem.test_only else DEFAULT_LIMITS
    sizes = [
        decode_image(data, where=f"problem {problem.id!r} image {index}", limits=limits).size
        for index, data in enumerate(problem.images)
    ]
    return tuple(encode_png(Image.new("RGB", size, _GREY)) for size in sizes)


# -- records -------------------------------------------------------------------------------------


def _record(problem: Problem, prompt: Prompt, rollout: Rollout, grade: Grade) -> Record:
    response = prompt.prefill + rollout.text
    return {
        "problem_id": problem.id,
        "sample_index": rollout.index,
        "prompt_text": prompt.text,
        "response": response,
        "length": len(rollout.ids),
        "stop_reason": rollout.stop_reason,
        "extracted": grade.extracted,
        "gold": problem.answer,
        "verdict": grade.verdict,
        "path": grade.path,
        "reason": grade.reason,
        "has_box": bool(boxes(response)),  # closed, anywhere: whether it counts is the verdict's business
        "category": problem.category,
        "image_sha256": _digests(problem),
        "image": None,
        "question": problem.question,
        "image_sizes": [f"{image.width}x{image.height}" for image in prompt.images],
    }


def _digests(problem: Problem) -> list[str]:
    return [hashlib.sha256(data).hexdigest() for data in problem.images]


def _attach_images(records: Sequence[Record], problems: Sequence[Problem], *, samples: int) -> None:
    """Store the images that were shown, where that stays small: `samples` rows repeat each."""
    images: dict[str, list[bytes]] = {}
    size = 0
    for problem in problems:
        images[problem.id] = list(problem.images)
        size += samples * sum(map(len, images[problem.id]))
        if size > _KEPT_IMAGE_BYTES:
            return
    for record in records:
        record["image"] = images[record["problem_id"]]


def _mean(values: Sequence[Any] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _quantile(values: np.ndarray, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None
