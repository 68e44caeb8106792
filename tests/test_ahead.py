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

from tests.helpers.groups import bare_prompt
from vlm_rl.algorithms import ALGORITHMS
from vlm_rl.collecting import begin_ahead, collect
from vlm_rl.config import parse_config
from vlm_rl.data.ahead import BatchAhead, age_metrics, ages, load_batches, oldest, save_batches
from vlm_rl.data.carry_over import begin
from vlm_rl.data.order import Ledger, PromptOrder
from vlm_rl.data.prompts import PromptCache
from vlm_rl.errors import UserError
from vlm_rl.hadw import Belief
from vlm_rl.metrics import update_metrics
from vlm_rl.samplers.remote.client import ServerError, ServerResponse
from vlm_rl.samplers.remote.fleet import Fleet
from vlm_rl.samplers.remote.sampling import Sampling
from vlm_rl.session.recorder import Timings
from vlm_rl.session.session import Session
from vlm_rl.types import Grade, Group, Problem, Reward, Rollout

RIGHT, WRONG = (Grade(verdict, None, "test", "") for verdict in ("correct", "wrong"))
PROBLEMS = [Problem(str(index), "", (), "", "text") for index in range(12)]
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
        begin(PROBLEMS[3], 17, responses=2),
        rollouts=(rollout(6, version=7, older=((2, 1), (4, 3)), problem="3"), rollout(2, problem="3", index=1)),
    )
    batches = [BatchAhead(9, (begin(PROBLEMS[1], 4, responses=2), done)), BatchAhead(10, (done,))]
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
    """Seven steps of two updates each. A batch is drawn when it is begun, or, `late`, by the weights of its step."""
    if max_age is not None and max_age >= ahead:
        max_age = None
    rollouts = SERVERS | {"ahead": ahead, "max_age": max_age, "prompts_per_step": wanted, "responses_per_prompt": 2}
    train = {"mini_batch_prompts": 1, "steps": 7}
    config = parse_config({**TREE, "algorithm": {"name": "dapo"}, "rollout": rollouts, "train": train})
    s: Any = SimpleNamespace(
        config=config, in_progress=(), ahead=(), prompts_ahead={}, versions=(0,), step=0, belief=Belief()
    )
    s.algorithm = replace(ALGORITHMS["dapo"], dynamic_sampling=dynamic)
    s.ledger, s.problems, s.order = Ledger(), PROBLEMS, PromptOrder(len(PROBLEMS), 0)
    s.learner, s.sampler = SimpleNamespace(num_updates=0), None
    s.recorder = SimpleNamespace(note=lambda _: None, phase=lambda _: None)
    s.builder = SimpleNamespace(build=lambda problem: bare_prompt(problem.id))
    s.next_prompts = PromptCache(s.builder)
    begun_with: dict[int, int] = {}
    order: list[int] = []
    batches: dict[int, Any] = {}

    def drawn(groups: Any, version: int, on_group: Any) -> list[list[Rollout]]:
        whole = [[rollout(3, version=version, problem=g.problem.id, index=i) for i in range(2)] for g in groups]
        for index, group in enumerate(whole):
            on_group(index, group)
        return whole

    def begin_batch(batch: BatchAhead, prompts: Any) -> None:
        begun_with[batch.step], batches[batch.step] = s.learner.num_updates, batch.groups
        s.prompts_ahead[batch.step] = prompts
        order.append(batch.step)

    s.begin = begin_batch
    s.take = lambda on_group: drawn(
        batches[s.step], s.learner.num_updates if late[s.step] else begun_with[s.step], on_group
    )
    s.draw_on = lambda mine, asked, *, enough, on_group: drawn(mine, s.learner.num_updates, on_group)
    s.reward = SimpleNamespace(
        score=lambda items: [
            Reward({"accuracy": 1.0}, [WRONG, RIGHT][r.index if int(p.id) % 3 else 0]) for p, _, r in items
        ],
        abort=lambda: None,
    )
    counted: Counter[str] = Counter()
    for step in range(7):
        batch = collect(s, Timings(lambda _: None))
        counted.update(group.problem.id for group in batch.groups)
        assert dynamic or len(batch.groups) == wanted
        bound = ahead if max_age is None else max_age
        assert all(oldest(group.rollouts, s.versions) <= bound for group in batch.groups)
        begin_ahead(s, Timings(lambda _: None))
        assert [b.step for b in s.ahead] == list(range(step + 1, min(step + ahead, 6) + 1))
        s.learner.num_updates += 2
        Session.end_step(s)
    assert order == list(range(1, 7))  # the first batch is drawn on the spot
    assert begun_with == {step: 2 * max(0, step - ahead) for step in range(1, 7)}
    assert not s.ahead and s.ledger.drawn == s.ledger.trained + sum(s.ledger.skipped.values())
    assert s.ledger.trained == sum(counted.values())
    if max_age is None:
        assert "stale" not in s.ledger.skipped
    elif not dynamic:
        aged = [step for step in range(1, 7) if not late[step] and min(step, ahead) > max_age]
        assert s.ledger.skipped["stale"] == wanted * len(aged)


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
