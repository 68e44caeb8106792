"""The training loop: generate, grade, weigh, update, sync.

    problems -> prompts -> rollouts -> rewards -> advantages -> token weights -> loss -> weights back

One call of ``train`` is one rank of a run; torchrun starts more. Every rank samples and grades its
share of the prompts, then all ranks know all groups: weights per token are computed once, globally,
and any rank may train on any group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from vlm_rl.advantages import compute_advantages
from vlm_rl.config import Config
from vlm_rl.data.prompts import rope_positions
from vlm_rl.distributed import gather_shares, rank, share, world_size
from vlm_rl.hadw import difficulty_weights, update_belief
from vlm_rl.learner.learner import UpdateResult
from vlm_rl.learner.packing import PackedRow, TrainGroup, pack_row, plan_rows
from vlm_rl.losses import policy_loss, token_weights
from vlm_rl.metrics import difficulty_metrics
from vlm_rl.recorder import step_metrics
from vlm_rl.rewards import Scoring
from vlm_rl.session import Session, Timings
from vlm_rl.types import Group, Problem, Reward, Rollout


class GapError(RuntimeError):
    """Sampler and learner disagree about the log-probs of the same tokens."""


def train(config: Config, *, resume: bool = False) -> None:
    """Train until config.train.steps rollout steps are done.

    Raises UserError, before anything is written, for a mistake in configuration, data or model, and
    exits with errors.EXIT_STOPPED after SIGTERM, its state saved.
    """
    with Session(config, resume=resume) as s:
        s.sync_weights()
        s.evaluate_if_due()
        while s.step < config.train.steps:
            train_step(s)
            s.evaluate_if_due()


def train_step(s: Session) -> None:
    """One rollout step: a batch of groups, its optimizer steps, and the new weights in the sampler."""
    before, timings = s.state(), Timings(s.recorder.phase)
    groups, accuracy = collect_groups(s, timings)
    s.stop_if_asked(before)  # the step is abandoned, its beginning saved
    parts = split(groups, s.config.train.mini_batch_prompts)
    weights = [weigh(s, part) for part in parts]
    mini_batches = [pack(s, part, weights_PG) for part, weights_PG in zip(parts, weights, strict=True)]
    s.sampler.sleep()
    if s.policy.has_frozen_vision:
        with timings.phase("image_features"):
            mini_batches = [s.learner.with_image_features(rows) for rows in mini_batches]
    if len(mini_batches) > 1:  # with one, the old log-probs are those of the update's own forward pass
        with timings.phase("old_logprobs"):
            mini_batches = [s.learner.with_old_log_probs(rows) for rows in mini_batches]
    if s.reference is not None:
        with timings.phase("reference_logprobs"):
            mini_batches = [s.learner.with_reference_log_probs(rows, s.reference) for rows in mini_batches]
    with timings.phase("update"):
        loss = partial(policy_loss, **s.loss_settings)
        results = [s.learner.update(rows, loss) for rows in mini_batches]
    with timings.phase("sync"):
        s.sampler.wake()
        s.sync_weights()
    if accuracy is not None:  # every response may have been dropped
        s.belief = update_belief(s.belief, accuracy, **s.belief_settings)
    s.step += 1
    record(s, groups, weights, results, timings)
    s.save_if_due()
    s.stop_if_asked(s.state())


def collect_groups(s: Session, timings: Timings) -> tuple[list[Group], float | None]:
    """A batch of graded groups with advantages, and the accuracy of all that was graded for it, if anything was.

    With dynamic sampling (DAPO, arXiv 2503.14476, equation 11) groups that are all right or all wrong
    are dropped and as many prompts drawn again, at most algorithm.max_sampling_rounds times; then
    training goes on with what there is.
    """
    wanted = s.config.rollout.prompts_per_step
    rounds = s.config.algorithm.max_sampling_rounds if s.algorithm.dynamic_sampling else 1
    kept: list[Group] = []
    verdicts: list[bool] = []
    s.forget_prompts()
    for _ in range(rounds):
        problems = draw_problems(s, wanted - len(kept), timings)
        graded = sample_and_grade(s, problems, timings)
        for problem, (rollouts, rewards) in zip(problems, graded, strict=True):
            correct = judged(rewards)
            verdicts += correct
            if s.algorithm.dynamic_sampling and len(set(correct)) <= 1:
                s.ledger.skipped["all_right" if any(correct) else "all_wrong" if correct else "undecided"] += 1
            else:
                kept.append(Group(problem, rollouts, rewards, np.zeros(len(rollouts))))
        if len(kept) == wanted:
            break
    s.ledger.trained += len(kept)
    s.ledger.check()
    if len(kept) < wanted:
        text = f"{len(kept)} of {wanted} prompts after {rounds} rounds of sampling: the step trains on what it has"
        s.recorder.line.note(f"step {s.step + 1}  {text}")
    return with_advantages(s, kept), pass_rate(verdicts) if verdicts else None


def judged(rewards: Sequence[Reward]) -> list[bool]:
    """Right or wrong, of each response that is not dropped."""
    return [reward.grade.correct for reward in rewards if not reward.dropped]


def pass_rate(verdicts: Sequence[bool]) -> float:
    """The share of True; 0 where there is no verdict."""
    return float(np.mean(verdicts)) if verdicts else 0.0


def draw_problems(s: Session, count: int, timings: Timings) -> list[Problem]:
    """The next problems in order; those with prompts above data.max_prompt_tokens are left out and counted."""
    fitting: list[Problem] = []
    while len(fitting) < count:
        drawn = [s.problems[index] for index in s.order.draw(count - len(fitting))]
        with timings.phase("rollout"):
            lengths = gather_shares([len(s.prompt(problem).ids) for problem in share(drawn)])
        s.prompt_lengths.update(zip((problem.id for problem in drawn), lengths, strict=True))
        fits = [length <= s.config.data.max_prompt_tokens for length in lengths]
        s.ledger.drawn += len(drawn)
        if not all(fits):
            s.ledger.skipped["too_long"] += fits.count(False)
        fitting += [problem for problem, fit in zip(drawn, fits, strict=True) if fit]
    return fitting


def sample_and_grade(
    s: Session, problems: Sequence[Problem], timings: Timings
) -> list[tuple[tuple[Rollout, ...], tuple[Reward, ...]]]:
    """Responses and rewards of every problem, in order, on every rank; each rank does its share."""
    mine = share(problems)
    with Scoring(s.reward) as scoring:
        with timings.phase("rollout"):
            prompts = [s.prompt(problem) for problem in mine]

            def score(index: int, group: Sequence[Rollout]) -> None:
                scoring.add(index, [(mine[index], prompts[index], rollout) for rollout in group])

            rollouts = s.sampler.generate(prompts, s.sampling, seed=s.config.seed, step=s.step, on_group=score)
        with timings.phase("reward"):  # what is left when the last response is there
            rewards = scoring.rewards()
            return gather_shares([(tuple(group), rewards[index]) for index, group in enumerate(rollouts)])


def with_advantages(s: Session, groups: Sequence[Group]) -> list[Group]:
    """The groups with their advantages, scaled by difficulty where HA-DW is on."""
    s.difficulty = {}
    if not groups:
        return []
    rewards_PG = np.array([[math.nan if r.dropped else r.total for r in group.rewards] for group in groups])
    advantages_PG = compute_advantages(s.algorithm.advantage, rewards_PG, ddof=s.config.algorithm.std_ddof)
    if s.config.algorithm.hadw.enabled:
        pass_rates_P = [pass_rate(judged(group.rewards)) for group in groups]
        phi_PG = difficulty_weights(advantages_PG, pass_rates_P, s.belief, scale=s.config.algorithm.hadw.scale)
        if s.belief.ability is not None:
            s.difficulty = difficulty_metrics(phi_PG, advantages_PG, pass_rates_P, s.belief.ability)
        advantages_PG *= phi_PG
    return [Group(g.problem, g.rollouts, g.rewards, row) for g, row in zip(groups, advantages_PG, strict=True)]


def split(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """Mini-batches of whole groups; the last may be smaller."""
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def weigh(s: Session, groups: Sequence[Group]) -> np.ndarray:
    """The weight [P, G] of every token of each response of one mini-batch.

    With overlong filtering (DAPO, arXiv 2503.14476, section 3.4) a truncated response counts as one of no
    tokens: it is in N and in its group's baseline, and weighs nothing. So does a dropped response, which is
    in no baseline either.
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


