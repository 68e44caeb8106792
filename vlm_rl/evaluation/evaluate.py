"""Measure a policy on problems: sampler, then grader, to one record per response and a summary.

    params = SamplingParams(temperature=0, max_tokens=256, responses=1)         # greedy
    asking = Asking(builder, sampler, params, seed=0, step=60)
    evaluation = evaluate(problems, asking, Judging(grader))
    run.write_eval("toy-test", 60, evaluation.records, evaluation.summary)

Scoring is strict (the final box after the reasoning, and none means wrong) unless the mode is official: the published
rule of the benchmark that the problems come from. On problems of no known benchmark a part of the reward in the role
accuracy decides, as in training. Under torchrun every rank calls `evaluate` with the same problems, answers its
share, and gets the whole evaluation back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from vlm_rl.distributed import all_gather, gather_shares, share
from vlm_rl.environments.host import EpisodeHost
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    Mode,
    PublishedPrompt,
)
from vlm_rl.evaluation.benchmarks.judge_model import JudgeModel
from vlm_rl.evaluation.benchmarks.judging import judge_facts, rule_name
from vlm_rl.evaluation.benchmarks.registry import benchmark_of
from vlm_rl.evaluation.image_controls import ImageMode, with_images
from vlm_rl.evaluation.journal import Journal
from vlm_rl.evaluation.pipeline import overlapped
from vlm_rl.evaluation.records import by_official_rule, grade_groups, with_kept_images
from vlm_rl.evaluation.scores import scores_of_benchmark, summarise
from vlm_rl.grading.grader import GRADER_VERSION, Grader
from vlm_rl.rewards.accuracy import BOX_REMEDY, AccuracyPart, check_boxes
from vlm_rl.run.eval_record import EvalRecord
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.remote.servers import all_served
from vlm_rl.templates import Template
from vlm_rl.types import Problem, Prompt, Rollout

Records = dict[str, list[EvalRecord]]  # problem id -> its responses


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What one policy answered on one set, and how well."""

    records: list[EvalRecord]  # problems in their order, samples 0 .. k-1
    summary: dict[str, Any]  # plain JSON; `summarise` and `evaluate` say what it holds


class PromptWriter(Protocol):
    """What an evaluation needs of a PromptBuilder."""

    @property
    def template(self) -> Template: ...
    @property
    def min_pixels(self) -> int: ...
    @property
    def max_pixels(self) -> int: ...
    def build(self, problem: Problem) -> Prompt: ...


