"""The packed rows of a step's mini-batches, with the log-probs that precede its first optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from vlm_rl.data.prompts import PromptCache, rope_positions
from vlm_rl.data.turns import as_prompt
from vlm_rl.learner.packing import PackedRow, pack_row, with_log_probs_of, with_sampler_log_probs
from vlm_rl.learner.row_plan import plan_rows
from vlm_rl.metrics import length_tenths
from vlm_rl.rollouts.collect import RolloutBatch
from vlm_rl.session.recorder import Timings
from vlm_rl.session.session import Session
from vlm_rl.session.teacher import Teacher
from vlm_rl.session.token_credit import TokenCredit
from vlm_rl.types import Group, Prompt


class MiniBatches:
    """This rank's rows of the mini-batches of one step."""

    def __init__(self, session: Session, batch: RolloutBatch, credit: TokenCredit) -> None:
        """Take the rollout batch, with the prompts of this rank, and the credit of its tokens."""
        self._session, self._batch, self._credit = session, batch, credit
        self._weights = credit.of_responses
        self._packed: dict[int, Sequence[list[PackedRow]]] = {}
        self._before_first_step: Sequence[list[PackedRow]] = []

    def packed(self, tokens: int) -> Sequence[list[PackedRow]]:
        """Return the rows of each mini-batch, of at most so many tokens each; the last answer is kept."""
        if tokens not in self._packed:
            self._packed = {tokens: self._pack(tokens)}
        return self._packed[tokens]

    def prepared(self, tokens: int, timings: Timings) -> Sequence[list[PackedRow]]:
        """Return the rows with image features where the vision tower is frozen, and with old log-probs.

        A second call, with other tokens a row, keeps the log-probs of the first: weights may have moved since.
        """
        session, mini_batches = self._session, self.packed(tokens)
        if session.policy.has_frozen_vision:
            with timings.phase("image_features"):
                mini_batches = [session.learner.with_image_features(rows) for rows in mini_batches]
        if session.config.train.old_logprobs == "sampler":
            mini_batches = with_sampler_log_probs(mini_batches)
        if self._before_first_step:
            pairs = zip(mini_batches, self._before_first_step, strict=True)
            mini_batches = [with_log_probs_of(*pair) for pair in pairs]
        else:
            mini_batches = self._with_log_probs(mini_batches, timings, raw=self.packed(tokens))
            mini_batches = self._with_teacher(mini_batches, timings, tokens)
        if self._credit.is_known:
            mini_batches = [self._credit.filled(number, rows) for number, rows in enumerate(mini_batches)]
        self._before_first_step = mini_batches
        return mini_batches

    def _with_log_probs(
        self, mini_batches: Sequence[list[PackedRow]], timings: Timings, *, raw: Sequence[list[PackedRow]]
    ) -> Sequence[list[PackedRow]]:
        """Return the rows with the log-probs at the weights before the first step, and with the reference's.

        With a credit, both passes that it needs are over all mini-batches; `raw` are the rows with pixels.
        """
        learner, reference = self._session.learner, self._session.reference
        if self._credit.needs_blind_pass:
            with timings.phase("old_logprobs"):
                seeing = [learner.with_old_log_probs(rows) for rows in mini_batches]
            with timings.phase("blind_logprobs"):
                image = self._session.config.algorithm.blind_image
                blind = [learner.with_blind_log_probs(rows, image) for rows in raw]
                self._credit.learn(seeing, blind)
            if self._session.config.train.old_logprobs == "learner":
                mini_batches = seeing
            mini_batches = [
                self._credit.with_blind(number, *pair)
                for number, pair in enumerate(zip(mini_batches, blind, strict=True))
            ]
        elif len(mini_batches) > 1 and self._session.config.train.old_logprobs == "learner":
            # The first one's old log-probs are those of its own forward pass.
            with timings.phase("old_logprobs"):
                later = [learner.with_old_log_probs(rows) for rows in mini_batches[1:]]
                mini_batches = [mini_batches[0], *later]
        if reference is not None:
            with timings.phase("reference_logprobs"):
                # A run that starts from another's checkpoint has its frozen tower, which need not be model.path's.
                has_own_tower = self._session.config.train.start_from is not None
                seen = raw if has_own_tower else mini_batches
                scored = [learner.with_reference_log_probs(rows, reference) for rows in seen]
                if has_own_tower:
                    scored = [with_log_probs_of(*pair) for pair in zip(mini_batches, scored, strict=True)]
                mini_batches = scored
        return mini_batches

    def _with_teacher(
        self, mini_batches: Sequence[list[PackedRow]], timings: Timings, tokens: int
    ) -> Sequence[list[PackedRow]]:
        """Return the rows with the log-probs of the teacher, if there is one; it sees pixels with its own tower."""
        teacher = self._session.teacher
        if teacher is None:
            return mini_batches
        with timings.phase("teacher_logprobs"):
            if teacher.servers is not None:
                pairs = zip(self._credit.parts, mini_batches, strict=True)
                return teacher.asked([(groups, rows) for groups, rows in pairs], self._session.builder)
            shown = self._pack(tokens, teacher) if teacher.hint else self.packed(tokens)
            return [teacher.scored(self._session.learner, *pair) for pair in zip(mini_batches, shown, strict=True)]

    def _pack(self, tokens: int, teacher: Teacher | None = None) -> Sequence[list[PackedRow]]:
        return pack(self._session, self._batch, self._credit.parts, self._weights, tokens, teacher=teacher)


