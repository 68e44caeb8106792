"""Planning: which rank computes which responses of a mini-batch, in which row.

Ranks wait for each other at every row, so the slowest row of each round decides. A few plans are made and the fastest
is taken: one of whole groups, and some that start from groups in parts and then move single responses away from the
slowest rank. A group in parts costs its prompt again. Token weights are fixed before, so every plan gives the same
gradients.

A group above the token budget is split in any case; a response never is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from vlm_rl.learner.packing import Chunk

PARTS = (0.5, 1, 1.5, 2, 3)  # how finely groups are cut to begin with: so many parts make an even share of the cost

Row = list[Chunk]
_EMPTY = (0, 0)  # the size of a row without chunks


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    """The lengths of a mini-batch, and what computing a part of it costs."""

    prompts: Sequence[int]  # tokens of each group's prompt
    responses: Sequence[Sequence[int]]  # tokens of each response of each group
    pair_cost: float
    padded: bool

    def lengths(self, chunk: Chunk) -> list[int]:
        """Return the tokens of the parts of a row that the chunk becomes: prompt and responses, or both together."""
        prompt, responses = self.prompts[chunk.group], [self.responses[chunk.group][i] for i in chunk.responses]
        return [prompt + size for size in responses] if self.padded else [prompt, *responses]

    def grow(self, size: tuple[int, int], chunk: Chunk) -> tuple[int, int]:
        """Return the size of a row (parts, tokens of each) with one more chunk; without padding it is one part."""
        parts, tokens = size
        lengths = self.lengths(chunk)
        return (parts + len(lengths), max(tokens, *lengths)) if self.padded else (1, tokens + sum(lengths))

    def cost(self, chunk: Chunk) -> float:
        """Return the cost, rounded once: equal groups tie, whatever the order of their responses."""
        if self.padded:
            return math.fsum(self.response_cost(chunk.group, index) for index in chunk.responses)
        prompt, *responses = self.lengths(chunk)
        pairs = prompt**2 / 2 + sum(prompt * size + size**2 / 2 for size in responses)
        return prompt + sum(responses) + self.pair_cost * pairs

    def total(self, chunks: Sequence[Chunk]) -> float:
        return sum(map(self.cost, chunks))

    def prompt_cost(self, group: int) -> float:
        """Return what the prompt costs where there is a response to it."""
        return 0.0 if self.padded else self.prompts[group] + self.pair_cost * self.prompts[group] ** 2 / 2

    def response_cost(self, group: int, index: int) -> float:
        """Return what the response costs behind a prompt that is there; padded, its own copy of the prompt too."""
        size = self.responses[group][index]
        if self.padded:
            size += self.prompts[group]
            return size + self.pair_cost * size**2 / 2
        return size + self.pair_cost * (self.prompts[group] * size + size**2 / 2)


def plan_rows(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[Sequence[int]],
    *,
    budget: int,
    num_ranks: int = 1,
    pair_cost: float = 0.0,
    padded: bool = False,
) -> list[list[Row]]:
    """Deal the responses of a mini-batch out to ranks and rows: ``plan[rank][row]`` is a list of chunks.

    Every response is planned once. On several ranks groups are cut, and their prompts repeated, where the slowest
    rank gains more than that costs. All ranks get the same number of rows: the missing ones are padding of weight
    zero. Each rank's rows are sorted by falling cost, so that rows computed at the same time cost about the same.

    Args:
        prompt_lengths: tokens of each group's prompt.
        response_lengths: tokens of each response of each group.
        budget: most tokens of a row; a single response above it still gets a row of its own.
        num_ranks: ranks to balance the cost over.
        pair_cost: cost of a pair of tokens of which one attends to the other, where a token costs 1;
            1 / (6 hidden size) is about right for a transformer.
        padded: whether each response is computed behind a copy of its prompt, and filled up to the longest.
    """
    assert prompt_lengths, "a mini-batch needs at least one group"
    batch = _MiniBatch(prompt_lengths, response_lengths, pair_cost, padded)
    groups = [Chunk(group, tuple(range(len(responses)))) for group, responses in enumerate(response_lengths)]
    fitting = [part for group in groups for part in _split(batch, group, budget)]
    plans = [_plan(batch, [_fill_rows(batch, chunks, budget) for chunks in _deal(batch, fitting, num_ranks)])]
    if num_ranks > 1:
        num_rows = -(-sum(sum(batch.lengths(group)) for group in groups) // (num_ranks * budget))
        for rows_a_rank in (num_rows, num_rows + 1):
            num_bins = min(num_ranks * rows_a_rank, sum(map(len, response_lengths)))
            plans += [_cut_plan(batch, groups, budget, num_ranks, num_bins, parts) for parts in PARTS]

    def time(plan: list[list[Row]]) -> float:
        return sum(max(map(batch.total, rows)) for rows in zip(*plan, strict=True))

    return min(plans, key=time)


def row_costs(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[Sequence[int]],
    plan: Sequence[Sequence[Row]],
    *,
    pair_cost: float = 0.0,
    padded: bool = False,
) -> list[list[float]]:
    """Return what each row of a plan costs, by rank; a token costs 1. The arguments are those of `plan_rows`."""
    batch = _MiniBatch(prompt_lengths, response_lengths, pair_cost, padded)
    return [[batch.total(row) for row in rows] for rows in plan]


def _cut_plan(
    batch: _MiniBatch, groups: Sequence[Chunk], budget: int, num_ranks: int, num_bins: int, parts: float
) -> list[list[Row]]:
    """Return the plan that deals groups in parts out to bins of even cost, and the bins in falling order to ranks."""
    share = batch.total(groups) / num_bins
    cut = [part for group in groups for part in _cut(batch, group, parts * batch.cost(group) / share)]
    bins = _even_out(batch, _deal(batch, cut, num_bins))
    bins.sort(key=lambda chunks: -batch.total(chunks))
    fitting = [[part for chunk in chunks for part in _split(batch, chunk, budget)] for chunks in bins]
    rows = [_fill_rows(batch, chunks, budget) for chunks in fitting]
    return _plan(batch, [list(chain(*rows[rank::num_ranks])) for rank in range(num_ranks)])


def _plan(batch: _MiniBatch, ranks: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Return each rank's rows, the most expensive first, filled up with padding to the same number."""
    plan = [sorted(rows, key=lambda row: -batch.total(row)) for rows in ranks]
    chunks = [chunk for rows in plan for row in rows for chunk in row]
    cheapest = max(chunks, key=lambda chunk: (-batch.cost(chunk), chunk.group, chunk.responses))
    padding = Chunk(cheapest.group, cheapest.responses[:1], is_padding=True)
    num_rows = max(map(len, plan))
    return [rows + [[padding]] * (num_rows - len(rows)) for rows in plan]


