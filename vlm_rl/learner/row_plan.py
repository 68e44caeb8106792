"""The row plan: which rank computes which responses of a mini-batch, in which row.

Ranks wait for each other at every row, so the slowest row of each round decides. A few plans are made and the fastest
is taken: one of whole groups, and some that start from groups in parts and then take single responses away from the
slowest rank, by moves and swaps. A group in parts costs its prompt again. Token weights are fixed before, so every
plan gives the same gradients.

A group above the token budget is split in any case; a response never is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from vlm_rl.learner.packing import Chunk

PARTS = (0.5, 1, 1.5, 2, 3)  # how finely groups are cut to begin with: so many parts make an even share of the cost
SHAKES = 32  # of the best of these starts: about 1 ms each
_SHAKEN = 4  # responses that a shake moves

PlannedRow = list[Chunk]
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

    def grow(self, size: tuple[int, int], chunk: Chunk, *, has_prompt: bool = False) -> tuple[int, int]:
        """Return the size of a row (parts, tokens of each) with one more chunk; without padding it is one part.

        `has_prompt` tells whether the row has the chunk's prompt already.
        """
        parts, tokens = size
        lengths = self.lengths(chunk)
        if self.padded:
            return parts + len(lengths), max(tokens, *lengths)
        return 1, tokens + sum(lengths[has_prompt:])

    def cost(self, chunk: Chunk) -> float:
        """Return the cost, rounded once: equal groups tie, whatever the order of their responses."""
        if self.padded:
            return math.fsum(self.response_cost(chunk.group, index) for index in chunk.responses)
        prompt, *responses = self.lengths(chunk)
        pairs = prompt**2 / 2 + sum(prompt * size + size**2 / 2 for size in responses)
        return prompt + sum(responses) + self.pair_cost * pairs

    def total(self, chunks: Sequence[Chunk]) -> float:
        return sum(map(self.cost, chunks))

    def time(self, plan: Sequence[Sequence[PlannedRow]]) -> float:
        """Return the cost of the slowest rank's row, summed over the rows: ranks wait for each other at each."""
        return sum(max(map(self.total, rows)) for rows in zip(*plan, strict=True))

    def prompt_cost(self, group: int) -> float:
        """Return the prompt's cost in a row that has a response to it."""
        return 0.0 if self.padded else self.prompts[group] + self.pair_cost * self.prompts[group] ** 2 / 2

    def response_cost(self, group: int, index: int) -> float:
        """Return the response's cost after its prompt; padded, with its own copy of the prompt."""
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
) -> list[list[PlannedRow]]:
    """Deal the responses of a mini-batch out to ranks and rows: ``plan[rank][row]`` is a list of chunks.

    Every response is planned once. On several ranks groups are cut, and their prompts repeated, where the slowest
    rank gains more than that costs. All ranks get the same number of rows: the missing ones are padding of weight
    zero. Each rank's rows are sorted by falling cost, so that rows computed at the same time cost about the same.

    Args:
        prompt_lengths: tokens of each group's prompt.
        response_lengths: tokens of each response of each group.
        budget: most tokens of a row; a single response above it still gets a row to itself.
        num_ranks: ranks to balance the cost over.
        pair_cost: cost of a pair of tokens of which one attends to the other, where a token costs 1;
            1 / (6 hidden size) is about right for a transformer.
        padded: whether each response is computed after a copy of its prompt, and filled up to the longest.
    """
    assert prompt_lengths, "a mini-batch needs at least one group"
    batch = _MiniBatch(prompt_lengths, response_lengths, pair_cost, padded)
    groups = [Chunk(group, tuple(range(len(responses)))) for group, responses in enumerate(response_lengths)]
    fitting = [part for group in groups for part in _split(batch, group, budget)]
    dealt = [_fill_rows(batch, chunks, budget) for chunks in _deal(batch, fitting, num_ranks)]
    fastest = _plan(batch, dealt)
    if num_ranks > 1:
        num_rows = -(-sum(sum(batch.lengths(group)) for group in groups) // (num_ranks * budget))
        bin_counts = [min(num_ranks * rows, sum(map(len, response_lengths))) for rows in (num_rows, num_rows + 1)]
        starts = [_cut_bins(batch, groups, num_bins, parts) for num_bins in bin_counts for parts in PARTS]
        bins = [_evened_out(batch, start) for start in _distinct(starts)]
        plans = [_plan(batch, _dealt_rows(batch, each, budget, num_ranks)) for each in bins]
        if plans:
            best = min(range(len(plans)), key=lambda i: batch.time(plans[i]))
            shaken = _evened_out(batch, bins[best], shakes=SHAKES)
            plans.append(_plan(batch, _dealt_rows(batch, shaken, budget, num_ranks)))
        fastest = min([fastest, *plans], key=batch.time)
    return fastest


def row_costs(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[Sequence[int]],
    plan: Sequence[Sequence[PlannedRow]],
    *,
    pair_cost: float = 0.0,
    padded: bool = False,
) -> list[list[float]]:
    """Return the cost of each row of a plan, by rank; a token costs 1.

    `plan` is what `plan_rows` returned, and the other arguments are those of `plan_rows`.
    """
    batch = _MiniBatch(prompt_lengths, response_lengths, pair_cost, padded)
    return [[batch.total(row) for row in rows] for rows in plan]


def _distinct(starts: Sequence[list[list[Chunk]]]) -> list[list[list[Chunk]]]:
    return [start for i, start in enumerate(starts) if start not in starts[:i]]


def _cut_bins(batch: _MiniBatch, groups: Sequence[Chunk], num_bins: int, parts: float) -> list[list[Chunk]]:
    """Return groups dealt out to bins of about even cost, cut so finely that `parts` of them fill one."""
    share = batch.total(groups) / num_bins
    cut = [part for group in groups for part in _cut(batch, group, parts * batch.cost(group) / share)]
    return _deal(batch, cut, num_bins)


def _dealt_rows(
    batch: _MiniBatch, bins: Sequence[Sequence[Chunk]], budget: int, num_ranks: int
) -> list[list[PlannedRow]]:
    """Return each rank's rows: the bins are dealt out in falling order, and make one row each, or more."""
    falling = sorted(bins, key=lambda chunks: -batch.total(chunks))
    fitting = [[part for chunk in chunks for part in _split(batch, chunk, budget)] for chunks in falling]
    rows = [_fill_rows(batch, chunks, budget) for chunks in fitting]
    return [list(chain(*rows[rank::num_ranks])) for rank in range(num_ranks)]


def _plan(batch: _MiniBatch, ranks: Sequence[Sequence[PlannedRow]]) -> list[list[PlannedRow]]:
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


def _evened_out(batch: _MiniBatch, bins: Sequence[Sequence[Chunk]], *, shakes: int = 0) -> list[list[Chunk]]:
    """Return the bins after moves and swaps of single responses that make the fullest less full, until none does.

    Such a search ends where no single step helps. Each shake moves a few responses anywhere and searches again; the
    result is kept if it is better. A bin pays for a prompt once, however many of its responses it has.

    Costs are whole 1/256 tokens: their sums are exact, so every rank, on whatever processor, finds the same plan.
    """
    places = [
        (k, chunk.group, index) for k, chunks in enumerate(bins) for chunk in chunks for index in chunk.responses
    ]
    groups = np.array([group for _, group, _ in places])
    costs = _Costs(
        groups=groups,
        responses=_whole([batch.response_cost(group, index) for _, group, index in places]),
        prompts=_whole([batch.prompt_cost(group) for group in range(len(batch.prompts))]),
        num_bins=len(bins),
    )
    best = costs.improved(np.array([k for k, *_ in places]))
    rng = np.random.default_rng(0)
    for _ in range(shakes):
        if costs.fullest(best) <= 1.01 * costs.least:
            break
        shaken = best.copy()
        shaken[rng.integers(len(places), size=_SHAKEN)] = rng.integers(len(bins), size=_SHAKEN)
        shaken = costs.improved(shaken)
        best = min(best, shaken, key=costs.fullest)
    members: list[dict[int, list[int]]] = [{} for _ in bins]
    for k, (_, group, index) in zip(best.tolist(), places, strict=True):
        members[k].setdefault(group, []).append(index)
    return [_chunks(parts) for parts in members]


def _chunks(responses: Mapping[int, Sequence[int]]) -> list[Chunk]:
    """Return one chunk of each group, from the indices of its responses."""
    return [Chunk(group, tuple(sorted(responses[group]))) for group in sorted(responses)]


def _whole(costs: Sequence[float]) -> np.ndarray:
    return np.rint(256 * np.array(costs)).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    """What bins of responses cost. In the names of arrays N is a response, B a bin, P a prompt, that is, a group."""

    groups: np.ndarray  # [N]
    responses: np.ndarray  # [N]
    prompts: np.ndarray  # [P]
    num_bins: int

    @property
    def least(self) -> float:
        """Return the least cost of the fullest bin: an even share, and the longest response."""
        even = (self.responses.sum() + self.prompts.sum()) / self.num_bins
        return max(even, (self.responses + self.prompts[self.groups]).max())

    def of_bins(self, bin_of_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the cost of each bin, and how many responses of each group it holds."""
        held_BP = np.zeros((self.num_bins, len(self.prompts)), dtype=np.int64)
        np.add.at(held_BP, (bin_of_N, self.groups), 1)
        cost_B = (held_BP > 0) @ self.prompts
        np.add.at(cost_B, bin_of_N, self.responses)
        return cost_B, held_BP

    def fullest(self, bin_of_N: np.ndarray) -> int:
        """Return the cost of the fullest bin."""
        return int(self.of_bins(bin_of_N)[0].max())

    def improved(self, bin_of_N: np.ndarray) -> np.ndarray:
        """Take responses out of the fullest bin, for none or for one of a different bin, while that helps."""
        bin_of_N = bin_of_N.copy()
        while True:
            cost_B, held_BP = self.of_bins(bin_of_N)
            fullest = int(cost_B.argmax())
            enough = cost_B[fullest] - cost_B[fullest] // 10_000  # smaller steps are not worth their time
            mine = np.flatnonzero(bin_of_N == fullest)
            cost_M, group_M = self.responses[mine], self.groups[mine]
            left_M = cost_B[fullest] - cost_M - self._last(held_BP[fullest, group_M], group_M)

            into_MB = cost_B + cost_M[:, None] + self._new(held_BP[:, group_M].T, group_M[:, None])
            moved_MB = np.maximum(left_M[:, None], into_MB)
            m, b = np.unravel_index(moved_MB.argmin(), moved_MB.shape)
            if moved_MB[m, b] < enough:
                bin_of_N[mine[m]] = b
                continue

            others = np.flatnonzero(bin_of_N != fullest)
            if len(others) == 0:
                return bin_of_N
            cost_O, group_O, bin_O = self.responses[others], self.groups[others], bin_of_N[others]
            # One of the same group keeps the prompt where it is, in both bins.
            same_MO = group_M[:, None] == group_O
            alone_MO = same_MO & (held_BP[fullest, group_M] == 1)[:, None]
            paid_MO = np.where(alone_MO, self.prompts[group_O], self._new(held_BP[fullest, group_O], group_O))
            saved_MO = np.where(same_MO, 0, self._last(held_BP[bin_O, group_O], group_O))
            new_MO = self._new(held_BP[bin_O[None, :], group_M[:, None]], group_M[:, None])
            fullest_MO = left_M[:, None] + cost_O + paid_MO
            other_MO = cost_B[bin_O] - cost_O - saved_MO + cost_M[:, None] + new_MO
            swapped_MO = np.maximum(fullest_MO, other_MO)
            m, o = np.unravel_index(swapped_MO.argmin(), swapped_MO.shape)
            if swapped_MO[m, o] >= enough:
                return bin_of_N
            bin_of_N[mine[m]], bin_of_N[others[o]] = bin_O[o], fullest

    def _new(self, held: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return a prompt's cost in a bin that holds no response of its group yet."""
        return np.where(held == 0, self.prompts[groups], 0)

    def _last(self, held: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Return the cost that a bin loses with its only response of a group."""
        return np.where(held == 1, self.prompts[groups], 0)


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


def _fill_rows(batch: _MiniBatch, chunks: Sequence[Chunk], budget: int) -> list[PlannedRow]:
    """Return rows of chunks, each chunk in the first row that has room for it; those of one group become one."""
    rows: list[dict[int, list[int]]] = []  # the responses of each group
    sizes: list[tuple[int, int]] = []
    for chunk in chunks:
        grown = (
            batch.grow(size, chunk, has_prompt=chunk.group in row) for row, size in zip(rows, sizes, strict=True)
        )
        fitting = ((slot, size) for slot, size in enumerate(grown) if math.prod(size) <= budget)
        slot, size = next(fitting, (len(rows), batch.grow(_EMPTY, chunk)))
        if slot == len(rows):
            rows.append({})
            sizes.append(_EMPTY)
        rows[slot].setdefault(chunk.group, []).extend(chunk.responses)
        sizes[slot] = size
    return [_chunks(row) for row in rows]
