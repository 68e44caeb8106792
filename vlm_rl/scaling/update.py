"""What an update costs on a number of ranks: rows as the learner plans them, and ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.row_plan import PlannedRow, plan_rows, row_costs
from vlm_rl.scaling.lengths import BatchLengths


@dataclass(frozen=True, slots=True)
class Rows:
    """How a learner fills its rows."""

    budget: int  # most tokens of a row: train.micro_batch_tokens
    hidden_size: int
    padded: bool = False  # each response after its own copy of the prompt
    shared_by: int = 1  # ranks that compute a row together: train.sequence_parallel

    @property
    def pair_cost(self) -> float:
        """Return the cost of a pair of tokens, of which one attends to the other."""
        return 1 / (6 * self.hidden_size)


def useful_cost(batch: BatchLengths, rows: Rows) -> float:
    """Return the cost of a batch with every prompt once, or with padded rows once for each response."""
    whole = [[[Chunk(group, tuple(range(len(lengths))))] for group, lengths in enumerate(batch.responses)]]
    return sum(_costs(batch, rows, whole)[0])


def _costs(batch: BatchLengths, rows: Rows, plan: Sequence[Sequence[PlannedRow]]) -> Sequence[Sequence[float]]:
    return row_costs(batch.prompts, batch.responses, plan, pair_cost=rows.pair_cost, padded=rows.padded)


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """How long the log-probs and updates of a batch take on one number of ranks."""

    ranks: int
    efficiency: float  # mean over some mini-batches
    rows: float  # of each rank in a mini-batch, the mean too

    @classmethod
    def of(cls, sample: Sequence[BatchLengths], rows: Rows, *, ranks: int, waits_at_rows: bool) -> UpdateTime:
        """Plan some mini-batches.

        Args:
            sample: the mini-batches.
            rows: how rows are filled.
            ranks: of the learner, a multiple of those that share a row; each computes an equal part of it.
            waits_at_rows: ranks wait for each other at every row, as under ZeRO 2 and 3, and not once a step.
        """
        shares, counts, groups = [], [], ranks // rows.shared_by
        for batch in sample:
            plan_of = partial(plan_rows, batch.prompts, batch.responses, budget=rows.budget, num_ranks=groups)
            plan = plan_of(pair_cost=rows.pair_cost, padded=rows.padded)
            costs = _costs(batch, rows, plan)
            slowest = sum(map(max, zip(*costs, strict=True))) if waits_at_rows else max(map(sum, costs))
            shares.append(useful_cost(batch, rows) / (groups * slowest))
            counts.append(len(plan[0]))
        return cls(ranks, fmean(shares), fmean(counts))

    def cost_per_rank(self, useful: float) -> float:
        """Return what a batch of this useful cost costs the slowest rank."""
        return useful / (self.ranks * self.efficiency)
