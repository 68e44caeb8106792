"""Which log-probs are the old ones: train.optimize with a real policy and loss, and plain SGD for a learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.helpers.family_rows import BANNED, TEMPERATURE, groups_of, packed_row
from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import AlgorithmConfig, parse_config
from vlm_rl.errors import UserError
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.packing import PackedRow, with_sampler_log_probs
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.losses import policy_loss
from vlm_rl.rollouts.collect import RolloutBatch
from vlm_rl.session.mini_batches import MiniBatches
from vlm_rl.session.recorder import Timings
from vlm_rl.session.token_credit import TokenCredit
from vlm_rl.train import GapError, optimize

FamilyModel = Callable[[str], Path]
NOISE = 0.01  # nats: of the sampler's log-probs


class PlainLearner:
    """A policy under SGD, whose log-probs are computed as the learner computes them."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.engine, self.device = policy, policy, torch.device("cpu")
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
        self.passes = 0
        self.sums: list[Mapping[str, float]] = []

    def log_probs(self, row: PackedRow) -> Tensor:
        self.passes += 1
        return Learner.log_probs(self, row)  # type: ignore[arg-type]

    def with_old_log_probs(self, rows: Sequence[PackedRow]) -> list[PackedRow]:
        return Learner.with_old_log_probs(self, rows)  # type: ignore[arg-type]

    def update(self, rows: Sequence[PackedRow], loss: Any, *, before_step: Callable[..., object]) -> None:
        self.optimizer.zero_grad()
        sums: dict[str, float] = {}
        for row in rows:
            value, of_row = loss(*self.engine(row), row.loss)
            value.backward()
            sums = {key: sums.get(key, 0.0) + float(x) for key, x in of_row.items()}
        self.sums.append(sums)
        before_step(sums)
        self.optimizer.step()


def session_of(folder: Path, *, old_logprobs: str = "learner", max_gap: float = 1.0) -> Any:
    policy = Policy(load_model(folder, dtype=torch.float32), banned_ids=BANNED, temperature=TEMPERATURE)
    algorithm = AlgorithmConfig(name="grpo", clip_low=0.01, clip_high=0.01)
    return SimpleNamespace(
        policy=SimpleNamespace(has_frozen_vision=False),
        learner=PlainLearner(policy),
        reference=None,
        teacher=None,
        algorithm=resolve_algorithm(algorithm),
        config=SimpleNamespace(algorithm=algorithm, train=SimpleNamespace(old_logprobs=old_logprobs)),
        max_gap=max_gap,
        step=0,
        rows=SimpleNamespace(run=lambda attempt: attempt(0)),
        other_setting="x",
    )


def batches(session: Any, folder: Path) -> list[list[PackedRow]]:
    """Return three mini-batches of one row each, with the sampler's log-probs: the policy's own and noise."""
    policy = session.learner.policy
    groups = groups_of("qwen3", folder, policy.model.config.vocab_size)
    generator, rows = torch.Generator().manual_seed(0), []
    for group in (groups[0], groups[1], groups[0]):
        row = packed_row(policy, [group])
        with torch.no_grad():
            logp_K, _ = policy(row)
        drawn_K = logp_K + NOISE * torch.randn(logp_K.shape, generator=generator)
        rows.append([replace(row, loss=replace(row.loss, sampler_logp_K=drawn_K))])
    return rows


def packed_already(session: Any, mini_batches: Sequence[list[PackedRow]]) -> MiniBatches:
    found = MiniBatches(session, cast(RolloutBatch, None), TokenCredit(session, []))
    found.packed = lambda _: mini_batches  # type: ignore[method-assign]
    return found


def trained(session: Any, mini_batches: Sequence[list[PackedRow]]) -> list[Tensor]:
    before = [p.detach().clone() for p in session.learner.policy.parameters()]
    optimize(session, packed_already(session, mini_batches), Timings(lambda _: None))
    after = [p.detach() for p in session.learner.policy.parameters()]
    assert not all(map(torch.equal, before, after))
    return after


