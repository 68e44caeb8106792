"""Build a step's batch: take groups from the source, drop those that teach nothing, compute advantages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vlm_rl.advantages import compute_advantages
from vlm_rl.algorithms import Algorithm
from vlm_rl.batch_advantages import (
    RewardHistory,
    brevity_bonus,
    decoupled_norm,
    pass_rate_penalty,
    shrunk_baseline,
)
from vlm_rl.config import AlgorithmConfig, Config, HadwConfig
from vlm_rl.data.prompts import PromptCache
from vlm_rl.hadw import Belief, difficulty_weights, published_weights, update_belief
from vlm_rl.metrics import asking_metrics, difficulty_metrics, undecided_notes
from vlm_rl.rollouts.no_signal import NoSignal
from vlm_rl.rollouts.prompt_order import Ledger
from vlm_rl.rollouts.sampling import Graded, StepPhase
from vlm_rl.rollouts.source import RolloutSource
from vlm_rl.types import Group, Reward


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """What a step trains on."""

    groups: Sequence[Group]  # with advantages
    prompts: PromptCache  # the prompts that this rank has built so far
    prompt_lengths: Mapping[str, int]  # tokens by problem id, of every prompt of the step, known on all ranks
    belief: Belief  # HA-DW's, after this batch
    history: RewardHistory  # EBPO's, with this batch
    metrics: Mapping[str, float]  # of the source, of HA-DW's weights, and of the calls of functions and judge


@dataclass(frozen=True, slots=True, eq=False)
class Collecting:
    """The parts of a run that collecting its batches needs."""

    config: Config
    algorithm: Algorithm
    source: RolloutSource
    ledger: Ledger
    note: Callable[[str], None]  # prints a line
    no_signal: NoSignal = field(default_factory=NoSignal)


def collect(run: Collecting, *, step: int, belief: Belief, phase: StepPhase, history: RewardHistory) -> RolloutBatch:
    """Let the source sample and grade groups until there are enough, and compute their advantages.

    Dynamic sampling (DAPO, arXiv 2503.14476, equation 11) drops groups that are all right or all wrong. It asks for
    a whole batch a round until the step is full, at most algorithm.max_sampling_rounds times; the step then trains on
    what it has. Groups beyond a full step are surplus. Those that the source itself rules out are replaced once.

    Args:
        run: the parts that collecting needs.
        step: how many steps came before.
        belief: HA-DW's, before this batch.
        phase: times the sampling, and the wait for grades.
        history: EBPO's, before this batch.

    Raises TooManyUndecidedError if too many responses got no verdict.
    """
    options, wanted = run.config.algorithm, run.config.rollout.prompts_per_step
    is_dynamic = run.algorithm.dynamic_sampling
    rounds, left = 0, options.max_sampling_rounds if is_dynamic else 1
    kept, sampled, prompt_lengths = list[Group](), list[Reward](), dict[str, int]()
    while True:
        graded = next_round(run, step, wanted if is_dynamic else wanted - len(kept), phase)
        fit, others = choose(graded, wanted - len(kept), is_dynamic=is_dynamic)
        kept += fit
        run.ledger.skipped.update(others)
        sampled += [reward for group in graded.groups for reward in group.rewards]
        history = history.merged(totals(graded.groups))
        prompt_lengths |= graded.prompt_lengths
        rounds, left = rounds + 1, max(left - 1, 1 if graded.unfit else 0)
        if not left or len(kept) >= wanted:
            break
    run.ledger.trained += len(kept)
    run.ledger.check(in_progress=graded.waiting)
    check_undecided(sampled, most=run.config.reward.max_undecided)
    if len(kept) < wanted:
        taken = f"{rounds} round{'s' * (rounds > 1)} of sampling"
        text = f"{len(kept)} of {wanted} prompts after {taken}: the step trains on what it has"
        run.note(f"step {step + 1}: {text}")
    after = belief_after(belief, sampled, options.hadw)
    weighed, weight_metrics = with_advantages(
        kept, options, baseline=run.algorithm.advantage, beliefs=(belief, after), history=history
    )
    if options.distillation.rewards and (warning := run.no_signal.after_step(weighed, sampled)):
        run.note(f"step {step + 1}: {warning}")
    groups, source_metrics = run.source.arrange(step, weighed)
    metrics = weight_metrics | source_metrics | asking_metrics(sampled)
    return RolloutBatch(groups, graded.prompts, prompt_lengths, after, history, metrics)


def next_round(run: Collecting, step: int, count: int, phase: StepPhase) -> Graded:
    """Return the source's next groups for a step, with all parts of their rewards. Note what could not be decided."""
    graded = run.source.next(step, count, phase)
    groups = [with_group_length(group, run.config.reward.group_length) for group in graded.groups]
    for note in undecided_notes([(group.problem, group.rewards) for group in groups]):
        run.note(f"step {step + 1}: {note}")
    return replace(graded, groups=groups)


def choose(graded: Graded, most: int, *, is_dynamic: bool) -> tuple[list[Group], Counter[str]]:
    """Return the groups to train on, at most so many, and how many others there are, by the reason against them."""
    kept, others = list[Group](), Counter[str]()
    for place, group in enumerate(graded.groups):
        reason = (
            graded.unfit.get(place)
            or (is_dynamic and without_contrast(group.rewards))
            or ("surplus" if len(kept) == most else "")
        )
        if reason:
            others[reason] += 1
        else:
            kept.append(group)
    return kept, others


class TooManyUndecidedError(Exception):
    """Raised when more responses of a step got no verdict than reward.max_undecided allows."""


