"""The planner: every response once, within the budget, balanced, the same number of rows on every rank."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.groups import WeighedGroup, pack
from vlm_rl.data.vision.family import blinded
from vlm_rl.learner import row_plan
from vlm_rl.learner.packing import Chunk, padded_rows, row_layout
from vlm_rl.learner.row_plan import plan_rows, row_costs
from vlm_rl.types import Prompt, Rollout

GROUPS = st.lists(
    st.tuples(st.integers(1, 400), st.lists(st.integers(0, 300), min_size=1, max_size=9)), min_size=1, max_size=20
)


def plan_of(groups: list[tuple[int, list[int]]], budget: int, num_ranks: int, **options) -> list[list[list[Chunk]]]:
    prompts, responses = [p for p, _ in groups], [list(r) for _, r in groups]
    return plan_rows(prompts, responses, budget=budget, num_ranks=num_ranks, **options)


def size(groups: list[tuple[int, list[int]]], chunk: Chunk) -> int:
    prompt, responses = groups[chunk.group]
    return prompt + sum(responses[i] for i in chunk.responses)


@given(groups=GROUPS, budget=st.integers(1, 2000), num_ranks=st.integers(1, 5))
@example(groups=[(10, [5])], budget=1, num_ranks=4)  # fewer groups than ranks, all over the budget
def test_every_response_is_planned_once_within_the_budget(groups, budget, num_ranks) -> None:
    plan = plan_of(groups, budget, num_ranks)
    chunks = [chunk for rows in plan for row in rows for chunk in row]
    seen = Counter((c.group, i) for c in chunks if not c.is_padding for i in c.responses)
    assert seen == {(g, i): 1 for g, (_, responses) in enumerate(groups) for i in range(len(responses))}
    assert len(plan) == num_ranks
    assert len({len(rows) for rows in plan}) == 1, "ranks with different numbers of rows wait forever"
    for row in (row for rows in plan for row in rows):
        assert row, "a row without tokens cannot be computed"
        fits = sum(size(groups, chunk) for chunk in row) <= budget
        alone = len(row) == 1 and len(row[0].responses) == 1
        assert fits or alone, "only a single response may exceed the budget"
        assert len({chunk.group for chunk in row}) == len(row), "a row has a prompt once"
    for rows in plan:
        sizes = [sum(size(groups, chunk) for chunk in row) for row in rows if not row[0].is_padding]
        assert sizes == sorted(sizes, reverse=True), "rows computed at the same time cost about the same"


@given(groups=GROUPS, budget=st.integers(1, 2000), num_ranks=st.integers(2, 5))
def test_more_ranks_are_never_slower(groups, budget, num_ranks) -> None:
    """The plan of whole groups deals the rows of one rank out, and the fastest plan is no slower than that one.

    Nor is it faster than an even share of what is there, or than the largest response with its prompt.
    """
    prompts, responses = [p for p, _ in groups], [list(r) for _, r in groups]

    def time_on(ranks: int) -> float:
        costs = row_costs(prompts, responses, plan_of(groups, budget, ranks))
        return sum(map(max, zip(*costs, strict=True)))

    even = sum(prompts[g] + sum(sizes) for g, sizes in enumerate(responses)) / num_ranks
    largest = max(prompts[g] + max(sizes) for g, sizes in enumerate(responses))
    assert max(even, largest) <= time_on(num_ranks) <= time_on(1)


@given(groups=GROUPS, budget=st.integers(1, 2000), num_ranks=st.integers(1, 5))
def test_padding_rows_are_all_padding(groups, budget, num_ranks) -> None:
    for row in (row for rows in plan_of(groups, budget, num_ranks) for row in rows):
        assert len({chunk.is_padding for chunk in row}) == 1


def test_a_group_splits_and_repeats_its_prompt() -> None:
    """Prompt 10 and a budget of 20 leave room for 10 response tokens: 4 + 6 | 7 | 4 + 3 + 1."""
    plan = plan_of([(10, [4, 6, 7, 4, 3, 1])], 20, 1)
    assert sorted(chunk.responses for row in plan[0] for chunk in row) == [(0, 1), (2,), (3, 4, 5)]
    assert len(plan[0]) == 3


def test_parts_of_a_group_that_meet_in_a_row_have_one_prompt() -> None:
    """Prompt 10 and a budget of 20: 2 | 9 | 2 in order, and 10 + 2 + 2 is one row."""
    plan = plan_of([(10, [2, 9, 2])], 20, 1)
    assert [[chunk.responses for chunk in row] for row in plan[0]] == [[(1,)], [(0, 2)]]


@given(groups=GROUPS, budget=st.integers(1, 2000), num_ranks=st.integers(1, 3))
def test_padded_rows_fit_the_budget(groups, budget, num_ranks) -> None:
    """Each response takes as much room as the longest of its row with its prompt."""
    plan = plan_of(groups, budget, num_ranks, padded=True)
    chunks = [chunk for rows in plan for row in rows for chunk in row if not chunk.is_padding]
    planned = Counter((chunk.group, i) for chunk in chunks for i in chunk.responses)
    assert planned == {(g, i): 1 for g, (_, responses) in enumerate(groups) for i in range(len(responses))}
    for row in (row for rows in plan for row in rows):
        lengths = [groups[chunk.group][0] + groups[chunk.group][1][i] for chunk in row for i in chunk.responses]
        assert len(lengths) * max(lengths) <= budget or len(lengths) == 1


def test_padded_rows_by_hand() -> None:
    """A prompt of 3 with responses of 2 and 1, then a prompt of 2 with one of 3: rows of 5 tokens."""
    spans = [((0, 3), [(3, 2), (5, 1)]), ((6, 2), [(8, 3)])]
    padded = padded_rows(spans, [np.arange(size) for _, responses in spans for _, size in responses])
    assert padded.tokens_NL.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 0], [6, 7, 8, 9, 10]]
    assert padded.real_R.tolist() == [n for n in range(3 * 5) if n != 5 + 4]
    assert padded.predictor_K.tolist() == [2, 3, 5 + 2, 10 + 1, 10 + 2, 10 + 3]
    # Of the last response the token in the middle was observed: nothing predicts it, and it predicts the last one.
    episode = padded_rows(spans, [np.arange(2), np.arange(1), np.array([0, 2])])
    assert episode.tokens_NL.tolist() == padded.tokens_NL.tolist()
    assert episode.predictor_K.tolist() == [2, 3, 5 + 2, 10 + 1, 10 + 3]


def test_small_groups_share_a_row() -> None:
    """11 + 8 and 6 + 5: two rows of 20 hold what first fit in falling order puts there, 11 + 8 | 6 + 5."""
    plan = plan_of([(5, [3]), (8, [3]), (4, [1]), (5, [1])], 20, 1)  # 8, 11, 5, 6 tokens
    assert [[chunk.group for chunk in row] for row in plan[0]] == [[0, 1], [2, 3]]


def test_attention_counts_in_the_balance() -> None:
    """One response of 300 tokens behind 100, or four groups of 50 + 50.

    By tokens it is 400 against 4 x 100: two groups here, two there and the long one beside either. With a
    pair at 1/100 the long group costs 400 + (5,000 + 30,000 + 45,000) / 100 = 1,200, a short one 100 + 50 = 150:
    the long one is alone.
    """
    prompts, responses = [100, 50, 50, 50, 50], [[300], [50], [50], [50], [50]]
    plan = plan_rows(prompts, responses, budget=400, num_ranks=2, pair_cost=1 / 100)
    assert [[chunk.group for row in rank for chunk in row if not chunk.is_padding] for rank in plan] == [
        [0],
        [1, 2, 3, 4],
    ]


# -- cutting groups --------------------------------------------------------------------------------


def waits(groups: list[tuple[int, list[int]]], plan: list[list[list[Chunk]]]) -> int:
    """Return the tokens that the slowest rank computes in each row, over all rows: what the update takes."""
    return sum(max(sum(size(groups, c) for c in row) for row in rows) for rows in zip(*plan, strict=True))


def test_a_group_is_cut_for_the_slowest_rank() -> None:
    """A prompt of 10 and responses of 30, 30, 20, 20: 110 tokens on a rank, or 60 on each of two."""
    plan = plan_of([(10, [30, 30, 20, 20])], 1000, 2)
    assert sorted(sorted([30, 30, 20, 20][i] for i in row[0].responses) for (row,) in plan) == [[20, 30], [20, 30]]


def fewest_waits(groups: list[tuple[int, list[int]]], num_ranks: int) -> int:
    """Return the tokens of the slowest rank in the best of all ways to deal the responses out."""
    responses = [(group, tokens) for group, (_, lengths) in enumerate(groups) for tokens in lengths]
    least = sum(prompt + sum(lengths) for prompt, lengths in groups)
    for ranks in product(range(num_ranks), repeat=len(responses) - 1):  # the first one is rank 0's
        dealt = list(zip((0, *ranks), responses, strict=True))
        prompts = {(rank, group) for rank, (group, _) in dealt}
        loads = [sum(tokens for rank, (_, tokens) in dealt if rank == k) for k in range(num_ranks)]
        least = min(least, max(loads[k] + sum(groups[g][0] for r, g in prompts if r == k) for k in range(num_ranks)))
    return least


def test_small_mini_batches_are_dealt_out_in_the_best_of_all_ways() -> None:
    """Moves of single responses alone miss it in 1 of 20 of such mini-batches."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        groups = [
            (int(rng.integers(1, 30)), rng.integers(1, 40, rng.integers(2, 4)).tolist())
            for _ in range(rng.integers(1, 4))
        ]
        num_ranks = 2 if sum(len(lengths) for _, lengths in groups) > 6 else 3
        assert waits(groups, plan_of(groups, 1000, num_ranks)) == fewest_waits(groups, num_ranks), groups