def pack(
    session: Session,
    batch: RolloutBatch,
    parts: Sequence[Sequence[Group]],
    weights: Sequence[np.ndarray],
    tokens: int,
    *,
    teacher: Teacher | None = None,
) -> list[list[PackedRow]]:
    """Return this rank's rows of each mini-batch. Prompts are built only for these: pixels are most of the work.

    Args:
        session: the run.
        batch: the rollout batch, with the prompts of this rank.
        parts: the mini-batches, on all ranks.
        weights: for each of them, the weight [P, G] of every token of each response.
        tokens: the most of a row.
        teacher: reads the prompts in place of the policy; its hints come on top of `tokens`.
    """

    def prompt_of(group: Group) -> Prompt:
        return batch.prompts.with_start(group.problem, group.start)

    if teacher is not None:
        of_teacher = PromptCache(session.builder)

        def prompt_of(group: Group) -> Prompt:
            return of_teacher.with_start(teacher.shown(group.problem), group.start)

    lengths = [np.stack([group.lengths_G for group in part]) for part in parts]
    tenths = length_tenths(np.concatenate([lengths_PG.ravel() for lengths_PG in lengths] or [np.zeros(0)]))
    shares = np.split(tenths, np.cumsum([lengths_PG.size for lengths_PG in lengths])[:-1]) if lengths else []
    return [
        _pack_one(session, batch, part, weights_PG, share.reshape(weights_PG.shape), tokens, prompt_of)
        for part, weights_PG, share in zip(parts, weights, shares, strict=True)
    ]


def _pack_one(
    session: Session,
    batch: RolloutBatch,
    groups: Sequence[Group],
    weights_PG: np.ndarray,
    tenths_PG: np.ndarray,
    tokens: int,
    prompt_of: Callable[[Group], Prompt],
) -> list[PackedRow]:
    ranks = session.policy.ranks
    plan = plan_rows(
        [batch.prompt_lengths[group.problem.id] for group in groups],
        [group.sizes_G.tolist() for group in groups],
        budget=tokens,
        num_ranks=ranks.number,
        pair_cost=1 / (6 * session.policy.model.config.get_text_config().hidden_size),
        padded=session.policy.is_padded,
    )[ranks.index]
    row_of = partial(
        pack_row,
        groups=groups,
        prompts={chunk.group: prompt_of(groups[chunk.group]) for chunks in plan for chunk in chunks},
        weights_PG=weights_PG,
        positions=partial(rope_positions, session.policy.model),
        observed=partial(as_prompt, session.builder),
        mean_weight=1 / sum(int(group.lengths_G.sum()) for group in groups),
        tenths_PG=tenths_PG,
        version=session.sampler.policy_version if session.config.rollout.mixes_versions else None,
    )
    return [row_of(chunks) for chunks in plan]
