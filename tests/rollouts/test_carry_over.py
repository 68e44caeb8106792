"""rollout.carry_over: groups that one step begins and a later one ends."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.sources import PROBLEMS, no_phase, sampling_of
from tests.helpers.toy_runs import Toys, assert_equal_runs, assert_sound, rollouts_of
from vlm_rl import train as train_module
from vlm_rl.algorithms import ALGORITHMS
from vlm_rl.batch_advantages import RewardHistory
from vlm_rl.config import parse_config
from vlm_rl.errors import EXIT_STOPPED, UserError
from vlm_rl.hadw import Belief
from vlm_rl.losses import policy_loss
from vlm_rl.rollouts.carry_over import FILE, CarryOver, carry_metrics
from vlm_rl.rollouts.collect import Collecting, collect
from vlm_rl.rollouts.groups import GroupInProgress, empty_group, load_groups, save_groups
from vlm_rl.rollouts.prompt_order import PromptOrder
from vlm_rl.rollouts.source import OnPolicy
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import OnGroup, SampleRequest
from vlm_rl.samplers.partial_batch import PartialBatch
from vlm_rl.train import check_gap
from vlm_rl.types import Group, LossInputs, Rollout

SMALL = {"rollout": {"prompts_per_step": 3, "carry_over": 0.5}, "train": {"mini_batch_prompts": 2, "steps": 7}}


def rollout(tokens: int, *, stop: Any = "stop", older: Any = (), version: int = 0) -> Rollout:
    ids = np.arange(tokens, dtype=np.int32)
    return Rollout("p", 0, ids, -np.ones(tokens, np.float32), "", stop, version, older)


# -- tokens and their versions -----------------------------------------------------------------


def test_each_token_has_the_version_that_drew_it() -> None:
    assert rollout(6, older=((2, 1), (4, 3)), version=7).versions_R.tolist() == [2, 4, 4, 4, 7, 7]
    assert rollout(2, version=7).versions_R.tolist() == [7, 7]
    assert rollout(0).versions_R.tolist() == []


def test_ages_are_counted_by_hand() -> None:
    """Versions 2 4 4 4 7 7 and 7 7 at version 7: ages 5 3 3 3 0 0 0 0."""
    whole = (rollout(6, older=((2, 1), (4, 3)), version=7), rollout(2, version=7))
    group = Group(PROBLEMS[0], whole, (), np.zeros(2))
    waiting = GroupInProgress(
        PROBLEMS[1], 5, (rollout(2), rollout(1, stop="unfinished"), rollout(0, stop="unfinished"))
    )
    assert carry_metrics([group], [waiting], version=7) == {
        "carry_over/groups": 1,
        "carry_over/unfinished": 2,
        "carry_over/older_responses": 1 / 2,
        "carry_over/older_tokens": 4 / 8,
        "carry_over/age_mean": 14 / 8,
        "carry_over/age_max": 5,
    }
    assert not any(math.isnan(value) for value in carry_metrics([], [], version=7).values())


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_each_token_is_corrected_for_the_policy_that_drew_it(ratio: str) -> None:
    """Three policies drew a response of 6 tokens over 5 ids. The loss, in float64 with no cap reached, is
    -A sum_t w_t lp_t' (CISPO without bounds), w_t the current probability over that of the policy which drew t."""
    rng = np.random.default_rng(0)
    policies = rng.normal(size=(4, 6, 5)) * 0.3  # three that drew, and the current one
    logps = policies - np.log(np.exp(policies).sum(-1, keepdims=True))
    ids, by = rng.integers(0, 5, 6), np.array([0, 0, 1, 1, 1, 2])
    drawn, now = logps[by, np.arange(6), ids], logps[3, np.arange(6), ids]
    gaps = now - drawn
    weights = np.exp(gaps if ratio == "token" else np.full(6, gaps.mean()))
    inputs = LossInputs(
        old_logp_K=None,
        sampler_logp_K=torch.from_numpy(drawn),
        response_K=torch.zeros(6, dtype=torch.int64),
        lengths_n=torch.tensor([6]),
        advantages_n=torch.tensor([0.7]),
        weights_n=torch.tensor([1.0]),
        fresh_K=torch.from_numpy(by == 2),
    )
    logp_K = torch.from_numpy(now).requires_grad_()
    options = {"ratio": ratio, "surrogate": "cispo", "clip_low": 1.0, "clip_high": 9.0, "cap": 99.0}
    loss, sums = policy_loss(logp_K, torch.zeros(6), inputs, **options)
    loss.backward()
    assert logp_K.grad is not None
    np.testing.assert_allclose(logp_K.grad.numpy(), -0.7 * weights, rtol=1e-6)
    assert float(sums["gap"]) == pytest.approx(abs(gaps[5])) and float(sums["fresh_tokens"]) == 1


