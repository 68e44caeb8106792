"""rollout.ahead without servers: which steps a batch is begun and trained in, its age, its files, what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.sources import PROBLEMS, no_phase, sampling_of
from vlm_rl.algorithms import ALGORITHMS
from vlm_rl.batch_advantages import RewardHistory
from vlm_rl.config import parse_config
from vlm_rl.errors import UserError
from vlm_rl.hadw import Belief
from vlm_rl.metrics import update_metrics
from vlm_rl.rollouts.ahead import Ahead, BatchAhead, age_metrics, ages, load_batches, oldest, save_batches
from vlm_rl.rollouts.collect import Collecting, collect
from vlm_rl.rollouts.groups import empty_group
from vlm_rl.samplers.base import OnGroup, SampleRequest
from vlm_rl.samplers.remote.client import ServerError, ServerResponse
from vlm_rl.samplers.remote.fleet import Fleet
from vlm_rl.samplers.remote.sampling import Sampling
from vlm_rl.types import Group, Rollout

TREE = {"out": "x", "model": {"path": "m"}, "data": {"train": ["d"]}}
SERVERS = {"sampler": "server", "servers": ["http://127.0.0.1:1"]}


def rollout(tokens: int, *, version: int = 0, older: Any = (), problem: str = "p", index: int = 0) -> Rollout:
    ids = np.arange(tokens, dtype=np.int32)
    return Rollout(problem, index, ids, -np.ones(tokens, np.float32), "", "stop", version, older)


# -- age -----------------------------------------------------------------------------------------


def test_ages_are_counted_by_hand() -> None:
    """The last steps began with versions 2, 4, 4 and 6: a step of no update made nothing older."""
    versions = (2, 4, 4, 6)
    mixed = rollout(6, version=6, older=((2, 1), (4, 3)))
    assert ages(mixed, versions).tolist() == [3, 1, 1, 1, 0, 0]
    assert ages(rollout(1, version=3), versions).tolist() == [3] and ages(rollout(0), versions).tolist() == []
    assert oldest([rollout(2, version=6), mixed], versions) == 3
    group = Group(PROBLEMS[0], (mixed, rollout(2, version=6)), (), np.zeros(2))
    assert age_metrics([group], versions, ahead=3) == {
        "ahead/age_mean": 6 / 8,
        "ahead/age_max": 3,
        "ahead/mixed_responses": 1 / 2,
        "ahead/age_0": 4 / 8,
        "ahead/age_1": 3 / 8,
        "ahead/age_2": 0,
        "ahead/age_3": 1 / 8,
    }
    assert set(age_metrics([], versions, ahead=1).values()) == {0.0}


def test_without_fresh_tokens_no_gap_is_reported() -> None:
    sums = {"tokens": 10.0, "gap": 0.0, "fresh_tokens": 0.0}
    assert "rollout/logprob_gap" not in update_metrics([sums])
    assert update_metrics([sums, {"tokens": 6.0, "gap": 0.5, "fresh_tokens": 2.0}])["rollout/logprob_gap"] == 0.25


def test_a_token_of_other_weights_is_refused() -> None:
    """Versions may only grow, from that of the request on; the label of a different run is not one of ours."""
    fleet: Any = SimpleNamespace(_run="ab", version=5, label="ab-5")
    fleet.version_of = lambda label: Fleet.version_of(fleet, label)
    drawing: Any = SimpleNamespace(_fleet=fleet)

    def versions(*labels: str, since: int = 2) -> list[tuple[int, int]]:
        spans = [(3 * i, 3 * i + 3, label) for i, label in enumerate(labels)]
        return Sampling._versions(drawing, ServerResponse([], [], spans), since=since)

    assert versions("ab-2", "ab-4", "ab-5") == [(2, 3), (4, 3), (5, 3)] and versions("ab-5", since=5) == [(5, 3)]
    for labels in (["ab-1"], ["ab-4", "ab-2"], ["ab-6"], ["cd-5"], ["in an update"], ["ab--2"], ["ab-x"], ["old"]):
        with pytest.raises(ServerError, match=f"its tokens are of the weights {', '.join(labels)}, not ab-5"):
            versions(*labels)


# -- files ---------------------------------------------------------------------------------------


def test_batches_come_back_as_they_were(tmp_path: Path) -> None:
    """A group that is done with its tokens, one that is not as a prompt to be drawn."""
    done = replace(
        empty_group(PROBLEMS[3], 17, responses=2),
        rollouts=(rollout(6, version=7, older=((2, 1), (4, 3)), problem="3"), rollout(2, problem="3", index=1)),
    )
    batches = [BatchAhead(9, (empty_group(PROBLEMS[1], 4, responses=2), done)), BatchAhead(10, (done,))]
    save_batches(batches, tmp_path)
    again = load_batches(tmp_path, PROBLEMS)
    assert [batch.step for batch in again] == [9, 10]
    for batch, expected in zip(again, batches, strict=True):
        assert [(g.problem, g.prompt_tokens) for g in batch.groups] == [
            (g.problem, g.prompt_tokens) for g in expected.groups
        ]
        for group, other in zip(batch.groups, expected.groups, strict=True):
            assert [(r.ids.tolist(), r.versions_R.tolist(), r.stop_reason) for r in group.rollouts] == [
                (r.ids.tolist(), r.versions_R.tolist(), r.stop_reason) for r in other.rollouts
            ]
    assert load_batches(tmp_path / "none", PROBLEMS) == ()


# -- the schedule --------------------------------------------------------------------------------


class Servers:
    """Stands for rollout servers: a batch is sampled when it is begun, or, if `late`, by the weights of its step."""

    def __init__(self, late: list[bool]) -> None:
        self.late, self.policy_version = late, 0
        self.begun_with: dict[int, int] = {}  # in the order in which they are begun
        self.batches: dict[int, SampleRequest] = {}

    def begin(self, request: SampleRequest) -> None:
        self.begun_with[request.step], self.batches[request.step] = self.policy_version, request

    def take(self, step: int, on_group: OnGroup) -> list[list[Rollout]]:
        version = self.policy_version if self.late[step] else self.begun_with[step]
        return self._sampled(self.batches[step], version, on_group)

    def generate(self, request: SampleRequest, *, on_group: OnGroup) -> list[list[Rollout]]:
        return self._sampled(request, self.policy_version, on_group)

    def forget(self, step: int) -> None:
        self.batches.pop(step, None)

    def _sampled(self, request: SampleRequest, version: int, on_group: OnGroup) -> list[list[Rollout]]:
        whole = [
            [rollout(3, version=version, problem=prompt.problem_id, index=i) for i in range(2)]
            for prompt in request.prompts
        ]
        for index, group in enumerate(whole):
            on_group(index, group)
        return whole


@given(
    ahead=st.integers(1, 4),
    max_age=st.none() | st.integers(0, 3),
    wanted=st.integers(1, 4),
    dynamic=st.booleans(),
    late=st.lists(st.booleans(), min_size=7, max_size=7),
)
@settings(max_examples=15, deadline=None)
def test_no_prompt_is_lost_and_no_token_is_too_old(
    ahead: int, max_age: int | None, wanted: int, dynamic: bool, late: list[bool]
) -> None:
    """Seven steps of two updates each."""
    if max_age is not None and max_age >= ahead:
        max_age = None
    rollouts = SERVERS | {"ahead": ahead, "max_age": max_age, "prompts_per_step": wanted, "responses_per_prompt": 2}
    train = {"mini_batch_prompts": 1, "steps": 7}
    config = parse_config({**TREE, "algorithm": {"name": "dapo"}, "rollout": rollouts, "train": train})
    servers: Any = Servers(late)
    sampling = sampling_of(config)
    source, ledger = Ahead(sampling, servers), sampling.ledger
    algorithm = replace(ALGORITHMS["dapo"], dynamic_sampling=dynamic)
    run = Collecting(config, algorithm, source, ledger, note=lambda _: None)
    counted: Counter[str] = Counter()
    for step in range(7):
        batch = collect(run, step=step, belief=Belief(), phase=no_phase, history=RewardHistory())
        counted.update(group.problem.id for group in batch.groups)
        assert dynamic or len(batch.groups) == wanted
        bound = ahead if max_age is None else max_age
        assert all(oldest(group.rollouts, source.versions) <= bound for group in batch.groups)
        with source.begin(step, no_phase):
            servers.policy_version += 2
        assert [b.step for b in source.batches] == list(range(step + 1, min(step + ahead, 6) + 1))
        assert servers.batches.keys() == {b.step for b in source.batches} | {step} - {0}
    assert list(servers.begun_with) == list(range(1, 7))  # the first batch is sampled on the spot
    assert servers.begun_with == {step: 2 * max(0, step - ahead) for step in range(1, 7)}
    assert not source.batches and ledger.taken == ledger.trained + sum(ledger.skipped.values())
    assert ledger.trained == sum(counted.values())
    if max_age is None:
        assert "stale" not in ledger.skipped
    elif not dynamic:
        aged = [step for step in range(1, 7) if not late[step] and min(step, ahead) > max_age]
        assert ledger.skipped["stale"] == wanted * len(aged)


def test_a_restored_batch_is_begun_with_what_it_has_and_saved_as_it_is_before(tmp_path: Path) -> None:
    """A checkpoint holds the batches of steps 3 and 4. A process that stops before step 3 saves them again."""
    config = parse_config({**TREE, "rollout": SERVERS | {"ahead": 2}})
    done = replace(empty_group(PROBLEMS[3], 17, responses=1), rollouts=(rollout(6, problem="3"),))
    (tmp_path / "learner").mkdir()
    held = [BatchAhead(3, (done,)), BatchAhead(4, (empty_group(PROBLEMS[4], 4, responses=1),))]
    save_batches(held, tmp_path / "learner")
    servers: Any = Servers([False] * 9)
    servers.policy_version = 6
    source = Ahead(sampling_of(config, responses=1), servers)
    source.restore(tmp_path, {"versions": [2, 4, 6]})
    assert source.versions == (2, 4, 6) and [b.step for b in source.batches] == [3, 4] and not servers.batches
    (tmp_path / "again" / "learner").mkdir(parents=True)
    source.state().files()(tmp_path / "again")
    again = load_batches(tmp_path / "again" / "learner", PROBLEMS)
    assert [(b.step, [len(r.ids) for g in b.groups for r in g.rollouts]) for b in again] == [(3, [6]), (4, [0])]
    graded = source.next(3, 1, no_phase)
    assert {step: [len(r.ids) for (r,) in request.begun] for step, request in servers.batches.items()} == {
        3: [6],
        4: [0],
    }
    assert [prompt.problem_id for prompt in servers.batches[3].prompts] == ["3"] and graded.waiting == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ahead": 1}, "ahead is 1, and sampler is auto"),
        ({"ahead": 2, "sampler": "vllm"}, "ahead is 2, and sampler is vllm"),
        ({"ahead": 1, "carry_over": 0.5, **SERVERS}, r"ahead is 1, and carry_over is 0\.5"),
        ({"ahead": 1, "max_age": 1, **SERVERS}, "max_age is 1, and ahead is 1"),
        ({"max_age": 1, **SERVERS}, "max_age is 1, and ahead is 0"),
        ({"ahead": -1, **SERVERS}, "ahead"),
    ],
)
def test_what_cannot_be_drawn_ahead_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        parse_config({**TREE, "rollout": changes})