def test_a_group_stays_whole_where_its_prompt_costs_more() -> None:
    """Two groups of 100 + 10: cut, each of two ranks would compute both prompts."""
    plan = plan_of([(100, [5, 5]), (100, [5, 5])], 1000, 2)
    assert [[chunk.responses for row in rows for chunk in row] for rows in plan] == [[(0, 1)], [(0, 1)]]


@given(groups=GROUPS, budget=st.integers(1, 2000), num_ranks=st.integers(1, 5))
def test_cutting_never_takes_longer_and_one_rank_never_cuts(groups, budget, num_ranks) -> None:
    with patch.object(row_plan, "PARTS", ()):
        whole = plan_of(groups, budget, num_ranks)
    plan = plan_of(groups, budget, num_ranks)
    assert waits(groups, plan) <= waits(groups, whole)
    assert num_ranks > 1 or plan == whole


@pytest.mark.parametrize(("num_ranks", "aim"), [(8, 0.9), (16, 0.85), (32, 0.8)])
def test_ranks_hardly_wait_at_lengths_as_in_training(num_ranks: int, aim: float) -> None:
    """16 prompts with images, 8 responses of 1,000 tokens on average."""
    rng = np.random.default_rng(0)
    efficiencies = []
    for _ in range(5):
        lengths = (1000 * np.exp(rng.normal(0, 0.6, (16, 8)) - 0.18)).clip(20, 4096).astype(int).tolist()
        groups = list(zip(rng.integers(300, 1500, 16).tolist(), lengths, strict=True))
        useful = sum(prompt + sum(responses) for prompt, responses in groups)
        efficiencies.append(useful / num_ranks / waits(groups, plan_of(groups, 16_384, num_ranks)))
    assert np.mean(efficiencies) > aim


