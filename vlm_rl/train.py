"""The training loop: generate, grade, weigh, update, sync.

    problems -> prompts -> rollouts -> rewards -> advantages -> token weights -> loss -> weights back

One call of ``train`` is one rank of a run; torchrun starts more. Every rank samples and grades its share of the
prompts. All groups are then gathered on every rank: weights per token are computed once, globally, and any rank may
train on any group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from vlm_rl.advantages import ADVANTAGES
from vlm_rl.config import Config
from vlm_rl.distributed import rank
from vlm_rl.learner.learner import LossFunction, UpdateResult
from vlm_rl.losses import policy_loss
from vlm_rl.rollouts.collect import RolloutBatch, collect
from vlm_rl.session.mini_batches import MiniBatches
from vlm_rl.session.periodic_evaluation import evaluate_if_due
from vlm_rl.session.recorder import Timings, step_metrics
from vlm_rl.session.run import Run
from vlm_rl.session.session import Session
from vlm_rl.session.token_credit import TokenCredit
from vlm_rl.types import Group


class GapError(RuntimeError):
    """Raised when sampler and learner disagree about the log-probs of the same tokens."""


def train(
    config: Config,
    *,
    resume: bool = False,
    remark: Callable[[int], str] | None = None,
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> None:
    """Train until config.train.steps rollout steps are done.

    Args:
        config: the run's configuration.
        resume: continue from the newest checkpoint that verifies.
        remark: returns a line about a finished step, whose rollouts and metrics are written; rank 0 prints it
            unless it is empty.
        functions: reward functions of this process, by the name behind cell: in their paths.

    Raises:
        UserError: for a mistake in configuration, data or model, before anything is written.
        StoppedError: after SIGTERM, if no rollout server is left, or if too many responses could not be judged. The
            state is saved first; exits with errors.EXIT_STOPPED.
        GapError: if sampler and learner describe different distributions.
        NonFiniteError: if a weight is NaN or infinite when a checkpoint is due; none is written.
    """
    with Run(config, resume=resume) as run, Session(config, run, functions) as session, run.checkpoints:
        session.sync_weights()
        session.settle_tags()
        session.stop_if_asked(session.state())
        evaluate_if_due(session)
        while session.step < config.train.steps:
            train_step(session)
            if remark is not None and rank() == 0 and (text := remark(session.step)):
                session.recorder.note(text)
            evaluate_if_due(session)


def train_step(session: Session) -> None:
    """Run one rollout step: collect a batch of groups, take its optimizer steps, sync the new weights."""
    before, timings = session.state(), Timings(session.recorder.phase)
    with session.abandoning(before):
        batch = collect(
            session.collecting, step=session.step, belief=session.belief, phase=timings.phase, history=session.history
        )
    session.stop_if_asked(before)  # abandons this step and saves its beginning
    beside_update = session.source.begin(session.step, timings.phase)
    parts = split(batch.groups, session.config.train.mini_batch_prompts)
    credit = TokenCredit(session, parts)  # weighs every token: losses.token_weights
    mini_batches = MiniBatches(session, batch, credit)
    mini_batches.packed(session.rows.tokens)  # while the engine has the card
    session.give_card_to_learner()
    with session.abandoning(before), beside_update, session.speed.update():  # a teacher's servers may be gone
        results = optimize(session, mini_batches, timings)
    with timings.phase("sync"):
        session.sync_weights()
    session.belief, session.history = batch.belief, batch.history
    session.end_step()
    log_step(session, batch, credit, results, timings)
    session.save_if_due()
    session.stop_if_asked(session.state())


# -- optimizing ------------------------------------------------------------------------------------


def split(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """Split into mini-batches of whole groups; the last may be smaller."""
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def optimize(session: Session, mini_batches: MiniBatches, timings: Timings) -> list[UpdateResult]:
    """Take one optimizer step per mini-batch. If memory runs out, the remaining ones use shorter rows."""
    results: list[UpdateResult] = []

    def attempt(tokens: int) -> list[UpdateResult]:
        prepared = mini_batches.prepared(tokens, timings)
        with timings.phase("update"):
            for rows in prepared[len(results) :]:
                results.append(
                    session.learner.update(rows, loss_of(session), before_step=partial(check_gap, session))
                )
        return results

    return session.rows.run(attempt)


def loss_of(session: Session) -> LossFunction:
    """Return the loss of the run's rule."""
    rule, options = session.algorithm, session.config.algorithm
    return partial(
        policy_loss,
        ratio=rule.ratio,
        surrogate=rule.surrogate,
        clip_low=rule.clip_low,
        clip_high=rule.clip_high,
        cap=options.correction_cap,
        kl_coef=options.kl_coef,
        entropy_coef=options.entropy_coef,
        rejection=options.rejection,
        rejection_bounds=(options.rejection_min, options.rejection_max),
        clip_dual=options.clip_dual,
        perception_coef=options.perception_coef,
        distillation_coef=options.distillation.coef,
        sapo_temperatures=(options.sapo_temperature_pos, options.sapo_temperature_neg),
    )


def check_gap(session: Session, sums: Mapping[str, float]) -> None:
    """Raise GapError if sampler and learner describe different distributions, by the sums over a mini-batch."""
    gap = sums.get("gap", 0.0) / max(sums.get("fresh_tokens", sums.get("tokens", 0.0)), 1.0)
    if not gap <= session.max_gap:  # NaN too
        raise GapError(
            f"step {session.step + 1}: the sampler's log-probs differ from the learner's by {gap:.3g} per token on "
            f"average, above rollout.max_gap={session.max_gap}: they compute different distributions. This update "
            f"was not made; compare {session.other_setting}"
        )


# -- logging ---------------------------------------------------------------------------------------


def log_step(
    session: Session,
    batch: RolloutBatch,
    credit: TokenCredit,
    results: Sequence[UpdateResult],
    timings: Timings,
) -> None:
    """Log the finished step.

    Args:
        session: the run, whose step counter is already increased.
        batch: the rollout batch.
        credit: the weights of the step's tokens.
        results: what each optimizer step returned.
        timings: the seconds of each phase.
    """
    with timings.phase("diagnostics"):
        # The parts of a reward share a response's advantage if that is linear in the reward, within its group.
        shared = session.algorithm.advantage in ADVANTAGES and not session.config.algorithm.length_bonus
        metrics = step_metrics(batch.groups, credit.mean_weights, results, parts_share_advantage=shared)
        metrics |= dict(batch.metrics) | credit.metrics | session.counters()
    seconds = timings.metrics()
    metrics |= seconds | session.speed.metrics(batch.groups, batch.prompt_lengths, seconds)
    looks = credit.looks(session.builder.pieces) if rank() == 0 else {}
    session.recorder.step(session.step, batch.groups, metrics, looks=looks)
    if (line := session.speed.warning()) is not None:
        session.recorder.note(line)
