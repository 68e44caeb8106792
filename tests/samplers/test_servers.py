"""Rollouts on two real vLLM servers of the toy policy, which are stopped, killed and lied to.

The tests run in their order: the last four kill one server after another.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.helpers.lying_proxy import Lie, changed, lying_proxy
from tests.helpers.rollout_servers import Fleet, RolloutServer, same
from tests.helpers.toy_runs import assert_sound, state_of
from vlm_rl.errors import EXIT_STOPPED, UserError
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.fingerprint import (
    FingerprintBuilder,
    StaleWeightsError,
    check_fresh,
    fingerprint,
    join_shards,
)
from vlm_rl.samplers.remote import push as server_push
from vlm_rl.samplers.remote.servers import ServerSampler, ServersGoneError
from vlm_rl.types import Rollout

pytestmark = pytest.mark.slow
PARAMS = SamplingParams(temperature=1.0, max_tokens=14, responses=4)


def draw(
    sampler: ServerSampler, fleet: Fleet, on_group: Callable[[int, Any], None] | None = None, *, groups: int = 8
) -> Any:
    return sampler.generate(SampleRequest(fleet.prompts[:groups], PARAMS, seed=1, step=2), on_group=on_group)


def test_a_late_server_gets_the_weights_and_draws_the_same(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With both servers and with the second alone: the same responses, from weights sent in several parts."""
    monkeypatch.setattr(server_push, "_PART", 1 << 20)
    first, second = (server.url for server in fleet.servers)
    addresses = tmp_path / "servers.txt"
    addresses.write_text(f"{first}\n")
    sampler = fleet.sampler(servers=str(addresses))
    fleet.sync(sampler, 1)
    alone = draw(sampler, fleet)
    addresses.write_text(f"{first}/\n{second}\n")
    fleet.sync(sampler, 2)
    assert len(sampler.fleet.rooms) == 2
    both = draw(sampler, fleet)
    assert not same(alone, both)  # other weights
    assert {rollout.policy_version for group in both for rollout in group} == {2}
    only_second = fleet.sampler(servers=[second])
    only_second.load_weights(fleet.model.named_parameters(), version=2)
    assert same(draw(only_second, fleet), both)


def test_a_file_of_servers_may_be_out_of_order_for_a_while(fleet: Fleet, tmp_path: Path) -> None:
    """As it is while an editor writes it. At the start of a run it has to be in order."""
    addresses, urls = tmp_path / "servers.txt", [server.url for server in fleet.servers]
    addresses.write_text("")
    with pytest.raises(UserError, match=r"rollout\.servers: .*servers\.txt: it names no server"):
        fleet.sampler(servers=str(addresses))
    addresses.write_text("\n".join(urls))
    sampler = fleet.sampler(servers=str(addresses))
    for version, text in enumerate(["", urls[0][:6], "\n".join(urls), ""], start=1):
        addresses.write_text(text)
        fleet.sync(sampler, version)
        assert sorted(sampler.fleet.rooms) == sorted(urls)
    addresses.unlink()
    assert sampler.fleet.addresses() == urls
    said = ["names no server", "not an address", "names no server", "cannot be read"]
    assert [words in note for words, note in zip(said, fleet.notes, strict=True)] == [True] * 4, fleet.notes


def run_changes(fleet: Fleet, **rollout: Any) -> dict[str, Any]:
    """Return the changes of a run of three steps, each on more groups than two servers draw at once."""
    shared = {"batch_size": 4, "server_token": str(fleet.token), "prompts_per_step": 8, "server_timeout": 1.0}
    train = {"steps": 3, "mini_batch_prompts": 8}
    rule = {"credit": "top_visual", "aggregation": "variance"}
    return {"rollout": {**shared, **rollout}, "train": train, "checkpoint": {"every": 3}, "algorithm": rule}


@pytest.fixture(scope="module")
def inside(fleet: Fleet) -> RunDirectory:
    """Return a run whose engine is in its process."""
    return fleet.toys.train_run("in-process", **run_changes(fleet, sampler="vllm"))