def test_the_plan_repeats_itself() -> None:
    groups = [(10, [5, 5]), (10, [5, 5]), (3, [1])]
    assert plan_of(groups, 25, 2) == plan_of(groups, 25, 2)


# -- rows ----------------------------------------------------------------------------------------


def group(prompt_length: int, lengths: list[int], *, first: int) -> WeighedGroup:
    """Prompt and response tokens are consecutive numbers from `first` on; log-probs are minus the token."""
    ids = np.arange(first, first + prompt_length, dtype=np.int32)
    prompt = Prompt("p", "", "", ids, ids, (), {})
    rollouts, start = [], first + prompt_length
    for index, length in enumerate(lengths):
        tokens = np.arange(start, start + length, dtype=np.int32)
        rollouts.append(Rollout("p", index, tokens, -tokens.astype(np.float32), "", "stop", 0))
        start += length
    count = len(lengths)
    return WeighedGroup(prompt, rollouts, np.arange(count) - 0.5, np.arange(count) + 1.0)


def line(prompt: Prompt) -> torch.Tensor:
    return torch.arange(len(prompt.ids)).expand(3, -1)


def test_a_row_by_hand() -> None:
    """Prompts of 3 and 2 tokens, responses of 2 and 1 tokens, and of 3."""
    groups = [group(3, [2, 1], first=100), group(2, [3], first=200)]
    row = pack([Chunk(0, (0, 1)), Chunk(1, (0,))], groups, line, with_sampler=True)
    assert row.ids_T.tolist() == [100, 101, 102, 103, 104, 105, 200, 201, 202, 203, 204]
    # the positions of each response continue those of its own prompt: 3 4 | 3 | 2 3 4
    assert row.positions_3T[0].tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 4]
    # a response's first token is predicted by the prompt's last (2, 2, 7), the others by their predecessor
    assert row.predictor_K.tolist() == [2, 3, 2, 7, 8, 9]
    assert row.target_K.tolist() == [103, 104, 105, 202, 203, 204]
    assert row.loss.response_K.tolist() == [0, 0, 1, 2, 2, 2]
    assert row.loss.lengths_n.tolist() == [2, 1, 3]
    assert row.loss.advantages_n.tolist() == [-0.5, 0.5, -0.5]
    assert row.loss.weights_n.tolist() == [1.0, 2.0, 1.0]
    assert row.loss.sampler_logp_K is not None
    assert row.loss.sampler_logp_K.tolist() == [-103, -104, -105, -202, -203, -204]
    assert row.loss.old_logp_K is None
    assert not row.is_padding