def check_undecided(rewards: Sequence[Reward], *, most: float) -> None:
    """Raise TooManyUndecidedError if more than the share `most` of the rewards is undecided."""
    reasons = [reward.undecided_because for reward in rewards if reward.undecided_because]
    if len(reasons) > most * len(rewards):
        (reason, count), *_ = Counter(reasons).most_common(1)
        raise TooManyUndecidedError(
            f"{len(reasons)} of {len(rewards)} rewards of this step are undecided, above "
            f"reward.max_undecided={most:g}: {reason} ({count} times). No update was made: repair what judges, or "
            "raise that share"
        )


def without_contrast(rewards: Sequence[Reward]) -> str:
    """Return all_right, all_wrong or undecided if the rewards that count teach nothing, else ""."""
    correct = {reward.grade.correct for reward in rewards if not reward.dropped}
    if len(correct) > 1:
        return ""
    return "undecided" if not correct else "all_right" if correct == {True} else "all_wrong"


def ability(rewards: Sequence[Reward], hadw: HadwConfig) -> float | None:
    """Return HA-DW's ability: the pass rate, or with published_code the mean reward. None if all are dropped."""
    of_rewards = hadw.variant == "published_code"
    values = [r.total if of_rewards else r.grade.correct for r in rewards if not r.dropped]
    return float(np.mean(values)) if values else None


def belief_after(belief: Belief, sampled: Sequence[Reward], hadw: HadwConfig) -> Belief:
    """Return HA-DW's belief after a batch, from all its responses, including those of dropped groups."""
    seen = ability(sampled, hadw)
    if seen is None:
        return belief
    return update_belief(belief, seen, eta=hadw.eta, window=hadw.window, variant=hadw.variant)


def totals(groups: Sequence[Group]) -> np.ndarray:
    """Return the rewards [P, G], NaN where one is dropped."""
    return np.array([[math.nan if r.dropped else r.total for r in group.rewards] for group in groups]).reshape(
        len(groups), -1
    )


def with_group_length(group: Group, scale: float) -> Group:
    """Return the group with reward.group_length's part, if it is on, in its rewards; 0 for a dropped response."""
    there = [index for index, reward in enumerate(group.rewards) if not reward.dropped]
    if not scale:
        return group
    parts_G = np.zeros(len(group.rewards))
    if there:
        correct = np.array([group.rewards[index].grade.correct for index in there])
        parts_G[there] = pass_rate_penalty(group.lengths_G[there], correct, scale)
    rewards = [
        replace(r, parts={**r.parts, "group_length": float(v)}) for r, v in zip(group.rewards, parts_G, strict=True)
    ]
    return replace(group, rewards=tuple(rewards))


def advantages_of(
    groups: Sequence[Group], options: AlgorithmConfig, *, baseline: str, history: RewardHistory
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the advantages [P, G] before HA-DW, and EBPO's metrics. The arguments are those of with_advantages."""
    rewards_PG, metrics = totals(groups), dict[str, float]()
    if baseline == "gdpo":
        names = list(groups[0].rewards[0].parts)
        parts = [[[math.nan if r.dropped else r.parts[k] for r in g.rewards] for g in groups] for k in names]
        weights = [options.gdpo_weights.get(name, 1.0) for name in names]
        advantages_PG = decoupled_norm(np.array(parts), weights, ddof=options.std_ddof)
    elif baseline == "ebpo":
        advantages_PG = shrunk_baseline(rewards_PG, history, ddof=options.std_ddof)
        shrinkage = history.shrinkage(rewards_PG.shape[1])
        metrics = {"ebpo/shrinkage": shrinkage, "ebpo/mean_reward": history.rewards.mean}
    else:
        advantages_PG = compute_advantages(baseline, rewards_PG, ddof=options.std_ddof)
    if options.length_bonus:
        lengths_PG = np.stack([group.lengths_G for group in groups])
        advantages_PG = advantages_PG + brevity_bonus(
            advantages_PG, lengths_PG, scale=options.length_bonus, cap=options.length_bonus_cap
        )
    return advantages_PG, metrics


def with_advantages(
    groups: Sequence[Group],
    options: AlgorithmConfig,
    *,
    baseline: str,
    beliefs: tuple[Belief, Belief],
    history: RewardHistory,
) -> tuple[list[Group], dict[str, float]]:
    """Return the groups with their advantages, scaled by HA-DW if it is on, and the metrics of both.

    Advantages are 0 if only a teacher is trained on.

    Args:
        groups: those that the step trains on.
        options: of the algorithm.
        baseline: key of advantages.ADVANTAGES, or gdpo or ebpo.
        beliefs: HA-DW's before and after this batch.
        history: EBPO's, with this batch.
    """
    if not groups:
        return [], {}
    hadw = options.hadw
    advantages_PG, metrics = advantages_of(groups, options, baseline=baseline, history=history)
    if hadw.enabled:
        is_published = hadw.variant == "published_code"
        weights = published_weights if is_published else difficulty_weights
        belief = beliefs[1] if is_published else beliefs[0]
        abilities_P = [ability(group.rewards, hadw) or 0.0 for group in groups]
        phi_PG = weights(advantages_PG, abilities_P, belief, scale=hadw.applied_scale)
        if belief.ability is not None:
            metrics |= difficulty_metrics(phi_PG, advantages_PG, abilities_P, belief.ability)
        advantages_PG *= phi_PG
    if not options.distillation.rewards:
        advantages_PG = np.zeros_like(advantages_PG)
    return [replace(group, advantages_G=row) for group, row in zip(groups, advantages_PG, strict=True)], metrics