def _deal(batch: _MiniBatch, chunks: Sequence[Chunk], num_ranks: int) -> list[list[Chunk]]:
    """Return each rank's chunks: the most expensive first, to the least loaded rank."""
    ranks: list[list[Chunk]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for chunk in sorted(chunks, key=lambda chunk: (-batch.cost(chunk), chunk.group, chunk.responses)):
        rank = loads.index(min(loads))
        ranks[rank].append(chunk)
        loads[rank] += batch.cost(chunk)
    return ranks


def _even_out(batch: _MiniBatch, ranks: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """Move single responses away from the slowest rank for as long as no other becomes as slow.

    A rank pays for a prompt once, however many of its responses it has.
    """
    held: list[dict[int, set[int]]] = [{} for _ in ranks]
    for groups, chunks in zip(held, ranks, strict=True):
        for chunk in chunks:
            groups.setdefault(chunk.group, set()).update(chunk.responses)
    loads = [_load(batch, groups) for groups in held]
    while (move := _best_move(batch, held, loads)) is not None:
        slowest, group, index, other = move
        held[slowest][group].remove(index)
        if not held[slowest][group]:
            del held[slowest][group]
        held[other].setdefault(group, set()).add(index)
        loads[slowest], loads[other] = _load(batch, held[slowest]), _load(batch, held[other])
    return [[Chunk(group, tuple(sorted(members))) for group, members in sorted(groups.items())] for groups in held]


def _best_move(
    batch: _MiniBatch, held: Sequence[Mapping[int, Set[int]]], loads: Sequence[float]
) -> tuple[int, int, int, int] | None:
    """Return (slowest rank, group, response, other rank) whose larger load is least, or None if nothing is gained."""
    slowest = max(range(len(loads)), key=loads.__getitem__)
    least, best = loads[slowest] * (1 - 1e-4), None
    for group, members in held[slowest].items():
        prompt = batch.prompt_cost(group)
        for index in members:
            response = batch.response_cost(group, index)
            rest = loads[slowest] - response - (prompt if len(members) == 1 else 0.0)
            for other, load in enumerate(loads):
                if other == slowest or load + response >= least:
                    continue
                larger = max(rest, load + response + (0.0 if group in held[other] else prompt))
                if larger < least:
                    least, best = larger, (slowest, group, index, other)
    return best


def _load(batch: _MiniBatch, groups: Mapping[int, Set[int]]) -> float:
    return sum(
        batch.prompt_cost(group) + sum(batch.response_cost(group, index) for index in sorted(members))
        for group, members in sorted(groups.items())
    )


def _cut(batch: _MiniBatch, group: Chunk, num_parts: float) -> list[Chunk]:
    """Return the group in about this many parts of about equal cost, none of them empty."""
    parts: list[list[int]] = [[] for _ in range(max(1, min(math.ceil(num_parts), len(group.responses))))]
    loads = [0.0] * len(parts)
    costs = {index: batch.response_cost(group.group, index) for index in group.responses}
    for index in sorted(costs, key=lambda index: -costs[index]):
        part = min(range(len(parts)), key=lambda part: (loads[part], len(parts[part])))
        parts[part].append(index)
        loads[part] += costs[index]
    return [Chunk(group.group, tuple(sorted(part))) for part in parts]


def _split(batch: _MiniBatch, chunk: Chunk, budget: int) -> list[Chunk]:
    """Return the chunk's responses, in order, as chunks that each fit the budget with the prompt."""
    parts: list[list[int]] = [[]]
    for index in chunk.responses:
        grown = Chunk(chunk.group, (*parts[-1], index))
        if parts[-1] and math.prod(batch.grow(_EMPTY, grown)) > budget:
            parts.append([])
        parts[-1].append(index)
    return [Chunk(chunk.group, tuple(part)) for part in parts]


def _fill_rows(batch: _MiniBatch, chunks: Sequence[Chunk], budget: int) -> list[Row]:
    """Return rows of chunks, each chunk in the first row that has room for it."""
    rows: list[Row] = []
    sizes: list[tuple[int, int]] = []
    for chunk in chunks:
        slot = next((i for i, size in enumerate(sizes) if math.prod(batch.grow(size, chunk)) <= budget), len(rows))
        if slot == len(rows):
            rows.append([])
            sizes.append(_EMPTY)
        rows[slot].append(chunk)
        sizes[slot] = batch.grow(sizes[slot], chunk)
    return [sorted(row, key=lambda chunk: (chunk.group, chunk.responses)) for row in rows]