def test_a_run_on_servers_equals_a_run_in_process(fleet: Fleet, inside: RunDirectory) -> None:
    urls = [server.url for server in fleet.servers]
    served = fleet.toys.train_run("served", **run_changes(fleet, sampler="server", servers=urls))
    assert_equal_rollouts(served, inside, steps=3)
    for step, (ours, theirs) in enumerate(zip(served.metrics(), inside.metrics(), strict=True), start=1):
        lengths = [len(ids) for ids in rollout_columns(served, step)["token_ids"]]
        assert ours["visual/credited"] == pytest.approx(sum(math.ceil(0.4 * n) for n in lengths) / sum(lengths))
        np.testing.assert_allclose(ours["visual/dependence"], theirs["visual/dependence"], rtol=1e-3)


def assert_equal_rollouts(run: RunDirectory, expected: RunDirectory, *, steps: int) -> None:
    assert run.rollout_steps() == list(range(1, steps + 1))
    for step in run.rollout_steps():
        ours, theirs = (rollout_columns(each, step) for each in (run, expected))
        assert ours["token_ids"] == theirs["token_ids"] and len(ours["token_ids"]) == 32
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=True))


def rollout_columns(run: RunDirectory, step: int) -> dict[str, list[Any]]:
    import pyarrow.parquet as pq

    (path,) = (run.path / "rollouts").glob(f"step-*{step}.parquet")
    return pq.read_table(path, columns=["token_ids", "logprobs"]).to_pydict()


def test_other_weights_are_noticed(fleet: Fleet) -> None:
    """By their checksum where a tensor was not sent as it is, by the label of tokens where another run has pushed."""
    sampler = fleet.sampler()
    fleet.sync(sampler, 3)
    with torch.no_grad():
        next(fleet.model.parameters()).view(-1)[0] += 1
    fingerprint = FingerprintBuilder(dtype=sampler.dtype)
    for name, parameter in fleet.model.named_parameters():
        fingerprint.add(name, parameter)
    with pytest.raises(StaleWeightsError, match="does not hold the learner's weights"):
        check_fresh(sampler, fingerprint.result())
    headers = {"Authorization": f"Bearer {fleet.token.read_text().strip()}"}
    first, second = (server.url for server in fleet.servers)
    httpx.post(f"{first}/update_weight_version", json={"new_version": "old"}, headers=headers).raise_for_status()
    groups = draw(sampler, fleet)
    assert len(groups) == 8 and list(sampler.fleet.rooms) == [second]
    assert any(first in note and "not" in note for note in fleet.notes), fleet.notes
    httpx.post(f"{second}/update_weight_version", json={"new_version": "old"}, headers=headers).raise_for_status()
    assert same(draw(sampler, fleet), groups) is False  # pushed again, with the tensor changed above
    assert any("waiting up to 60 s" in note for note in fleet.notes)


def test_a_server_without_the_token_or_with_another_model_is_not_used(fleet: Fleet, tmp_path: Path) -> None:
    for path in ("/health", "/weight_info", "/vlm_rl/info", "/v1/models", "/pause"):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx.get(fleet.servers[0].url + path, headers=headers).status_code == 401, path
    assert (fleet.token.stat().st_mode & 0o777) == 0o600
    (tmp_path / "token").write_text("wrong")
    for change, reason in (
        ({"model_sha256": "0" * 64}, "it serves a different model: start it with `vlm-rl serve`"),
        (
            {"quantization": "fp8"},
            "it serves quantization None, and this run needs 'fp8'",
        ),
        ({"token_file": tmp_path / "token"}, "HTTP 401"),
    ):
        sampler = fleet.sampler(timeout=0.5, **change)
        sampler.load_weights(fleet.model.named_parameters(), version=1)
        with pytest.raises(ServersGoneError, match=r"no rollout server has worked for 0.5 s: http://127"):
            draw(sampler, fleet)
        assert any(reason in note for note in fleet.notes), fleet.notes
    with pytest.raises(UserError, match="cannot be read"):
        fleet.sampler(token_file=tmp_path / "none")


