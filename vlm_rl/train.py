"""The training loop: generate, grade, weigh, update, sync.

    problems -> prompts -> rollouts -> rewards -> advantages -> token weights -> loss -> weights back

One call of ``train`` is one rank of a run; torchrun starts more. Every rank samples and grades its share of the
prompts. All groups are then gathered on every rank: weights per token are computed once, globally, and any rank may
train on any group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path

import numpy as np

from vlm_rl.advantages import compute_advantages
from vlm_rl.config import Config
from vlm_rl.data.ahead import BatchAhead, age_metrics, oldest
from vlm_rl.data.carry_over import GroupInProgress, begin, carry_metrics, mixed
from vlm_rl.data.prompts import PromptCache, rope_positions
from vlm_rl.distributed import gather_shares, rank, share, world_size
from vlm_rl.hadw import difficulty_weights, update_belief
from vlm_rl.learner.learner import UpdateResult
from vlm_rl.learner.packing import PackedRow, pack_row
from vlm_rl.learner.planning import plan_rows
from vlm_rl.losses import policy_loss, token_weights
from vlm_rl.metrics import asking_metrics, difficulty_metrics, undecided_notes
from vlm_rl.periodic_evaluation import evaluate_if_due
from vlm_rl.recorder import Timings, step_metrics
from vlm_rl.rewards import Scoring
from vlm_rl.run.lock import RunLock
from vlm_rl.samplers.servers import ServersGoneError
from vlm_rl.session import Session
from vlm_rl.types import Group, Problem, Reward, Rollout


class GapError(RuntimeError):
    """Raised where sampler and learner disagree about the log-probs of the same tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """What a step trains on."""

    groups: Sequence[Group]  # with advantages
    prompts: PromptCache  # the prompts that this rank has built so far
    prompt_lengths: Mapping[str, int]  # tokens by problem id, of every prompt of the step, known on all ranks
    accuracy: float | None  # over all graded responses, those of dropped groups included; None where none was judged
    metrics: Mapping[str, float]  # HA-DW's weights, and what asking functions and judge gave, where they are on


def train(config: Config, *, resume: bool = False) -> None:
    """Train until config.train.steps rollout steps are done.

    Raises:
        UserError: for a mistake in configuration, data or model, before anything is written.
        StoppedError: after SIGTERM, or where no rollout server is left, once the state is saved; exits with
            errors.EXIT_STOPPED.
        GapError: where sampler and learner describe different distributions.
        NonFiniteError: where a weight is NaN or infinite when a checkpoint is due; none is written.
    """
    with RunLock(Path(config.out)) as lock, Session(config, lock=lock, resume=resume) as s, s.checkpoints:
        s.sync_weights()
        s.stop_if_asked(s.state())
        for stored in s.ahead:
            s.begin(stored, PromptCache(s.builder))
        evaluate_if_due(s)
        while s.step < config.train.steps:
            train_step(s)
            evaluate_if_due(s)


def train_step(s: Session) -> None:
    """Run one rollout step: collect a batch of groups, take its optimizer steps, sync the new weights."""
    before, timings = s.state(), Timings(s.recorder.phase)
    try:
        with s.making_room():
            batch = collect(s, timings)
    except ServersGoneError as error:
        s.ask_to_stop(error)
        s.stop_if_asked(before)
        raise
    s.stop_if_asked(before)  # abandons this step and saves its beginning
    begin_ahead(s, timings)
    parts = split(batch.groups, s.config.train.mini_batch_prompts)
    weights = [weigh(s, part) for part in parts]
    mini_batches = [pack(s, batch, part, weights_PG) for part, weights_PG in zip(parts, weights, strict=True)]
    s.sampler.sleep()
    results = optimize(s, mini_batches, timings)
    with timings.phase("sync"):
        s.sync_weights()
    if batch.accuracy is not None:
        hadw = s.config.algorithm.hadw
        s.belief = update_belief(s.belief, batch.accuracy, eta=hadw.eta, window=hadw.window, variant=hadw.variant)
    s.end_step()
    log_step(s, batch, weights, results, timings)
    s.save_if_due()
    s.stop_if_asked(s.state())


# -- collecting ------------------------------------------------------------------------------------


