"""Batches that two real vLLM servers draw while the learner changes the weights, is stopped, or loses them."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.helpers.rollout_servers import Fleet, begin_batch, learner_logps, same
from tests.helpers.toy_runs import assert_sound, rollouts_of, toy_problem
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.rollouts.ahead import load_batches
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.remote.servers import ServerSampler, ServersGoneError
from vlm_rl.types import Prompt, Rollout

pytestmark = pytest.mark.slow
PARAMS = SamplingParams(temperature=1.0, max_tokens=14, responses=4)
STEPS = 5


def wait_for(sampler: ServerSampler, step: int, groups: int) -> None:
    """Wait until so many groups of a batch are done."""
    end = time.monotonic() + 60
    while 8 - sampler.sampled(step).count(None) < groups:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_each_token_is_of_the_weights_that_it_names(fleet: Fleet) -> None:
    """Weights change while batches are drawn, until responses have tokens of two versions. The learner at those
    weights gives every token the log-prob that its server reported, and at the earlier weights a different one: no
    key and value is left of those."""
    sampler = fleet.sampler()
    params = SamplingParams(temperature=1.0, max_tokens=90, responses=2)
    weights: dict[int, Any] = {}

    def sync() -> None:
        fleet.sync(sampler, len(weights) + 1)
        weights[len(weights) + 1] = {name: tensor.clone() for name, tensor in fleet.model.state_dict().items()}

    sync()
    mixed: list[tuple[Prompt, list[Rollout]]] = []
    for step in range(7, 27):
        begin_batch(sampler, fleet, step, params)
        sync()
        seen: list[int] = []
        groups = sampler.take(step, lambda index, _, seen=seen: seen.append(index))
        assert sorted(seen) == list(range(8))
        pairs = zip(fleet.prompts, groups, strict=True)
        mixed += [pair for pair in pairs if any(rollout.older for rollout in pair[1])]
        if len(mixed) >= 3:
            break
    assert mixed
    differences: list[float] = []
    for prompt, group in mixed:
        versions_K = np.concatenate([rollout.versions_R for rollout in group])
        sampled_K = np.concatenate([rollout.logprobs for rollout in group])
        at = {}
        for version in np.unique(versions_K):
            fleet.model.load_state_dict(weights[version])
            at[version] = learner_logps(fleet, prompt, group)
        expected_K = np.array([at[version][k] for k, version in enumerate(versions_K)])
        np.testing.assert_allclose(sampled_K, expected_K, atol=1e-4)
        first = versions_K.min()
        differences += [abs(at[first][k] - at[version][k]) for k, version in enumerate(versions_K) if version > first]
    assert max(differences) > 1e-2
    sampler.close()


def test_a_server_lost_in_flight_costs_time_only(fleet: Fleet) -> None:
    """SIGSTOP while a batch is drawn: the other one draws what is missing, the same responses."""
    sampler = fleet.sampler(silence=4.0)
    fleet.sync(sampler, 1)
    hung = fleet.servers[1]
    try:
        for step in range(3, 13):  # where it has sent all of its groups before it hangs, it costs nothing
            whole = sampler.generate(SampleRequest(fleet.prompts, PARAMS, seed=1, step=step))
            begin_batch(sampler, fleet, step, PARAMS)
            hung.send(signal.SIGSTOP)
            assert same(sampler.take(step, lambda *_: None), whole)
            if len(sampler.fleet.rooms) == 1:
                break
            hung.send(signal.SIGCONT)
        assert list(sampler.fleet.rooms) == [fleet.servers[0].url], fleet.notes
    finally:
        hung.send(signal.SIGCONT)
    fleet.sync(sampler, 2)
    begin_batch(sampler, fleet, 13, PARAMS)
    assert len(sampler.take(13, lambda *_: None)) == 8
    assert len(sampler.fleet.rooms) == 2, fleet.notes
    sampler.close()


def tokens_of(run: RunDirectory) -> list[list[Any]]:
    return [[row["token_ids"] for row in rows] for rows in rollouts_of(run)]


@pytest.mark.turn(0, days=2)
def test_a_stopped_run_continues_with_the_batch_that_it_had_begun(fleet: Fleet) -> None:
    """SIGTERM in step 3, whose batch is drawn: it is stored, trained on bit for bit, and the run continues as if it
    had not been stopped. Twelve prompts, four a step: after three steps each was trained on once."""
    urls = [server.url for server in fleet.servers]
    rollout = {"batch_size": 4, "server_token": str(fleet.token), "sampler": "server", "servers": urls, "ahead": 1}
    changes: dict[str, Any] = {
        "rollout": rollout,
        "train": {"steps": STEPS},
        "checkpoint": {"every": STEPS},
        "algorithm": {"credit": "top_visual", "aggregation": "variance"},
    }
    in_order: dict[str, Any] = {"finish_batches_first": {}}
    result = fleet.toys.runner("train", str(fleet.toys.config("ahead-whole", **changes)), faults=in_order)
    assert result.code == 0, result.output[-3000:]
    config = fleet.toys.config("ahead-stopped", **changes)
    stop = {"terminate_in": {"phase": "reward", "step": 3}}
    assert fleet.toys.runner("train", str(config), faults=in_order | stop).code == EXIT_STOPPED
    whole, stopped = fleet.toys.run("ahead-whole"), fleet.toys.run("ahead-stopped")
    problems = [toy_problem(index, "train", 12) for index in range(12)]
    ((step, folder),) = stopped.checkpoints()
    (batch,) = load_batches(folder / "learner", problems)
    assert (step, batch.step) == (2, 2)
    result = fleet.toys.runner("train", str(config), "--resume", faults=in_order)
    assert result.code == 0, result.output[-3000:]
    stored = [(r.ids.tolist(), r.logprobs.tolist()) for group in batch.groups for r in group.rollouts]
    trained = pq.read_table(stopped.path / "rollouts" / "step-000003.parquet").to_pydict()
    assert stored == list(zip(trained["token_ids"], trained["logprobs"], strict=True))
    assert tokens_of(stopped) == tokens_of(whole) and len(tokens_of(whole)) == STEPS
    assert_sound(stopped)
    for run in (whole, stopped):
        records = run.metrics()
        assert [record["ahead/age_mean"] for record in records] == [0, 1, 1, 1, 1]
        assert [record["data/drawn"] for record in records] == [8, 12, 16, 20, 20]
        assert [record["data/trained"] for record in records] == [4, 8, 12, 16, 20]
        assert "rollout/logprob_gap" in records[0] and "rollout/logprob_gap" not in records[1]
        assert all(0.4 <= record["visual/credited"] < 0.5 and record["visual/dependence"] > 0 for record in records)
        first = Counter(row["prompt_id"] for rows in rollouts_of(run)[:3] for row in rows)
        assert len(first) == 12 and set(first.values()) == {4}


@pytest.mark.turn(1, days=2)
def test_two_ranks_begin_two_batches_and_one_finishes_them(fleet: Fleet) -> None:
    """SIGTERM in step 2, with the batches of steps 2 and 3 begun: one rank trains on these, and no prompt is lost."""
    urls = [server.url for server in fleet.servers]
    rollout = {"batch_size": 4, "server_token": str(fleet.token), "sampler": "server", "servers": urls, "ahead": 2}
    changes: dict[str, Any] = {"train": {"steps": 6, "zero_stage": 3}, "algorithm": {"credit": "visual"}}
    config = fleet.toys.config("ahead-ranks", rollout=rollout, checkpoint={"every": 6}, **changes)
    stop = {"terminate_in": {"phase": "reward", "step": 2}}
    result = fleet.toys.runner("train", str(config), faults=stop, ranks=2)
    assert result.code == EXIT_STOPPED, result.output[-3000:]
    run = fleet.toys.run("ahead-ranks")
    ((_, folder),) = run.checkpoints()
    problems = [toy_problem(index, "train", 12) for index in range(12)]
    assert [batch.step for batch in load_batches(folder / "learner", problems)] == [1, 2]
    result = fleet.toys.runner("train", str(config), "--resume")
    assert result.code == 0, result.output[-3000:]
    counts = Counter(row["prompt_id"] for rows in rollouts_of(run) for row in rows)
    assert len(counts) == 12 and set(counts.values()) == {2 * 4}  # two epochs
    records = run.metrics()
    assert [record["data/drawn"] for record in records] == [12, 16, 20, 24, 24, 24]
    assert all(record["visual/dependence"] > 0 for record in records)
    assert [record["ahead/age_max"] <= min(step, 2) for step, record in enumerate(records)] == [True] * 6


def test_where_all_servers_hang_the_batch_waits_and_the_run_ends(fleet: Fleet) -> None:
    sampler = fleet.sampler(silence=2.0, timeout=1.0)
    fleet.sync(sampler, 1)
    first, second = fleet.servers
    try:
        second.send(signal.SIGSTOP)  # so that something is missing, whatever the first has drawn until it hangs too
        begin_batch(sampler, fleet, 2, PARAMS)
        wait_for(sampler, 2, 1)
        first.send(signal.SIGSTOP)
        with pytest.raises(ServersGoneError, match="start servers with `vlm-rl serve`, then resume"):
            sampler.take(2, lambda *_: None)
        assert 1 <= 8 - sampler.sampled(2).count(None) < 8  # what is done can be stored
    finally:
        for server in fleet.servers:
            server.send(signal.SIGCONT)
        sampler.close()