def test_a_row_tells_whose_images_it_holds() -> None:
    """Prompts with two patches, none and four: blinded in one row as each by itself."""
    groups = [group(2, [1], first=10 * place) for place in range(3)]
    pixels = [torch.rand(2, 5), None, torch.rand(4, 5)]
    groups = [
        replace(g, prompt=replace(g.prompt, vision={} if values is None else {"pixel_values": values}))
        for g, values in zip(groups, pixels, strict=True)
    ]
    row = pack([Chunk(place, (0,)) for place in range(3)], groups, line)
    assert [sizes for _, sizes in row.pictures] == [{"pixel_values": 2}, {}, {"pixel_values": 4}]
    alone = [
        blinded(pack([Chunk(0, (0,))], [g], line).vision, "noise", pack([Chunk(0, (0,))], [g], line).pictures)
        for g in groups
    ]
    parts = [vision["pixel_values"] for vision in alone if vision]
    assert torch.equal(blinded(row.vision, "noise", row.pictures)["pixel_values"], torch.cat(parts))


def test_padding_weighs_nothing() -> None:
    row = pack([Chunk(0, (1,), is_padding=True)], [group(3, [2, 1], first=100)], line)
    assert row.is_padding
    assert row.loss.weights_n.tolist() == [0.0]


class Allocated(TorchDispatchMode):
    """Adds up the bytes of every tensor that torch makes while it is entered, freed ones too."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.num_bytes += sum(
            x.untyped_storage().nbytes() for x in tree_leaves(output) if isinstance(x, torch.Tensor)
        )
        return output


def test_the_layout_of_a_long_response_takes_little_memory() -> None:
    """A prompt of 1,000 tokens and a response of 32,768: the layout is linear in the row, never a matrix over it."""
    prompt, response = 1000, 32_768
    spans = [((0, prompt), [(prompt, response)])]
    tracemalloc.start()  # sees what numpy allocates, and nothing of torch
    with Allocated() as allocated:
        layout = row_layout(spans)
    _, by_numpy = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert allocated.num_bytes + by_numpy < 10e6
    assert layout.own.queries.tolist() == [0, prompt, prompt + response]
    assert (layout.prompts, layout.responses) == (slice(0, prompt), slice(prompt, prompt + response))


def test_a_layout_by_hand() -> None:
    """Prompts of 2, 3, 1 and 2 with responses of 1 and 4, of 0 and 2, of 0, and of 5 tokens."""
    lengths = [(2, [1, 4]), (3, [0, 2]), (1, [0]), (2, [5])]
    spans, at = [], 0
    for prompt, responses in lengths:
        starts = np.cumsum([at, prompt, *responses]).tolist()
        spans.append(((at, prompt), list(zip(starts[1:-1], responses, strict=True))))
        at = starts[-1]
    layout = row_layout(spans)
    assert layout.own.queries.tolist() == layout.own.keys.tolist() == [0, 2, 3, 7, 10, 12, 13, 15, 20]
    assert (layout.own.longest_query, layout.own.longest_key) == (5, 5)
    # the third prompt has no tokens of responses: it is not a run of keys
    assert layout.shared.queries.tolist() == [0, 5, 7, 12]
    assert layout.shared.keys.tolist() == [0, 2, 5, 7]
    assert (layout.shared.longest_query, layout.shared.longest_key) == (5, 3)
    assert isinstance(layout.responses, torch.Tensor) and isinstance(layout.prompts, torch.Tensor)
    assert layout.responses.tolist() == [2, 3, 4, 5, 6, 10, 11, 15, 16, 17, 18, 19]
    assert layout.prompts.tolist() == [0, 1, 7, 8, 9, 13, 14]


@pytest.mark.parametrize("lengths", [[0, 2], [2, 0], [0]])
def test_an_empty_response_has_no_tokens_and_shifts_nothing(lengths: list[int]) -> None:
    row = pack([Chunk(0, tuple(range(len(lengths))))], [group(3, lengths, first=100)], line)
    assert row.loss.lengths_n.tolist() == lengths
    assert row.target_K.tolist() == [103, 104][: sum(lengths)]
    assert row.predictor_K.tolist() == [2, 3][: sum(lengths)]
    assert row.loss.response_K.tolist() == [i for i, length in enumerate(lengths) for _ in range(length)]


def test_positions_continue_after_the_highest_of_the_prompt() -> None:
    """With an image the highest position is not the last token's: here 0 5 1, so the response starts at 6."""
    row = pack([Chunk(0, (0,))], [group(3, [2], first=100)], lambda _: torch.tensor([[0, 5, 1]] * 3))
    assert row.positions_3T.tolist() == [[0, 5, 1, 6, 7]] * 3