def collect(s: Session, timings: Timings) -> RolloutBatch:
    """Draw prompts, sample and grade their responses, and compute the advantages.

    Dynamic sampling (DAPO, arXiv 2503.14476, equation 11) drops groups that are all right or all wrong and draws
    as many prompts again, at most algorithm.max_sampling_rounds times. The step then trains on what it has. With
    rollout.ahead the first round was begun by an earlier step; groups that are too old are replaced once.
    """
    wanted, responses = s.config.rollout.prompts_per_step, s.config.rollout.responses_per_prompt
    rounds = s.config.algorithm.max_sampling_rounds if s.algorithm.dynamic_sampling else 1
    ahead, max_age = s.config.rollout.ahead, s.config.rollout.oldest_age
    prompts = PromptCache(s.builder)
    prompt_lengths: dict[str, int] = {}
    kept: list[Group] = []
    sampled: list[Reward] = []
    verdicts: list[bool] = []
    left = rounds
    while left and len(kept) < wanted:
        left -= 1
        missing = wanted - len(kept)
        if is_begun := bool(s.ahead) and s.ahead[0].step == s.step:
            drawn, prompts = s.ahead[0].groups, s.prompts_ahead.pop(s.step)
            s.ahead = s.ahead[1:]
        else:
            count = missing + s.config.rollout.spare_groups - len(s.in_progress)
            drawn = [begin(*new, responses=responses) for new in draw_problems(s, count, prompts, timings)]
        prompt_lengths |= {group.problem.id: group.prompt_tokens for group in (*drawn, *s.in_progress)}
        groups = (*drawn, *s.in_progress)
        graded = sample_and_grade(s, groups, prompts, timings, enough=missing, is_begun=is_begun)
        for note in undecided_notes([(problem, rewards) for problem, _, rewards in graded]):
            s.recorder.note(f"step {s.step + 1}  {note}")
        sampled += [reward for _, _, rewards in graded for reward in rewards]
        for problem, rollouts, rewards in graded:
            correct = judged(rewards)
            verdicts += correct
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
    groups, metrics = with_advantages(s, kept)
    if s.config.rollout.carry_over is not None:
        groups = mixed(groups, seed=s.config.seed, step=s.step)
        metrics |= carry_metrics(groups, s.in_progress, version=s.learner.num_updates)
    if ahead:
        metrics |= age_metrics(groups, s.versions, ahead=ahead)
    accuracy = float(np.mean(verdicts)) if verdicts else None
    return RolloutBatch(groups, prompts, prompt_lengths, accuracy, metrics | asking_metrics(sampled))


def begin_ahead(s: Session, timings: Timings) -> None:
    """Begin the batches of the next rollout.ahead steps that are not begun yet."""
    rollout = s.config.rollout
    last = min(s.step + rollout.ahead, s.config.train.steps - 1)
    for step in range(s.ahead[-1].step + 1 if s.ahead else s.step + 1, last + 1):
        prompts = PromptCache(s.builder)
        new = draw_problems(s, rollout.prompts_per_step, prompts, timings)
        groups = tuple(begin(*each, responses=rollout.responses_per_prompt) for each in new)
        s.ahead = (*s.ahead, BatchAhead(step, groups))
        s.begin(s.ahead[-1], prompts)


def judged(rewards: Sequence[Reward]) -> list[bool]:
    """Return right or wrong for each response that is not dropped."""
    return [reward.grade.correct for reward in rewards if not reward.dropped]


def draw_problems(s: Session, count: int, prompts: PromptCache, timings: Timings) -> list[tuple[Problem, int]]:
    """Draw the next problems in order, each with the tokens of its prompt.

    Problems whose prompts exceed data.max_prompt_tokens are left out and counted.

    Args:
        s: the run.
        count: how many problems to draw.
        prompts: keeps the prompts that this rank builds.
        timings: gets the time of building them.
    """
    fitting: list[tuple[Problem, int]] = []
    while len(fitting) < count:
        drawn = [s.problems[index] for index in s.order.draw(count - len(fitting))]
        with timings.phase("rollout"):
            lengths = gather_shares([len(prompts[problem].ids) for problem in share(drawn)])
        fits = [length <= s.config.data.max_prompt_tokens for length in lengths]
        s.ledger.drawn += len(drawn)
        if not all(fits):
            s.ledger.skipped["too_long"] += fits.count(False)
        fitting += compress(zip(drawn, lengths, strict=True), fits)
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
            asked = [prompts[group.problem] for group in mine]

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


