"""Compare two checkpoints on the problems that both answered: who reasons longer, and does it pay."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vlm_rl.demo.numbers.problem_table import ProblemTable
from vlm_rl.stats import Estimate, estimate

NUM_TELLING = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Checkpoint `index` against checkpoint `against` on the kept problems; indices into the table's."""

    index: int
    against: int
    tokens: Estimate  # change, paired by problem
    score: Estimate  # change, as a difference of shares
    won: int  # problems with a higher score than `against` has
    lost: int
    per_right: tuple[float, float]  # tokens per right answer of `against` and of `index`; NaN where none is right


def compare(table: ProblemTable, keep_P: np.ndarray, index: int, against: int) -> Comparison:
    """Compare two checkpoints of the table."""
    length, score, clusters = table.length_CP[:, keep_P], table.score_CP[:, keep_P], table.cluster_P[keep_P]
    change = score[index] - score[against]
    return Comparison(
        index,
        against,
        tokens=estimate(length[index] - length[against], clusters=clusters),
        score=estimate(change, clusters=clusters, bounds=(-1, 1)),
        won=int((change > 0).sum()),
        lost=int((change < 0).sum()),
        per_right=(_per_right(length[against], score[against]), _per_right(length[index], score[index])),
    )


def _per_right(length_P: np.ndarray, score_P: np.ndarray) -> float:
    """Return all tokens divided by all right answers, where every problem counts alike."""
    return float(length_P.sum() / score_P.sum()) if score_P.sum() else math.nan


def comparisons(table: ProblemTable, keep_P: np.ndarray) -> list[Comparison]:
    """Compare each checkpoint with the baseline, then the last shown one of each run with that of each run before."""
    pairs = [(index, 0) for index in range(1, len(table.checkpoints))]
    last = sorted({checkpoint.runs: index for index, checkpoint in enumerate(table.checkpoints) if index}.values())
    pairs += [(b, a) for place, b in enumerate(last) for a in last[:place]]
    return [compare(table, keep_P, index, against) for index, against in pairs]


# -- single problems -------------------------------------------------------------------------------


def telling_problems(table: ProblemTable, keep_P: np.ndarray, index: int, against: int) -> list[int]:
    """Return up to three kept problems that show what length did, as indices into the table's.

    These are, where they exist: of those that became right the one that grew most, of those that did not the one
    that grew most, and of those that are still right the one that shrank most. Others follow by how much their
    length differs.
    """
    kept = np.flatnonzero(keep_P)
    growth = (table.length_CP[index] - table.length_CP[against])[kept]
    before, after = table.score_CP[against, kept], table.score_CP[index, kept]
    wanted = (
        (growth, (after > before) & (growth > 0)),
        (growth, (after <= before) & (growth > 0)),
        (-growth, (after >= before) & (after > 0) & (growth < 0)),
    )
    chosen = [int(np.where(mask, amount, -np.inf).argmax()) for amount, mask in wanted if mask.any()]
    by_difference = np.argsort(-np.abs(growth), kind="stable").tolist()
    return [int(kept[place]) for place in list(dict.fromkeys([*chosen, *by_difference]))[:NUM_TELLING]]