LIES: dict[str, tuple[Lie, str]] = {
    "an error": (lambda _: (500, b"<html>oops"), "HTTP 500: <html>oops"),
    "garbage": (lambda _: (200, b"\xff\x00{"), "not JSON"),
    "another shape": (lambda _: (200, b'{"responses": 3}'), "not a group of responses"),
    "too few": (
        lambda reply: (200, json.dumps({"responses": reply["responses"][1:]}).encode()),
        "3 responses instead",
    ),
    "aborted": (changed(lambda r: r.update(ids=[65], logprobs=[-1.0], versions=[[0, 1, "x"]])), "without an end"),
    "no number": (changed(lambda r: r["logprobs"].__setitem__(0, math.nan)), "not finite"),
    "no token": (changed(lambda r: r["ids"].__setitem__(0, 10**9)), "not an id of the vocabulary"),
    "old weights": (changed(lambda r: r["versions"][0].__setitem__(2, "old")), "its tokens are of the weights"),
    "a gap": (changed(lambda r: r["versions"][0].__setitem__(0, 1)), "versions with gaps"),
}


def test_garbage_is_refused(fleet: Fleet) -> None:
    """Whatever a server says instead of a group: the group is drawn elsewhere, and the note says what was wrong."""
    first, second = (server.url for server in fleet.servers)
    with lying_proxy(first) as proxy:
        sampler = fleet.sampler(servers=[proxy.url, second])
        whole: list[list[Rollout]] = []
        for version, (name, (lie, reason)) in enumerate(LIES.items()):
            proxy.lie = None
            sampler.load_weights(fleet.model.named_parameters(), version=version)
            assert len(sampler.fleet.rooms) == 2, fleet.notes
            whole = whole or draw(sampler, fleet, groups=4)  # the weights are the same each time
            proxy.lie = lie
            assert same(draw(sampler, fleet, groups=4), whole), name
            assert list(sampler.fleet.rooms) == [second] and reason in fleet.notes[-1], (name, fleet.notes)


def test_a_hung_server_costs_time_only(fleet: Fleet) -> None:
    """SIGSTOP mid-rollout: its groups go to the other one. After SIGCONT it works again from the next sync on."""
    sampler = fleet.sampler(silence=4.0)
    fleet.sync(sampler, 4)
    whole = draw(sampler, fleet)
    hung = fleet.servers[1]
    seen: list[int] = []

    def stop(index: int, _: Any) -> None:
        if not seen:
            hung.send(signal.SIGSTOP)
        seen.append(index)

    try:
        for _ in range(10):  # where it has sent all of its groups before the first is seen here, it costs nothing
            assert same(draw(sampler, fleet, stop), whole)
            assert sorted(seen) == list(range(8))  # each once
            if len(sampler.fleet.rooms) == 1:
                break
            hung.send(signal.SIGCONT)
            seen.clear()
        assert list(sampler.fleet.rooms) == [fleet.servers[0].url]
        fleet.sync(sampler, 5)  # does not wait for it longer than `silence`
    finally:
        hung.send(signal.SIGCONT)
    sampler.fleet.settings = replace(sampler.fleet.settings, silence=60.0)  # a busy machine is slow, not hung
    fleet.sync(sampler, 6)
    assert len(sampler.fleet.rooms) == 2, fleet.notes
    draw(sampler, fleet)


@pytest.mark.turn(0, days=2)
def test_a_server_of_two_ranks_proves_the_shards_of_each(fleet: Fleet, tmp_path: Path) -> None:
    """It draws what servers of one rank draw; without either rank's shards the proof fails."""
    shared = {"sampler": "server", "servers": ["http://127.0.0.1:1"], "server_token": str(fleet.token)}
    config = fleet.toys.config("served-by-two", rollout={**shared, "batch_size": 4, "tensor_parallel": 2})
    with RolloutServer(config, tmp_path / "log") as divided:
        divided.wait()
        sampler, whole = fleet.sampler(servers=[divided.url], tensor_parallel=2), fleet.sampler()
        fleet.sync(sampler, 7)
        whole.load_weights(fleet.model.named_parameters(), version=7)
        assert same(draw(sampler, fleet), draw(whole, fleet))
        expected = fingerprint(fleet.model.named_parameters())
        body = {"method": "vlm_rl_proof", "kwargs": {"layout": json.dumps(expected.layout), "dtype": "float32"}}
        headers = {"Authorization": f"Bearer {fleet.token.read_text().strip()}"}
        reply = httpx.post(f"{divided.url}/collective_rpc", json=body, headers=headers, timeout=60).json()
        proofs = [proof["shards"].items() for proof in reply["results"]]
        first, second = ({place: int(checksum, 16) for place, checksum in shards} for shards in proofs)
        assert join_shards([first, second], expected.layout) == expected
        for one, other in ((first, second), (second, first)):
            place = next(iter(one.keys() - other.keys()))  # of a shard that this rank alone holds
            for stale in ([one], [{**one, place: one[place] ^ 1}, other]):
                assert join_shards(stale, expected.layout) != expected
        of_one = fleet.sampler(servers=[divided.url])
        of_one.load_weights(fleet.model.named_parameters(), version=8)
        assert not of_one.fleet.rooms and "world_size 2, and this run needs 1" in fleet.notes[0]