def with_advantages(s: Session, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
    """Return the groups with their advantages, scaled by HA-DW where it is on, and HA-DW's metrics."""
    if not groups:
        return [], {}
    rewards_PG = np.array([[math.nan if r.dropped else r.total for r in group.rewards] for group in groups])
    advantages_PG = compute_advantages(s.algorithm.advantage, rewards_PG, ddof=s.config.algorithm.std_ddof)
    metrics: dict[str, float] = {}
    if s.config.algorithm.hadw.enabled:
        correct = [judged(group.rewards) for group in groups]
        pass_rates_P = [float(np.mean(verdicts)) if verdicts else 0.0 for verdicts in correct]
        phi_PG = difficulty_weights(advantages_PG, pass_rates_P, s.belief, scale=s.config.algorithm.hadw.scale)
        if s.belief.ability is not None:
            metrics = difficulty_metrics(phi_PG, advantages_PG, pass_rates_P, s.belief.ability)
        advantages_PG *= phi_PG
    return [replace(group, advantages_G=row) for group, row in zip(groups, advantages_PG, strict=True)], metrics


# -- optimizing ------------------------------------------------------------------------------------


def split(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """Split into mini-batches of whole groups; the last may be smaller."""
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def weigh(s: Session, groups: Sequence[Group]) -> np.ndarray:
    """Return the weight [P, G] of every token of each response of one mini-batch.

    With overlong filtering (DAPO, arXiv 2503.14476, section 3.4) a truncated response is given length 0: it
    still counts in N and in its group's baseline, but its tokens weigh nothing. A dropped response weighs nothing
    either, and is in no baseline.
    """
    lengths_PG = np.stack([group.lengths_G for group in groups])
    lengths_PG = np.where([[reward.dropped for reward in group.rewards] for group in groups], 0, lengths_PG)
    if s.config.algorithm.mask_truncated:
        lengths_PG = np.where(
            [[r.stop_reason == "length" for r in group.rollouts] for group in groups], 0, lengths_PG
        )
    return token_weights(
        s.algorithm.aggregation,
        lengths_PG,
        np.stack([group.advantages_G for group in groups]),
        max_tokens=s.config.rollout.max_tokens,
    )


def pack(s: Session, batch: RolloutBatch, groups: Sequence[Group], weights_PG: np.ndarray) -> list[PackedRow]:
    """Return this rank's rows of one mini-batch. Prompts are built for these alone: pixels are most of the work.

    Args:
        s: the run.
        batch: the rollout batch, with the prompts of this rank.
        groups: the mini-batch, on all ranks.
        weights_PG: the weight of every token of each response of the mini-batch.
    """
    plan = plan_rows(
        [batch.prompt_lengths[group.problem.id] for group in groups],
        [group.lengths_G.tolist() for group in groups],
        budget=s.config.train.micro_batch_tokens,
        num_ranks=world_size(),
        pair_cost=1 / (6 * s.policy.model.config.get_text_config().hidden_size),
        padded=s.policy.is_padded,
    )[rank()]
    row_of = partial(
        pack_row,
        groups=groups,
        prompts={chunk.group: batch.prompts[groups[chunk.group].problem] for chunks in plan for chunk in chunks},
        weights_PG=weights_PG,
        positions=partial(rope_positions, s.policy.model),
        mean_weight=1 / sum(int(group.lengths_G.sum()) for group in groups),
        version=s.learner.num_updates if s.config.rollout.mixes_versions else None,
    )
    return [row_of(chunks) for chunks in plan]


def optimize(s: Session, mini_batches: Sequence[list[PackedRow]], timings: Timings) -> list[UpdateResult]:
    """Take one optimizer step per mini-batch. What does not depend on these steps is computed before the first."""
    if s.policy.has_frozen_vision:
        with timings.phase("image_features"):
            mini_batches = [s.learner.with_image_features(rows) for rows in mini_batches]
    if len(mini_batches) > 1:  # with one, the old log-probs are those of the update's own forward pass
        with timings.phase("old_logprobs"):
            mini_batches = [s.learner.with_old_log_probs(rows) for rows in mini_batches]
    if s.reference is not None:
        with timings.phase("reference_logprobs"):
            mini_batches = [s.learner.with_reference_log_probs(rows, s.reference) for rows in mini_batches]
    rule, options = s.algorithm, s.config.algorithm
    loss = partial(
        policy_loss,
        ratio=rule.ratio,
        surrogate=rule.surrogate,
        clip_low=rule.clip_low,
        clip_high=rule.clip_high,
        cap=options.correction_cap,
        kl_coef=options.kl_coef,
        entropy_coef=options.entropy_coef,
    )
    with timings.phase("update"):
        return [s.learner.update(rows, loss, before_step=partial(check_gap, s)) for rows in mini_batches]


def check_gap(s: Session, sums: Mapping[str, float]) -> None:
    """Raise GapError if sampler and learner describe different distributions, by the sums over a mini-batch."""
    gap = sums.get("gap", 0.0) / max(sums.get("fresh_tokens", sums.get("tokens", 0.0)), 1.0)
    if not gap <= s.max_gap:  # NaN too
        raise GapError(
            f"step {s.step + 1}: the sampler's log-probs differ from the learner's by {gap:.3g} per token on "
            f"average, above rollout.max_gap={s.max_gap}: they compute different distributions. This update was not "
            f"made; compare {s.other_setting}"
        )


# -- logging ---------------------------------------------------------------------------------------


def log_step(
    s: Session,
    batch: RolloutBatch,
    weights: Sequence[np.ndarray],
    results: Sequence[UpdateResult],
    timings: Timings,
) -> None:
    """Log the finished step.

    Args:
        s: the run, whose step counter is already increased.
        batch: the rollout batch.
        weights: the token weights of each mini-batch.
        results: what each optimizer step returned.
        timings: the seconds of each phase.
    """
    with timings.phase("diagnostics"):
        metrics = step_metrics(batch.groups, weights, results) | dict(batch.metrics) | s.counters()
    s.recorder.step(s.step, batch.groups, metrics | timings.metrics())