def test_the_gap_is_that_of_fresh_tokens() -> None:
    """9 old tokens and a fresh one: a gap of 0.5 of the fresh one is not divided by 10."""
    s: Any = SimpleNamespace(max_gap=0.1, step=0, other_setting="x")
    with pytest.raises(train_module.GapError, match=r"by 0\.5 per token"):
        check_gap(s, {"gap": 0.5, "tokens": 10, "fresh_tokens": 1})
    check_gap(s, {"gap": 0.0, "tokens": 10, "fresh_tokens": 0})


# -- what is in progress ------------------------------------------------------------------------


def test_groups_in_progress_come_back_as_they_were(tmp_path: Path) -> None:
    older = rollout(6, stop="unfinished", older=((2, 1), (4, 3)), version=7)
    groups = [
        GroupInProgress(
            PROBLEMS[3], 17, (replace(older, problem_id="3"), replace(rollout(2), problem_id="3", index=1))
        ),
        empty_group(PROBLEMS[5], 4, responses=2, epoch=3),
    ]
    save_groups(groups, tmp_path / "groups.parquet")
    again = load_groups(tmp_path / "groups.parquet", PROBLEMS)
    assert [(g.problem, g.prompt_tokens, g.epoch) for g in again] == [(PROBLEMS[3], 17, 0), (PROBLEMS[5], 4, 3)]

    def plain(group: GroupInProgress) -> list[Any]:
        return [
            [(v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else v for v in (getattr(r, n) for n in r.__slots__)]
            for r in group.rollouts
        ]

    assert [plain(group) for group in again] == [plain(group) for group in groups]


def test_without_groups_nothing_is_written(tmp_path: Path) -> None:
    save_groups([], tmp_path / "groups.parquet")
    assert not list(tmp_path.iterdir()) and load_groups(tmp_path / "groups.parquet", PROBLEMS) == ()


class Lengths:
    """Stands for an engine: a response is as long as was said; all of them gain a token at a time."""

    policy_version = 0

    def __init__(self, lengths: dict[tuple[str, int], int], places: int) -> None:
        self.lengths, self.places = lengths, places
        self.builder: Any = SimpleNamespace(eos_ids=[0], decode=lambda ids: "")

    def generate(self, request: SampleRequest, *, on_group: OnGroup) -> list[list[Rollout]]:
        return self.generate_until(request, enough=len(request.prompts), on_group=on_group)

    def generate_until(self, request: SampleRequest, *, enough: int, on_group: OnGroup) -> list[list[Rollout]]:
        batch = PartialBatch(request, self.builder, enough=enough, on_group=on_group)
        while not batch.is_enough:
            for index, g in batch.unfinished()[: self.places]:
                length = len(batch.groups[index][g].ids) + 1
                token = np.array([int(length < self.lengths[request.prompts[index].problem_id, g])])
                batch.extend(index, g, token, np.zeros(1), version=0)
        return batch.groups


@given(data=st.data())
@settings(max_examples=40)
def test_no_prompt_is_lost_or_trained_on_twice(data: st.DataObject) -> None:
    """Any lengths, shares, places in the engine and verdicts, with dynamic sampling and without."""
    dynamic = data.draw(st.booleans())
    wanted, share = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0.3, 0.5, 0.75, 0.9, None]))
    places = data.draw(st.integers(1, 9))
    numbers = st.lists(st.integers(1, 9), min_size=2 * len(PROBLEMS), max_size=2 * len(PROBLEMS))
    lengths = dict(zip(((p.id, g) for p in PROBLEMS for g in range(2)), data.draw(numbers), strict=True))
    tree = {"out": "x", "model": {"path": "m"}, "data": {"train": ["d"]}, "algorithm": {"name": "dapo"}}
    rollouts = {"prompts_per_step": wanted, "carry_over": share, "responses_per_prompt": 2}
    config = parse_config({**tree, "rollout": rollouts, "train": {"mini_batch_prompts": 1}})
    sampling = sampling_of(config)
    engine: Any = Lengths(lengths, places)
    source: Any = OnPolicy(sampling, engine) if share is None else CarryOver(sampling, engine)
    algorithm = replace(ALGORITHMS["dapo"], dynamic_sampling=dynamic)
    run = Collecting(config, algorithm, source, sampling.ledger, note=lambda _: None)
    trained: Counter[str] = Counter()
    for step in range(6):
        batch = collect(run, step=step, belief=Belief(), phase=no_phase, history=RewardHistory())
        assert dynamic or len(batch.groups) == wanted
        assert len(getattr(source, "in_progress", ())) == (0 if share is None else math.ceil(wanted / share) - wanted)
        trained.update(group.problem.id for group in batch.groups)
        for group in batch.groups:
            assert [len(r.ids) for r in group.rollouts] == [lengths[group.problem.id, g] for g in range(2)]
        with source.begin(step, no_phase):  # builds prompts of the next step
            pass
    everything = PromptOrder(len(PROBLEMS), 0).take(sampling.ledger.taken)
    in_progress = Counter(group.problem.id for group in getattr(source, "in_progress", ()))
    expected = Counter(PROBLEMS[index].id for index in everything)
    skipped = Counter({key: count for key, count in expected.items() if dynamic and int(key) % 3 == 0}) - in_progress
    surplus = expected - trained - skipped - in_progress  # beyond a full step
    assert trained + skipped + in_progress + surplus == expected
    assert surplus.total() == sampling.ledger.skipped["surplus"] and (dynamic or not surplus)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampler": "server", "servers": ["http://127.0.0.1:1"]}, "sampler is server"),
        ({"replay_routing": True}, "replay_routing is true"),
        ({"sampler": "vllm", "tensor_parallel": 2}, "tensor_parallel is 2"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(changes: dict[str, Any], reason: str) -> None:
    tree = {"out": "x", "model": {"path": "m"}, "data": {"train": ["d"]}}
    with pytest.raises(UserError, match=rf"carry_over is 0\.5, and {reason}"):
        parse_config({**tree, "rollout": {**changes, "carry_over": 0.5}})


# -- runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(toys: Toys) -> RunDirectory:
    return toys.train_run("carried", **SMALL, checkpoint={"every": 3, "keep_last": 3})


@pytest.mark.turn(0, days=2)
def test_every_prompt_of_an_epoch_is_trained_on_once(run: RunDirectory) -> None:
    """12 prompts, 3 a step, 6 in progress: after 7 steps 24 are drawn, two epochs, and 21 are trained on."""
    steps = [Counter(row["prompt_id"] for row in rows) for rows in rollouts_of(run)]
    assert all(len(step) == 3 and set(step.values()) == {4} for step in steps)
    counts = Counter(key for step in steps for key in step)
    assert len(counts) == 12 and max(counts.values()) <= 2 and sum(counts.values()) == 21
    records = run.metrics()
    assert [record["data/drawn"] for record in records] == [6 + 3 * step for step in range(7)]
    assert all(record["data/drawn"] - record["data/trained"] == 3 for record in records)
    assert all(record["carry_over/groups"] == 3 and record["rollout/logprob_gap"] < 1e-5 for record in records)
    assert records[0]["carry_over/age_max"] == 0 and max(record["carry_over/age_max"] for record in records) >= 2


def files_in_progress(run: RunDirectory) -> dict[int, bytes]:
    return {step: (folder / "learner" / FILE).read_bytes() for step, folder in run.checkpoints()}


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["transformers", "vllm"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(toys: Toys, sampler: str) -> None:
    """SIGTERM in the rollout of step 3: groups that it had begun are those of the end of step 2 again."""
    rollout = {**SMALL["rollout"], "sampler": sampler}
    changes = {**SMALL, "rollout": rollout, "train": {**SMALL["train"], "steps": 4}, "checkpoint": {"every": 4}}
    whole = toys.train_run(f"whole-{sampler}", **changes)
    config = toys.config(f"stopped-{sampler}", **changes)
    fault = {"terminate_in": {"phase": "reward", "step": 3}}
    assert toys.runner("train", str(config), faults=fault).code == EXIT_STOPPED
    result = toys.runner("train", str(config), "--resume")
    assert result.code == 0, result.output[-3000:]
    stopped = toys.run(f"stopped-{sampler}")
    assert_equal_runs(stopped, whole)
    assert_sound(stopped)
    assert [step for step, _ in stopped.checkpoints()] == [2, 4]
    assert files_in_progress(stopped)[4] == files_in_progress(whole)[4]


@pytest.mark.slow
def test_two_ranks_carry_over_and_one_goes_on(toys: Toys) -> None:
    config = toys.config("two-ranks", **SMALL)
    result = toys.runner("train", str(config), "train.steps=4", ranks=2)
    assert result.code == 0, result.output[-3000:]
    result = toys.runner("train", str(config), "--resume")
    assert result.code == 0, result.output[-3000:]
    run = toys.run("two-ranks")
    counts = Counter(row["prompt_id"] for rows in rollouts_of(run) for row in rows)
    assert len(run.metrics()) == 7 and len(counts) == 12 and max(counts.values()) <= 2 * 4
    assert sum(counts.values()) == 21 * 4
    assert all(record["rollout/logprob_gap"] < 1e-5 for record in run.metrics())