class Answerer(Protocol):
    """What an evaluation needs of a Sampler."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> object: ...
    @property
    def policy_version(self) -> int: ...
    def generate(self, request: SampleRequest) -> list[list[Rollout]]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Asking:
    """How problems are asked."""

    builder: PromptWriter
    sampler: Answerer
    params: SamplingParams  # with k responses to each problem: the k of avg@k
    seed: int
    step: int
    images: ImageMode = "real"  # other than real is a control; see `with_images`
    prompt: PublishedPrompt | None = None  # asks in a benchmark's own words
    host: EpisodeHost | None = None  # answers between turns; None: a response is one turn

    def prompt_of(self, problem: Problem) -> Prompt:
        """Return the prompt of a problem.

        Raises UserError if it cannot be rendered, or if the environment shows nothing that could begin it.
        """
        asked_as = self.prompt.applied(problem) if self.prompt else problem
        if self.host is None:
            return self.builder.build(asked_as)
        return self.host.build(problem, seed=self.seed, asked_as=asked_as)

    def answers(self, asked: Sequence[tuple[Problem, Prompt]]) -> list[list[Rollout]]:
        """Return the responses to each prompt, which comes with its problem."""
        episodes = None
        if self.host is not None:
            episodes = self.host.episodes([problem for problem, _ in asked], seed=self.seed, step=self.step)
        prompts = [prompt for _, prompt in asked]
        return self.sampler.generate(
            SampleRequest(prompts, self.params, seed=self.seed, step=self.step, episodes=episodes)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Judging:
    """How responses are judged."""

    grader: Grader
    mode: Mode = "strict"  # official: the published rule of the problems' benchmark
    judge_model: JudgeModel | None = None  # takes the place of the published rule's judge, with mode official
    accuracy: AccuracyPart | None = None  # of the reward: decides on problems of no known benchmark

    def of_set(self, benchmark: Benchmark | None) -> Judging:
        """Return how a set is judged: a known benchmark keeps its own rule, so that its numbers stay comparable."""
        return self if benchmark is None else replace(self, accuracy=None)


def evaluate(
    problems: Sequence[Problem],
    asking: Asking,
    judging: Judging,
    *,
    batch_size: int = 64,
    advance: Callable[..., object] | None = None,
    journal: Journal | None = None,
) -> Evaluation:
    """Answer every problem `params.responses` times and grade the responses.

    Beside the numbers of `summarise`, and those of the problems' benchmark, the summary holds how they came about:
    mode, rule, images, sampling, seed, step, template, sampler, policy and grader version.

    Args:
        problems: the set.
        asking: how they are asked.
        judging: how the responses are judged.
        batch_size: prompts that are answered together. Three times as many are in memory: while a batch is answered,
            the next one is built and the last one graded.
        advance: called as `advance(n, note=...)` when n more of this rank's problems are done, with the score so far.
        journal: keeps finished problems; those that it already holds are not answered again.

    Raises:
        UserError: problems that cannot be rendered or do not fit, or official for problems of no known benchmark.
        ServersGoneError: on every rank, where one has lost all its rollout servers.
    """
    shown, benchmark = shown_problems(problems, asking, judging)
    judging = judging.of_set(benchmark)
    cost = dict(judging.judge_model.cost) if judging.judge_model is not None else {}
    answered = answer_share(
        share(shown), asking, judging, benchmark, batch_size=batch_size, advance=advance, journal=journal
    )
    records = gathered_records(answered, shown, benchmark)
    summary = {
        **summarise(records),
        **scores_of_benchmark(benchmark, shown, records),
        **conditions(asking, judging, benchmark, left_out=len(problems) - len(shown), cost_before=cost),
    }
    return Evaluation(with_kept_images(records, shown, samples=asking.params.responses), summary)


def shown_problems(
    problems: Sequence[Problem], asking: Asking, judging: Judging
) -> tuple[list[Problem], Benchmark | None]:
    """Return the problems as the policy sees them, and their benchmark, if it is a known one.

    Raises UserError if nothing is left to show, and if the mode is official without a benchmark.
    """
    shown = with_images(problems, asking.images, seed=asking.seed)
    if not shown:
        raise UserError(
            f"nothing to evaluate: {len(problems)} problems, none of which can be shown {asking.images} images; "
            "use a set with images"
        )
    benchmark = benchmark_of(shown)
    if judging.mode == "official" and benchmark is None:
        sources = ", ".join(sorted({problem.source or "no named source" for problem in shown}))
        raise UserError(
            f"mode official needs problems of one known benchmark; these are of {sources}; use mode strict"
        )
    judging.grader.check_programs(shown)
    check_boxes(shown, judging.accuracy, remedy=BOX_REMEDY)
    return shown, benchmark


def answer_share(
    mine: Sequence[Problem],
    asking: Asking,
    judging: Judging,
    benchmark: Benchmark | None,
    *,
    batch_size: int,
    advance: Callable[..., object] | None,
    journal: Journal | None,
) -> Records:
    """Answer and judge this rank's problems, except those that the journal holds. Arguments: see `evaluate`.

    Raises ServersGoneError on every rank, where one has lost all its rollout servers, so that all save together.
    """
    answered = dict(journal.done) if journal is not None else {}
    left = [problem for problem in mine if problem.id not in answered]
    if advance is not None and len(left) < len(mine):
        advance(len(mine) - len(left), note=_score_so_far(answered))
    batches = [left[start : start + batch_size] for start in range(0, len(left), batch_size)]
    batches += [[]] * (max(all_gather(len(batches))) - len(batches))  # ranks that share an engine answer together

    def judged(
        batch: Sequence[Problem], asked: Sequence[tuple[Problem, Prompt]], groups: Sequence[Sequence[Rollout]]
    ) -> list[list[EvalRecord]]:
        prompts = [prompt for _, prompt in asked]
        how = {"grader": judging.grader, "template": asking.builder.template}
        records = grade_groups(batch, prompts, groups, accuracy=judging.accuracy, **how)
        if judging.mode == "official" and benchmark is not None:
            records = by_official_rule(benchmark, batch, records, judge_model=judging.judge_model, **how)
        if journal is not None:
            journal.add(records)
        return records

    answering = overlapped(
        batches,
        before=lambda batch: [(problem, asking.prompt_of(problem)) for problem in batch],
        heavy=asking.answers,
        after=judged,
    )
    with all_served(), closing(answering):
        for batch, records in zip(batches, answering, strict=True):
            answered |= zip((problem.id for problem in batch), records, strict=True)
            if advance is not None:
                advance(len(batch), note=_score_so_far(answered))
    return answered


def gathered_records(answered: Records, shown: Sequence[Problem], benchmark: Benchmark | None) -> list[EvalRecord]:
    """Return the records of all ranks, in the problems' order.

    Args:
        answered: the records of this rank's share.
        shown: the problems of all ranks.
        benchmark: theirs, which says which problems were made from one.
    """
    mine = [answered[problem.id] for problem in share(shown)]
    records = [record for group in gather_shares(mine) for record in group]
    if benchmark is None:
        return records
    clusters = {problem.id: benchmark.cluster_of(problem) for problem in shown}
    return [replace(record, cluster=clusters[record.problem_id]) for record in records]


def conditions(
    asking: Asking,
    judging: Judging,
    benchmark: Benchmark | None,
    *,
    left_out: int,
    cost_before: Mapping[str, int],
) -> dict[str, Any]:
    """Return how the numbers of an evaluation came about, as plain JSON.

    Args:
        asking: how the problems were asked.
        judging: how the responses were judged.
        benchmark: of the problems.
        left_out: problems that a control cannot show.
        cost_before: what the judge model of this rank had cost before.
    """
    judge, mode = judging.judge_model, judging.mode
    cost: dict[str, int] = {}
    if judge is not None:
        spent = all_gather({name: number - cost_before[name] for name, number in judge.cost.items()})
        cost = {name: sum(rank_cost[name] for rank_cost in spent) for name in cost_before}
    return {
        "mode": mode,
        "rule": f"reward.{judging.accuracy.name}" if judging.accuracy else rule_name(benchmark, mode, judge),
        **judge_facts(benchmark, mode, judge, cost),
        "images": asking.images,
        "left_out": left_out,
        "sampling": asdict(asking.params),
        "seed": asking.seed,
        "step": asking.step,
        **({} if asking.host is None else {"environment": asking.host.facts}),
        "template": asking.builder.template.name,
        "sampler": asking.sampler.name,
        "policy_version": asking.sampler.policy_version,
        "grader_version": GRADER_VERSION,
    }


def _score_so_far(answered: Records) -> str:
    """Return the note of the progress line."""
    verdicts = [record.correct for group in answered.values() for record in group]
    return f"accuracy {np.mean(verdicts):.3f}" if verdicts else ""
