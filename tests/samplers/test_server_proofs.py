"""What rollout servers say that they hold, and what is refused of it. No server runs: their proofs are made up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm_rl.samplers.fingerprint import StaleWeightsError
from vlm_rl.samplers.remote import sampling, servers
from vlm_rl.samplers.remote.client import ServerError
from vlm_rl.samplers.remote.sampling import Sampling
from vlm_rl.samplers.remote.servers import ServerSampler, ServerSettings

FIRST, SECOND = "http://127.0.0.1:8001", "http://127.0.0.1:8002"
Proofs = dict[str, dict[str, Any]]


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> Proofs:
    """Return the proof that each server gives."""
    given: Proofs = {url: {"buffers": {"inv_freq": "a"}, "checksum": 5} for url in (FIRST, SECOND)}

    async def ask_proof(client: Any, **_: Any) -> dict[str, Any]:
        return given[str(client.base_url).rstrip("/")]

    monkeypatch.setattr(servers, "ask_proof", ask_proof)
    return given


@pytest.fixture
def sampler(tiny_model: Path, tmp_path: Path) -> ServerSampler:
    """Return a client of both servers, after a sync."""
    (tmp_path / "token").write_text("secret\n")
    builder: Any = SimpleNamespace(max_videos=0)
    sampler = ServerSampler(
        ServerSettings([FIRST, SECOND], token_file=tmp_path / "token", timeout=1.0, model_sha256=""),
        model_path=str(tiny_model),
        builder=builder,
        max_model_len=100,
        dtype=torch.float32,
        weights=lambda: iter(()),
        is_stopped=lambda: False,
        note=lambda _: None,
    )
    sampler.fleet.rooms = {FIRST: 4, SECOND: 4}
    sampler.fleet.buffers = {"inv_freq": "a"}  # of the first server that was found
    return sampler


def test_servers_that_agree_hold_what_they_say(sampler: ServerSampler, proofs: Proofs) -> None:
    assert sampler.fingerprint({}).checksum == proofs[FIRST]["checksum"]


@pytest.mark.parametrize("url", [FIRST, SECOND])
def test_a_buffer_of_one_server_that_is_another_is_named(sampler: ServerSampler, proofs: Proofs, url: str) -> None:
    proofs[url]["buffers"] = {"inv_freq": "b"}
    with pytest.raises(StaleWeightsError, match=f"server {url}': its buffer inv_freq is not what it was"):
        sampler.fingerprint({})


def test_servers_of_different_weights_are_named(sampler: ServerSampler, proofs: Proofs) -> None:
    proofs[SECOND]["checksum"] = 6
    with pytest.raises(StaleWeightsError, match=f"different weights after a sync: {FIRST}, {SECOND}; start them"):
        sampler.fingerprint({})


def test_an_answer_given_during_a_push_and_read_after_it_says_nothing_against_its_server(
    sampler: ServerSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the thread that samples is busy with a long reply while the push ends. Later the answer counts."""
    fleet, looks = sampler.fleet, 0
    push = fleet.pushing()

    async def ask(client: Any, path: str, **_: Any) -> dict[str, str]:
        nonlocal looks
        looks += 1
        if looks == 1:
            push.__exit__(None, None, None)
        return {"weight_version": "in an update"}

    async def no_sleep(seconds: float) -> None:
        pass

    monkeypatch.setattr(sampling, "ask", ask)
    monkeypatch.setattr(sampling.asyncio, "sleep", no_sleep)
    push.__enter__()
    watch = Sampling(fleet, sampler._builder, {}, size=1)._watch(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ServerError, match=r"it holds the weights .*in an update"):
        asyncio.run(watch)
    assert looks == 2