def pack(s: Session, groups: Sequence[Group], weights_PG: np.ndarray) -> list[PackedRow]:
    """This rank's rows of one mini-batch. Prompts are built for these alone: pixels are most of the work."""
    plan = plan_rows(
        [s.prompt_lengths[group.problem.id] for group in groups],
        [group.lengths_G.tolist() for group in groups],
        budget=s.config.train.micro_batch_tokens,
        num_ranks=world_size(),
        pair_cost=1 / (6 * s.policy.model.config.get_text_config().hidden_size),
    )[rank()]
    mine = {chunk.group: groups[chunk.group] for chunks in plan for chunk in chunks}
    train_groups = {
        index: TrainGroup(s.prompt(group.problem), group.rollouts, group.advantages_G, weights_PG[index])
        for index, group in mine.items()
    }
    positions = partial(rope_positions, s.policy.model)
    mean_weight = 1 / sum(int(group.lengths_G.sum()) for group in groups)
    return [pack_row(train_groups, chunks, positions, mean_weight=mean_weight) for chunks in plan]


def record(
    s: Session,
    groups: Sequence[Group],
    weights: Sequence[np.ndarray],
    results: Sequence[UpdateResult],
    timings: Timings,
) -> None:
    """Log the step. Raises GapError if sampler and learner describe different distributions."""
    with timings.phase("diagnostics"):
        metrics = step_metrics(groups, weights, results) | s.difficulty | s.counters()
    s.recorder.step(s.step, groups, metrics | timings.metrics())
    gap, limit = metrics.get("rollout/logprob_gap", 0.0), s.config.rollout.max_gap
    if gap > limit:
        raise GapError(
            f"step {s.step}: the sampler's log-probs are {gap:.3g} per token away from the learner's, above "
            f"rollout.max_gap={limit}: the engine computes another distribution; compare "
            "rollout.sampler=transformers, which shares the learner's arithmetic"
        )
