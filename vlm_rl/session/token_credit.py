"""The credit of a step's tokens: from the log-probs with and without the image to the rows of every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from vlm_rl.credit import CREDITS, Credits, Dependence, dependence_metrics, visual_dependence
from vlm_rl.distributed import all_gather
from vlm_rl.learner.packing import PackedRow
from vlm_rl.losses import token_weights
from vlm_rl.run.rollout_row import TokenLooks
from vlm_rl.session.session import Session
from vlm_rl.types import Group

RECORDED_GROUPS = 4


class TokenCredit:
    """The weights of a step's tokens in the loss: of each response, and where credit is not uniform of each token."""

    def __init__(self, session: Session, parts: Sequence[Sequence[Group]]) -> None:
        """Weigh the responses of each mini-batch: of all of them, on every rank."""
        self._session, self.parts = session, parts
        self.of_responses = [weigh(session, part) for part in parts]
        self.mean_weights = self.of_responses  # of a response's tokens, with their credit; for the metrics
        self.metrics: dict[str, float] = {}
        self._dependence: Dependence = []  # of the whole step
        self._credits: list[Credits] = []

    @property
    def needs_blind_pass(self) -> bool:
        """Tell whether the log-probs without the image are needed."""
        is_wanted = self._session.algorithm.credit != "uniform" or self._session.config.algorithm.perception_coef > 0
        return is_wanted and self._session.policy.vision is not None

    @property
    def is_known(self) -> bool:
        """Tell whether `learn` has been called."""
        return bool(self._credits)

    def learn(self, seeing: Sequence[Sequence[PackedRow]], blind: Sequence[Sequence[PackedRow]]) -> None:
        """Compute the credit of every token of the step, on all ranks, before anything is split among them.

        Args:
            seeing: this rank's rows of each mini-batch, with old_logp_K given the images.
            blind: the same rows, with old_logp_K given blank images.
        """
        options, rule = self._session.config.algorithm, self._session.algorithm
        extra = {
            "uniform": {},
            "top_visual": {"share": options.credit_share, "floor": options.credit_floor},
            "visual": {"threshold": options.credit_threshold},
        }[rule.credit]
        dependence: list[Dependence] = [
            _dependence(part, *rows) for part, *rows in zip(self.parts, seeing, blind, strict=True)
        ]
        self._credits = [CREDITS[rule.credit](each, **extra) for each in dependence]
        masses = [_masses(part, each) for part, each in zip(self.parts, self._credits, strict=True)]
        pairs = zip(self.parts, masses, strict=True)
        self.of_responses = [weigh(self._session, part, mass_PG) for part, mass_PG in pairs]
        lengths = [np.stack([group.lengths_G for group in part]) for part in self.parts]
        self.mean_weights = [
            weights_PG * mass_PG / np.maximum(lengths_PG, 1)
            for weights_PG, mass_PG, lengths_PG in zip(self.of_responses, masses, lengths, strict=True)
        ]
        self._dependence = [group for each in dependence for group in each]
        self.metrics = dependence_metrics(
            self._dependence,
            [group for each in self._credits for group in each],
            [[reward.grade.correct for reward in group.rewards] for part in self.parts for group in part],
        )

    def looks(self, pieces: Callable[[np.ndarray], Sequence[str]]) -> dict[tuple[int, int], TokenLooks]:
        """Return S_t of a few responses, by group and response: a right and a wrong one of the first groups.

        Args:
            pieces: gives the text of each token.
        """
        found: dict[tuple[int, int], TokenLooks] = {}
        groups = [group for part in self.parts for group in part]
        seeing = [place for place, row in enumerate(self._dependence) if any(s is not None for s in row)]
        for place in seeing[:RECORDED_GROUPS]:
            group = groups[place]
            is_right = [reward.grade.correct for reward in group.rewards]
            for index in {is_right.index(right) for right in (True, False) if right in is_right}:
                if (s := self._dependence[place][index]) is not None:
                    rollout = group.rollouts[index]
                    found[place, rollout.index] = TokenLooks(pieces(rollout.ids), s)
        return found

    def with_blind(self, number: int, rows: Sequence[PackedRow], blind: Sequence[PackedRow]) -> list[PackedRow]:
        """Return the rows of a mini-batch with blind_logp_K, of the same rows in `blind`; NaN without images."""
        if not self._session.config.algorithm.perception_coef:
            return list(rows)
        sees = [group.shows_images for group in self.parts[number]]
        return [_with_blind(*pair, sees) for pair in zip(rows, blind, strict=True)]

    def filled(self, number: int, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """Return the rows of a mini-batch with their credits and weights."""
        return [fill(row, self._credits[number], self.of_responses[number]) for row in rows]


def weigh(session: Session, groups: Sequence[Group], masses_PG: np.ndarray | None = None) -> np.ndarray:
    """Return the weight [P, G] of every token of each response of one mini-batch.

    Where tokens have credits, BA's means over one sign are weighted: `masses_PG`, each response's summed credit,
    replaces its length. All other rules count all tokens.

    With overlong filtering (DAPO, arXiv 2503.14476, section 3.4) a truncated response is given length 0: it
    still counts in N and in its group's baseline, but its tokens weigh nothing. A dropped response weighs nothing
    either, and is in no baseline.
    """
    lengths_PG = np.stack([group.lengths_G for group in groups])
    lengths_PG = np.where([[reward.dropped for reward in group.rewards] for group in groups], 0, lengths_PG)
    if session.config.algorithm.mask_truncated:
        lengths_PG = np.where(
            [[r.stop_reason == "length" for r in group.rollouts] for group in groups], 0, lengths_PG
        )
    if masses_PG is not None and session.algorithm.aggregation == "balanced":
        lengths_PG = np.where(lengths_PG > 0, masses_PG, 0)
    return token_weights(
        session.algorithm.aggregation,
        lengths_PG,
        np.stack([group.advantages_G for group in groups]),
        max_tokens=session.config.rollout.max_tokens,
        exponent=session.config.algorithm.length_exponent,
    )


def fill(row: PackedRow, credit: Credits, weights_PG: np.ndarray) -> PackedRow:
    """Return the row with credit_K and weights_n of its members; what weighed nothing stays at 0, as padding does."""
    sizes = row.loss.lengths_n.tolist()
    of_members = [credit[group][index] for group, index in row.members]
    parts = [np.ones(size) if c is None else c for c, size in zip(of_members, sizes, strict=True)]
    weights_n = torch.tensor([float(weights_PG[member]) for member in row.members])
    weights_n = torch.where(row.loss.weights_n == 0, 0.0, weights_n)
    credit_K = torch.from_numpy(np.concatenate(parts)).float()
    return replace(row, loss=replace(row.loss, credit_K=credit_K, weights_n=weights_n))


def _with_blind(row: PackedRow, blind: PackedRow, sees: Sequence[bool]) -> PackedRow:
    assert blind.loss.old_logp_K is not None
    has_image_n = torch.tensor([sees[group] for group, _ in row.members])
    blind_logp_K = torch.where(has_image_n[row.loss.response_K], blind.loss.old_logp_K, torch.nan)
    return replace(row, loss=replace(row.loss, blind_logp_K=blind_logp_K))


def _dependence(part: Sequence[Group], seeing: Sequence[PackedRow], blind: Sequence[PackedRow]) -> Dependence:
    """Return S_t of a mini-batch, gathered from all ranks; None for prompts without images."""
    mine: dict[tuple[int, int], np.ndarray] = {}
    for with_image, without in zip(seeing, blind, strict=True):
        sizes = with_image.loss.lengths_n.tolist()
        assert with_image.loss.old_logp_K is not None and without.loss.old_logp_K is not None
        pairs = zip(without.loss.old_logp_K.split(sizes), with_image.loss.old_logp_K.split(sizes), strict=True)
        scores = [visual_dependence(a.numpy(), b.numpy()) for a, b in pairs]
        mine |= dict(zip(with_image.members, scores, strict=True))
    of_ranks: list[dict[tuple[int, int], np.ndarray]] = all_gather(mine)
    found = {member: s for each in reversed(of_ranks) for member, s in each.items()}  # the lowest rank's of padding
    return [
        [found[p, g] if group.shows_images else None for g in range(len(group.rollouts))]
        for p, group in enumerate(part)
    ]


def _masses(part: Sequence[Group], credit: Credits) -> np.ndarray:
    """Return the sum of each response's credits [P, G], its length where they are uniform."""
    return np.array(
        [
            [len(r.ids) if c is None else float(c.sum()) for r, c in zip(group.rollouts, row, strict=True)]
            for group, row in zip(part, credit, strict=True)
        ]
    )