def test_the_first_mini_batch_needs_no_pass_of_its_own(family_model: FamilyModel) -> None:
    """The weights are those of computing all old log-probs before the first step, bit for bit."""
    folder = family_model("qwen3")
    session = session_of(folder)
    weights = trained(session, batches(session, folder))
    assert session.learner.passes == 2
    session = session_of(folder)
    rows = [session.learner.with_old_log_probs(part) for part in batches(session, folder)]
    assert all(row.loss.old_logp_K is not None for part in rows for row in part)
    assert all(map(torch.equal, weights, trained(session, rows)))


def test_the_samplers_need_no_pass_and_no_correction(family_model: FamilyModel) -> None:
    folder = family_model("qwen3")
    session = session_of(folder, old_logprobs="sampler")
    rows = batches(session, folder)
    weights = trained(session, rows)
    assert session.learner.passes == 0
    other = session_of(folder)
    plain = [
        [replace(r, loss=replace(r.loss, old_logp_K=r.loss.sampler_logp_K, sampler_logp_K=None)) for r in part]
        for part in rows
    ]
    rule, learner = session.algorithm, other.learner
    loss = partial(policy_loss, ratio=rule.ratio, surrogate=rule.surrogate, clip_low=0.01, clip_high=0.01, cap=2.0)
    for part in plain:
        learner.update(part, loss, before_step=lambda _: None)
    assert all(map(torch.equal, weights, [p.detach() for p in learner.policy.parameters()]))


def test_the_gap_is_that_of_the_first_mini_batch_before_its_step(family_model: FamilyModel) -> None:
    folder = family_model("qwen3")
    session = session_of(folder, old_logprobs="sampler")
    rows = batches(session, folder)
    with torch.no_grad():
        own_K, _ = session.learner.policy(rows[0][0])
    trained(session, rows)
    first, *later = session.learner.sums
    assert first["gap"] == pytest.approx(float((own_K - rows[0][0].loss.sampler_logp_K).abs().sum()), rel=1e-4)
    assert first["fresh_tokens"] == len(own_K)
    assert 0.3 * NOISE < first["gap"] / first["fresh_tokens"] < 2 * NOISE
    assert [(sums["gap"], sums["fresh_tokens"]) for sums in later] == [(0, 0), (0, 0)]
    session = session_of(folder, old_logprobs="sampler", max_gap=0.1 * NOISE)
    before = [p.detach().clone() for p in session.learner.policy.parameters()]
    with pytest.raises(GapError, match="This update was not made"):
        optimize(session, packed_already(session, rows), Timings(lambda _: None))
    assert all(map(torch.equal, before, session.learner.policy.parameters()))


def test_the_rows_of_every_rank_count_alike(family_model: FamilyModel) -> None:
    """Every mini-batch has fresh_tokens, which the ranks add up."""
    folder = family_model("qwen3")
    rows = with_sampler_log_probs(batches(session_of(folder), folder))
    assert [bool(row.loss.fresh_K.all()) for part in rows for row in part] == [True, False, False]  # type: ignore
    assert all(row.loss.old_is_sampler for part in rows for row in part)


@pytest.mark.parametrize(
    "rollout", [{"carry_over": 0.5}, {"ahead": 1, "sampler": "server", "servers": ["http://127.0.0.1:8000"]}]
)
def test_older_tokens_are_refused(rollout: dict[str, Any]) -> None:
    tree = {"out": "x", "model": {"path": "m"}, "data": {"train": ["x"]}, "rollout": rollout}
    parse_config(tree)
    with pytest.raises(UserError, match=r"train\.old_logprobs is sampler, and rollout\.(carry_over|ahead) is"):
        parse_config({**tree, "train": {"old_logprobs": "sampler"}})


def test_rejection_without_the_learners_log_probs_is_refused() -> None:
    tree = {"out": "x", "model": {"path": "m"}, "data": {"train": ["x"]}, "algorithm": {"rejection": "geometric"}}
    parse_config(tree)
    with pytest.raises(UserError, match=r"train\.old_logprobs is sampler, and algorithm\.rejection is geometric"):
        parse_config({**tree, "train": {"old_logprobs": "sampler"}})