def test_a_server_killed_during_a_push_drops_out(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_push, "_PART", 1 << 20)
    sampler = fleet.sampler(silence=10.0)
    fleet.sync(sampler, 7)
    whole = draw(sampler, fleet)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, named in enumerate(fleet.model.named_parameters()):
            if number == 20:
                fleet.servers[1].send(signal.SIGKILL)
            yield named

    fingerprint = FingerprintBuilder(dtype=sampler.dtype)
    sampler.load_weights(fingerprint.watch(tensors()), version=8)
    check_fresh(sampler, fingerprint.result())
    assert list(sampler.fleet.rooms) == [fleet.servers[0].url]
    assert same(draw(sampler, fleet), whole)


def test_a_server_that_was_started_again_gets_the_weights_first(fleet: Fleet) -> None:
    """It was killed, and starts at the same address. Then SIGKILL once more: it has joined, and no part is sent.
    While it starts again, the next test has the other one."""
    again = fleet.servers[1]
    again.start()
    again.wait()
    sampler = fleet.sampler(silence=10.0)
    fleet.sync(sampler, 11)
    assert len(sampler.fleet.rooms) == 2
    whole = draw(sampler, fleet)
    only_again = fleet.sampler(servers=[again.url])
    only_again.load_weights(fleet.model.named_parameters(), version=11)
    assert same(draw(only_again, fleet), whole)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        again.send(signal.SIGKILL)
        yield from fleet.model.named_parameters()

    fingerprint = FingerprintBuilder(dtype=sampler.dtype)
    sampler.load_weights(fingerprint.watch(tensors()), version=12)
    check_fresh(sampler, fingerprint.result())
    assert list(sampler.fleet.rooms) == [fleet.servers[0].url]
    assert same(draw(sampler, fleet), whole)
    again.start()


def test_a_learner_killed_during_a_push_is_replaced(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its update stays unfinished on the server, whose next learner sends all weights."""
    monkeypatch.setattr(server_push, "_PART", 1 << 18)
    lost = fleet.sampler(silence=10.0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(fleet.model.named_parameters())[:20]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lost.load_weights(tensors(), version=1)
    lost.close()
    fleet.sync(fleet.sampler(silence=10.0), 9)


def test_a_run_that_loses_its_servers_saves_and_stops(fleet: Fleet, inside: RunDirectory) -> None:
    """SIGKILL mid-rollout: of one server in step 2, which the other one ends, and of that one in step 3. In step 2
    both have four groups; in step 3 the last one has four, and four wait for it. What is saved is the run after step
    2, the same as if nothing had been lost: no prompt of step 3 counts as drawn."""
    last, first = fleet.servers
    first.wait()
    config = fleet.toys.config("lost", **run_changes(fleet, sampler="server", servers=[last.url, first.url]))
    kills = {"kill_servers": {"of_step": {"1": first.pid, "2": last.pid}, "hung": ["1"]}}
    stopped = fleet.toys.runner("train", str(config), faults=kills)
    assert stopped.code == EXIT_STOPPED, stopped.output[-3000:]
    lines = stopped.output.splitlines()
    assert any(first.url in line and "its requests go elsewhere" in line for line in lines), stopped.output[-3000:]
    assert any("worked for 1 s" in line and "stopped after step 2; resume with" in line for line in lines)
    run = fleet.toys.run("lost")
    assert_equal_rollouts(run, inside, steps=2)
    for record, drawn in zip(run.metrics(), (8, 16), strict=True):
        assert record["data/drawn"] == record["data/trained"] == drawn
    ((step, _),) = run.checkpoints()
    info = state_of(run)["info"]
    assert (step, info["cursor"]) == (2, 16) and info["ledger"] == {"drawn": 16, "trained": 16, "skipped": {}}
    assert_sound(run)
