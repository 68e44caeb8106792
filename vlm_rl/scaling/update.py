"""What an update costs on a number of ranks: rows as the learner plans them, and ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.row_plan import plan_rows, row_costs
from vlm_rl.scaling.lengths import BatchLengths


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """The cost of a mini-batch on its ranks; a token costs 1."""

    ranks: int
    rows: int  # of each rank
    useful: float  # of the whole mini-batch, every prompt once
    computed: float  # of all ranks, with repeated prompts and padding
    slowest: float  # of the slowest rank of each row, all rows together
    busiest: float  # of the rank that has most to do
    longest: float  # of the most expensive response behind its prompt, which no plan cuts

    @property
    def efficiency(self) -> float:
        """Return the useful share of the ranks' time where they wait for each other at every row."""
        return self.useful / (self.ranks * self.slowest)

    @property
    def efficiency_of_one_wait(self) -> float:
        """Return the same where they wait once a step, as under ZeRO 0 and 1."""
        return self.useful / (self.ranks * self.busiest)

    @property
    def bound(self) -> float:
        """Return the efficiency that no plan can exceed."""
        return min(1.0, self.useful / (self.ranks * self.longest))

    @property
    def repeated(self) -> float:
        """Return the share of repeated prompts and padding in what is computed."""
        return 1 - self.useful / self.computed


@dataclass(frozen=True, slots=True)
class Rows:
    """How a learner fills its rows."""

    budget: int  # most tokens of a row: train.micro_batch_tokens
    hidden_size: int
    padded: bool = False  # each response behind its own copy of the prompt

    @property
    def pair_cost(self) -> float:
        """Return what a pair of tokens costs, of which one attends to the other."""
        return 1 / (6 * self.hidden_size)


def plan_update(batch: BatchLengths, rows: Rows, *, ranks: int) -> PlannedUpdate:
    """Plan one mini-batch as the learner does."""
    costs_of = partial(row_costs, batch.prompts, batch.responses, pair_cost=rows.pair_cost, padded=rows.padded)
    plan = plan_rows(
        batch.prompts,
        batch.responses,
        budget=rows.budget,
        num_ranks=ranks,
        pair_cost=rows.pair_cost,
        padded=rows.padded,
    )
    costs = costs_of(plan)
    single = costs_of([[[Chunk(g, (i,))] for g, lengths in enumerate(batch.responses) for i in range(len(lengths))]])
    return PlannedUpdate(
        ranks=ranks,
        rows=len(plan[0]),
        useful=useful_cost(batch, rows),
        computed=sum(map(sum, costs)),
        slowest=sum(map(max, zip(*costs, strict=True))),
        busiest=max(map(sum, costs)),
        longest=max(single[0]),
    )


def useful_cost(batch: BatchLengths, rows: Rows) -> float:
    """Return what a batch costs with every prompt once, or with padded rows once for each response."""
    whole = [[[Chunk(group, tuple(range(len(lengths))))] for group, lengths in enumerate(batch.responses)]]
    costs = row_costs(batch.prompts, batch.responses, whole, pair_cost=rows.pair_cost, padded=rows.padded)
    return sum(costs[0])


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """How long the log-probs and updates of a batch take on one number of ranks."""

    ranks: int
    efficiency: float  # mean over some mini-batches
    rows: float  # of each rank in a mini-batch, likewise

    @classmethod
    def of(cls, sample: Sequence[BatchLengths], rows: Rows, *, ranks: int, waits_at_rows: bool) -> UpdateTime:
        """Plan some mini-batches.

        Args:
            sample: the mini-batches.
            rows: how rows are filled.
            ranks: of the learner.
            waits_at_rows: ranks wait for each other at every row, as under ZeRO 2 and 3, and not once a step.
        """
        plans = [plan_update(batch, rows, ranks=ranks) for batch in sample]
        shares = [plan.efficiency if waits_at_rows else plan.efficiency_of_one_wait for plan in plans]
        return cls(ranks, fmean(shares), fmean(plan.rows for plan in plans))

    def cost_per_rank(self, useful: float) -> float:
        """Return what a batch of this useful cost costs the slowest rank."""
        return useful / (self.ranks * self.efficiency)
