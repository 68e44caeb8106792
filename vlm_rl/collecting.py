"""The batch that a step trains on: prompts drawn, responses sampled and graded, advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from vlm_rl.advantages import compute_advantages
from vlm_rl.data.ahead import BatchAhead, age_metrics, oldest
from vlm_rl.data.carry_over import GroupInProgress, begin, carry_metrics, mixed
from vlm_rl.data.prompts import PromptCache
from vlm_rl.distributed import gather_shares, share
from vlm_rl.hadw import Belief, difficulty_weights, published_weights, update_belief
from vlm_rl.metrics import asking_metrics, difficulty_metrics, undecided_notes
from vlm_rl.rewards.reward import Scoring
from vlm_rl.session.recorder import Timings
from vlm_rl.session.session import Session
from vlm_rl.types import Group, Problem, Reward, Rollout


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """What a step trains on."""

    groups: Sequence[Group]  # with advantages
    prompts: PromptCache  # the prompts that this rank has built so far
    prompt_lengths: Mapping[str, int]  # tokens by problem id, of every prompt of the step, known on all ranks
    belief: Belief  # HA-DW's, after this batch
    metrics: Mapping[str, float]  # HA-DW's weights, and what asking functions and judge gave, where they are on


def collect(s: Session, timings: Timings) -> RolloutBatch:
    """Draw prompts, sample and grade their responses, and compute the advantages.

    Dynamic sampling (DAPO, arXiv 2503.14476, equation 11) drops groups that are all right or all wrong and draws
    as many prompts again, at most algorithm.max_sampling_rounds times. The step then trains on what it has. With
    rollout.ahead the first round was begun by an earlier step; groups that are too old are replaced once.
    """
    wanted = s.config.rollout.prompts_per_step
    rounds = s.config.algorithm.max_sampling_rounds if s.algorithm.dynamic_sampling else 1
    ahead, max_age = s.config.rollout.ahead, s.config.rollout.oldest_age
    prompts, s.next_prompts = s.next_prompts, PromptCache(s.builder)
    prompt_lengths: dict[str, int] = {}
    kept: list[Group] = []
    sampled: list[Reward] = []
    left = rounds
    while left and len(kept) < wanted:
        left -= 1
        missing = wanted - len(kept)
        if is_begun := bool(s.ahead) and s.ahead[0].step == s.step:
            drawn, prompts = s.ahead[0].groups, s.prompts_ahead.pop(s.step)
            s.ahead = s.ahead[1:]
        else:
            count = new_groups(s, missing)
            drawn = draw_groups(s, count, prompts, timings)
        prompt_lengths |= {group.problem.id: group.prompt_tokens for group in (*drawn, *s.in_progress)}
        groups = (*drawn, *s.in_progress)
        graded = sample_and_grade(s, groups, prompts, timings, enough=missing, is_begun=is_begun)
        for note in undecided_notes([(problem, rewards) for problem, _, rewards in graded]):
            s.recorder.note(f"step {s.step + 1}  {note}")
        sampled += [reward for _, _, rewards in graded for reward in rewards]
        for problem, rollouts, rewards in graded:
            correct = judged(rewards)
            if is_begun and oldest(rollouts, s.versions) > max_age:
                s.ledger.skipped["stale"] += 1
                left = max(left, 1)
            elif s.algorithm.dynamic_sampling and len(set(correct)) <= 1:
                s.ledger.skipped["all_right" if any(correct) else "all_wrong" if correct else "undecided"] += 1
            else:
                kept.append(Group(problem, rollouts, rewards, np.zeros(len(rollouts))))
    s.ledger.trained += len(kept)
    s.ledger.check(in_progress=len(s.in_progress) + sum(len(batch.groups) for batch in s.ahead))
    if len(kept) < wanted:
        text = f"{len(kept)} of {wanted} prompts after {rounds} rounds of sampling: the step trains on what it has"
        s.recorder.note(f"step {s.step + 1}  {text}")
    belief = belief_after(s, sampled)
    groups, metrics = with_advantages(s, kept, belief)
    if s.config.rollout.carry_over is not None:
        groups = mixed(groups, seed=s.config.seed, step=s.step)
        metrics |= carry_metrics(groups, s.in_progress, version=s.learner.num_updates)
    if ahead:
        metrics |= age_metrics(groups, s.versions, ahead=ahead)
    return RolloutBatch(groups, prompts, prompt_lengths, belief, metrics | asking_metrics(sampled))


def begin_ahead(s: Session, timings: Timings) -> None:
    """Begin the batches of the next rollout.ahead steps that are not begun yet."""
    rollout = s.config.rollout
    last = min(s.step + rollout.ahead, s.config.train.steps - 1)
    for step in range(s.ahead[-1].step + 1 if s.ahead else s.step + 1, last + 1):
        prompts = PromptCache(s.builder)
        groups = draw_groups(s, rollout.prompts_per_step, prompts, timings)
        s.ahead = (*s.ahead, BatchAhead(step, tuple(groups)))
        s.begin(s.ahead[-1], prompts)


def building_next_prompts(s: Session) -> AbstractContextManager[None]:
    """Build this rank's prompts of the next step in a thread, for the length of a `with` block.

    With rollout.ahead they are built already. Of pictures most of the work runs outside Python's lock.
    """
    if s.config.rollout.ahead or s.step + 1 >= s.config.train.steps:
        return nullcontext()
    drawn = s.order.upcoming(new_groups(s, s.config.rollout.prompts_per_step))
    return s.next_prompts.building([s.problems[index] for index in share(drawn)])


def new_groups(s: Session, missing: int) -> int:
    """Return how many groups to begin where a step needs `missing` more of them."""
    return missing + s.config.rollout.spare_groups - len(s.in_progress)


def judged(rewards: Sequence[Reward]) -> list[bool]:
    """Return right or wrong for each response that is not dropped."""
    return [reward.grade.correct for reward in rewards if not reward.dropped]


def draw_groups(s: Session, count: int, prompts: PromptCache, timings: Timings) -> list[GroupInProgress]:
    """Draw the next problems in order, and return a group for each, of which nothing is drawn.

    Problems whose prompts exceed data.max_prompt_tokens are left out and counted.

    Args:
        s: the run.
        count: how many problems to draw.
        prompts: keeps the prompts that this rank builds.
        timings: gets the time of building them.
    """
    responses = s.config.rollout.responses_per_prompt
    fitting: list[GroupInProgress] = []
    while len(fitting) < count:
        epochs = s.order.epochs(count - len(fitting))
        drawn = [s.problems[index] for index in s.order.draw(count - len(fitting))]
        with timings.phase("rollout"):
            lengths = gather_shares([len(prompts[problem].ids) for problem in share(drawn)])
        fits = [length <= s.config.data.max_prompt_tokens for length in lengths]
        s.ledger.drawn += len(drawn)
        if not all(fits):
            s.ledger.skipped["too_long"] += fits.count(False)
        begun = (
            begin(problem, length, responses=responses, epoch=epoch)
            for problem, length, epoch in zip(drawn, lengths, epochs, strict=True)
        )
        fitting += compress(begun, fits)
    return fitting


def sample_and_grade(
    s: Session,
    groups: Sequence[GroupInProgress],
    prompts: PromptCache,
    timings: Timings,
    *,
    enough: int,
    is_begun: bool = False,
) -> list[tuple[Problem, tuple[Rollout, ...], tuple[Reward, ...]]]:
    """Return problem, responses and rewards of `enough` groups that are done, in order, on every rank.

    Each rank does its share. The other groups, if there are more, are then s.in_progress.

    Args:
        s: the run.
        groups: those to draw on, the same on every rank.
        prompts: has or builds the prompts of this rank's share.
        timings: gets the seconds of sampling, and of waiting for grades.
        enough: how many groups to wait for, over all ranks.
        is_begun: they are those that were begun for this step.
    """
    mine = share(groups)
    with Scoring(s.reward) as scoring:
        with timings.phase("rollout"):
            asked = [group.asked(prompts) for group in mine]

            def score(index: int, group: Sequence[Rollout]) -> None:
                scoring.add(index, [(mine[index].problem, asked[index], rollout) for rollout in group])

            if is_begun:
                rollouts = s.take(score)
            else:
                rollouts = s.draw_on(mine, asked, enough=len(share(range(enough))), on_group=score)
        with timings.phase("reward"):  # only the wait for unfinished grading
            rewards = scoring.rewards()
            drawn = gather_shares([(tuple(group), rewards.get(index)) for index, group in enumerate(rollouts)])
    s.in_progress = tuple(
        replace(group, rollouts=so_far)
        for group, (so_far, graded) in zip(groups, drawn, strict=True)
        if graded is None
    )
    return [
        (group.problem, whole, graded)
        for group, (whole, graded) in zip(groups, drawn, strict=True)
        if graded is not None
    ]


def ability(s: Session, rewards: Sequence[Reward]) -> float | None:
    """Return what HA-DW compares: the pass rate, or with published_code the mean reward. None if all are dropped."""
    of_rewards = s.config.algorithm.hadw.variant == "published_code"
    values = [r.total if of_rewards else r.grade.correct for r in rewards if not r.dropped]
    return float(np.mean(values)) if values else None


def belief_after(s: Session, sampled: Sequence[Reward]) -> Belief:
    """Return HA-DW's belief after a batch, from all its responses, those of dropped groups included."""
    hadw, seen = s.config.algorithm.hadw, ability(s, sampled)
    if seen is None:
        return s.belief
    return update_belief(s.belief, seen, eta=hadw.eta, window=hadw.window, variant=hadw.variant)


def with_advantages(
    s: Session, groups: Sequence[Group], belief_after: Belief
) -> tuple[list[Group], dict[str, float]]:
    """Return the groups with their advantages, scaled by HA-DW where it is on, and HA-DW's metrics."""
    if not groups:
        return [], {}
    hadw = s.config.algorithm.hadw
    rewards_PG = np.array([[math.nan if r.dropped else r.total for r in group.rewards] for group in groups])
    advantages_PG = compute_advantages(s.algorithm.advantage, rewards_PG, ddof=s.config.algorithm.std_ddof)
    metrics: dict[str, float] = {}
    if hadw.enabled:
        is_published = hadw.variant == "published_code"
        weights, belief = (published_weights, belief_after) if is_published else (difficulty_weights, s.belief)
        abilities_P = [ability(s, group.rewards) or 0.0 for group in groups]
        phi_PG = weights(advantages_PG, abilities_P, belief, scale=hadw.applied_scale)
        if belief.ability is not None:
            metrics = difficulty_metrics(phi_PG, advantages_PG, abilities_P, belief.ability)
        advantages_PG *= phi_PG
    return [replace(group, advantages_G=row) for group, row in zip(groups, advantages_PG, strict=True)], metrics
