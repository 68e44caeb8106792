"""The training loop: generate, grade, weigh, update, sync.

    problems -> prompts -> rollouts -> rewards -> advantages -> token weights -> loss -> weights back

One call of ``train`` is one rank of a run; torchrun starts more. Every rank samples and grades its share of the
prompts. All groups are then gathered on every rank: weights per token are computed once, globally, and any rank may
train on any group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from vlm_rl.config import Config
from vlm_rl.data.prompts import rope_positions
from vlm_rl.distributed import rank, world_size
from vlm_rl.learner.learner import UpdateResult
from vlm_rl.learner.packing import PackedRow, pack_row
from vlm_rl.learner.row_plan import plan_rows
from vlm_rl.losses import policy_loss, token_weights
from vlm_rl.rollouts.collect import RolloutBatch, collect
from vlm_rl.samplers.remote.servers import ServersGoneError
from vlm_rl.session.periodic_evaluation import evaluate_if_due
from vlm_rl.session.recorder import Timings, step_metrics
from vlm_rl.session.run import Run
from vlm_rl.session.session import Session
from vlm_rl.types import Group


class GapError(RuntimeError):
    """Raised where sampler and learner disagree about the log-probs of the same tokens."""


def train(config: Config, *, resume: bool = False) -> None:
    """Train until config.train.steps rollout steps are done.

    Raises:
        UserError: for a mistake in configuration, data or model, before anything is written.
        StoppedError: after SIGTERM, or where no rollout server is left, once the state is saved; exits with
            errors.EXIT_STOPPED.
        GapError: where sampler and learner describe different distributions.
        NonFiniteError: where a weight is NaN or infinite when a checkpoint is due; none is written.
    """
    with Run(config, resume=resume) as run, Session(config, run) as s, run.checkpoints:
        s.sync_weights()
        s.stop_if_asked(s.state())
        evaluate_if_due(s)
        while s.step < config.train.steps:
            train_step(s)
            evaluate_if_due(s)


def train_step(s: Session) -> None:
    """Run one rollout step: collect a batch of groups, take its optimizer steps, sync the new weights."""
    before, timings = s.state(), Timings(s.recorder.phase)
    try:
        batch = collect(s.collecting, step=s.step, belief=s.belief, phase=timings.phase)
    except ServersGoneError as error:
        s.ask_to_stop(error)
        s.stop_if_asked(before)
        raise
    s.stop_if_asked(before)  # abandons this step and saves its beginning
    beside_update = s.source.begin(s.step, timings.phase)
    parts = split(batch.groups, s.config.train.mini_batch_prompts)
    weights = [weigh(s, part) for part in parts]
    mini_batches = [pack(s, batch, part, weights_PG) for part, weights_PG in zip(parts, weights, strict=True)]
    s.give_card_to_learner()
    with beside_update:
        results = optimize(s, mini_batches, timings)
    with timings.phase("sync"):
        s.sync_weights()
    s.belief = batch.belief
    s.end_step()
    log_step(s, batch, weights, results, timings)
    s.save_if_due()
    s.stop_if_asked(s.state())


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
