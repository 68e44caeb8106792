"""Rows of episodes: observations stand between sampled tokens, and no loss sees them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.episodes import open_reference, png, random_episode, random_start, reference_logps
from vlm_rl.data.prompts import PromptBuilder, rope_positions
from vlm_rl.data.turns import TurnWriter, as_prompt
from vlm_rl.learner.packing import Chunk, PackedRow, pack_row
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Group, ObservedTokens, Problem, Rollout, Turn


class Rows:
    """A policy in packed rows, one in padded rows, the unmodified model, and prompts with and without an image."""

    def __init__(self, model: Path) -> None:
        self.builder = PromptBuilder(model, template=TEMPLATES["think_answer"])
        self.writer = TurnWriter(self.builder)
        self.reference = open_reference(model).requires_grad_(True)
        how = {"banned_ids": self.builder.banned_ids, "temperature": 1.0}
        self.packed = Policy(load_model(model, dtype=torch.float32), **how)
        self.padded = Policy(load_model(model, dtype=torch.float32, rows="padded"), rows="padded", **how)
        rng = np.random.default_rng(3)
        problem = partial(Problem, answer="3", answer_type="integer")
        self.problems = [
            problem(id="seen", question="<image>How many?", images=(png(rng, 84, 56),)),
            problem(id="text", question="How many in all?", images=()),
        ]
        self.prompts = [self.builder.build(problem) for problem in self.problems]

    def start(self, num_images: list[int], seed: int) -> None:
        """Let the environment show so many pictures before the first turn of each problem's episodes."""
        rng = np.random.default_rng(seed)
        self.prompts = [
            self.builder.build(problem, start=random_start(self.writer, rng, number))
            for problem, number in zip(self.problems, num_images, strict=True)
        ]

    def groups(self, turns: list[list[int]], seed: int) -> list[Group]:
        rng = np.random.default_rng(seed)
        return [
            Group(
                problem,
                tuple(random_episode(self.writer, self.builder, rng, turns=n, longest=6) for n in counts),
                (),
                rng.normal(size=len(counts)),
            )
            for problem, counts in zip(self.problems, turns, strict=True)
        ]

    def row(self, groups: list[Group], policy: Policy) -> PackedRow:
        chunks = [Chunk(index, tuple(range(len(group.rollouts)))) for index, group in enumerate(groups)]
        return pack_row(
            chunks,
            groups=groups,
            prompts=dict(enumerate(self.prompts)),
            weights_PG=np.ones((len(groups), max(len(group.rollouts) for group in groups))),
            positions=partial(rope_positions, policy.model),
            observed=partial(as_prompt, self.builder),
        )

    def expected(self, groups: list[Group]) -> torch.Tensor:
        pairs = [(prompt, r) for prompt, group in zip(self.prompts, groups, strict=True) for r in group.rollouts]
        return torch.cat([reference_logps(self.reference, self.builder, *pair) for pair in pairs])


@pytest.fixture(scope="module")
def rows(tiny_model: Path) -> Rows:
    return Rows(tiny_model)


TURNS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=2, max_size=2)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS, shown=st.lists(st.integers(0, 2), min_size=2, max_size=2), seed=st.integers(0, 999))
def test_rows_of_episodes_equal_the_unmodified_model(
    rows: Rows, turns: list[list[int]], shown: list[int], seed: int
) -> None:
    rows.start(shown, seed)
    assert [len(prompt.images) for prompt in rows.prompts] == [1 + shown[0], shown[1]]
    groups = rows.groups(turns, seed)
    with torch.no_grad():
        expected = rows.expected(groups)
        for policy in (rows.packed, rows.padded):
            logp_K, _ = policy(rows.row(groups, policy))
            torch.testing.assert_close(logp_K, expected, atol=1e-5, rtol=0)


def test_gradients_equal_the_unmodified_model(rows: Rows) -> None:
    rows.start([1, 2], seed=4)
    groups = rows.groups([[3, 1, 2], [2, 4]], seed=5)
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(rows.expected(groups)))).float()
    rows.reference.zero_grad()
    (weights * rows.expected(groups)).sum().backward()
    for policy in (rows.packed, rows.padded):
        policy.zero_grad()
        logp_K, _ = policy(rows.row(groups, policy))
        (weights * logp_K).sum().backward()
        theirs = dict(rows.reference.named_parameters())
        difference = norm = 0.0
        for name, parameter in policy.model.named_parameters():
            assert parameter.grad is not None, name
            difference += float((parameter.grad - theirs[name].grad).double().pow(2).sum())
            norm += float(theirs[name].grad.double().pow(2).sum())
        assert difference**0.5 < 1e-5 * norm**0.5


def test_a_row_by_hand() -> None:
    """A prompt of 3, then y = 5 6 | o o | 7 | o | 8 9: only 5 to 9 are targets, each behind the token before it."""
    observed = [
        ObservedTokens(ids=np.array(ids, np.int32), sampler_ids=np.zeros(1, np.int32), images=())
        for ids in ([50, 51], [52])
    ]
    turns = (Turn(2, "", None, observed[0]), Turn(1, "", None, observed[1]), Turn(2, ""))
    rollout = Rollout(
        "p", 0, np.array([5, 6, 7, 8, 9], np.int32), np.arange(5, dtype=np.float32), "", "stop", 0, turns=turns
    )
    plain = Rollout("p", 1, np.array([5, 6], np.int32), np.arange(2, dtype=np.float32), "", "stop", 0)
    from vlm_rl.types import Prompt

    def prompt(ids: list[int]) -> Prompt:
        return Prompt("p", "", "", np.array(ids, np.int32), np.array(ids, np.int32), (), {})

    problem = Problem(id="p", question="", images=(), answer="", answer_type="text")
    row = pack_row(
        [Chunk(0, (0, 1))],
        groups=[Group(problem, (rollout, plain), (), np.zeros(2))],
        prompts={0: prompt([1, 2, 3])},
        weights_PG=np.ones((1, 2)),
        positions=lambda prompt: torch.arange(len(prompt.ids)).expand(3, -1),
        observed=lambda seen: prompt(seen.ids.tolist()),
    )
    assert row.ids_T.tolist() == [1, 2, 3, 5, 6, 50, 51, 7, 52, 8, 9, 5, 6]
    assert row.target_K.tolist() == [5, 6, 7, 8, 9, 5, 6]
    assert row.predictor_K.tolist() == [2, 3, 6, 8, 9, 2, 11]
    assert row.positions_3T[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 3, 4]
    assert row.loss.lengths_n.tolist() == [5, 2], "|y| counts sampled tokens"
    assert row.spans == [((0, 3), [(3, 8), (11, 2)])]
