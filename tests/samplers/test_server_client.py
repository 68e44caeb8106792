"""The client of a rollout server, against servers that do one thing wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.helpers.chat_server import chat_server, self_signed
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import signs_of_life
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.remote import client as remote_client
from vlm_rl.samplers.remote import scoring
from vlm_rl.samplers.remote.client import ServerError, ServerResponse, ask, ask_group, ask_info, connected
from vlm_rl.samplers.remote.fleet import Fleet, ServersGoneError
from vlm_rl.samplers.remote.scoring import ScoringServers
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

_REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def _answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a request, and close the connection under the next one, as vLLM may do after five idle seconds."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(_REPLY)
    await writer.drain()
    await reader.read(1)
    writer.close()


def test_an_idle_connection_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server draws it is asked every five seconds: just when vLLM closes the connection of the last time."""
    assert remote_client._IDLE < 5
    monkeypatch.setattr(remote_client, "_IDLE", 0.1)

    async def look_twice() -> list[dict[str, str]]:
        server = await asyncio.start_server(_answer_once, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, connected(f"http://{host}:{port}", "token") as client:
            first = await ask(client, "/weight_info", seconds=10, post=False)
            await asyncio.sleep(0.2)
            return [first, await ask(client, "/weight_info", seconds=10, post=False)]

    assert asyncio.run(look_twice()) == [{}, {}]


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_a_certificate_is_checked_before_the_token_is_sent(tmp_path: Path, scheme: str) -> None:
    async def look(url: str) -> None:
        async with connected(url, "token") as client:
            await ask(client, "/good/v1", {}, seconds=10)

    context, _ = self_signed(tmp_path)
    with chat_server(context) as server:
        address = f"{scheme}://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(look(address))
        assert not server.asked


@asynccontextmanager
async def answering(body: bytes) -> AsyncIterator[httpx.AsyncClient]:
    """Connect to a server that answers every request with this body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, connected(f"http://{host}:{port}", "token") as client:
        yield client


GOOD = {
    "ids": [5, 6, 7],
    "logprobs": [-1, -2.5, 0.0],
    "versions": [[0, 1, "a"], [1, 3, "b"]],
    "finish": "",
    "cached": 2,
}
LIES = {
    "a log-prob above 0": {"logprobs": [5.0, 5.0, 5.0]},
    "a log-prob that no float holds": {"logprobs": [-(10**400), -1, -1]},
    "a part that ends before it begins": {"versions": [[0, 7, "a"], [7, 3, "b"]]},
    "a part of no whole tokens": {"versions": [[0, 1.0, "a"], [1, 3, "b"]]},
    "fewer than no cached tokens": {"cached": -5},
    "cached tokens of 31 digits": {"cached": 10**30},
}


def test_a_response_that_cannot_be_is_an_error_of_its_server(tiny_model: Path) -> None:
    builder = PromptBuilder(tiny_model, template=TEMPLATES["plain"])
    prompt = builder.build(Problem("one", "How many?", (), "1", "integer"))
    params = SamplingParams(temperature=1.0, max_tokens=3, responses=1)

    async def ask_for(item: dict[str, Any]) -> list[ServerResponse]:
        async with answering(json.dumps({"responses": [item]}).encode()) as client:
            return await ask_group(client, prompt, params, [1], builder=builder)

    (taken,) = asyncio.run(ask_for(GOOD))
    assert taken == ServerResponse([5, 6, 7], [-1.0, -2.5, 0.0], [(0, 1, "a"), (1, 3, "b")], 2)
    for name, lie in LIES.items():
        with pytest.raises(ServerError, match="/vlm_rl/generate: not a group of responses"):
            pytest.fail(f"{name}: {asyncio.run(ask_for(GOOD | lie))}")


def test_a_reply_has_no_more_bytes_than_what_was_asked_for_can_take() -> None:
    """A list takes 20 times as much as its two letters: 256 MB of them would take the trainer's memory."""

    async def look(body: bytes) -> object:
        async with answering(body) as client:
            return await ask_info(client, seconds=10)

    with pytest.raises(ServerError, match="a reply of more than 1048576 bytes"):
        asyncio.run(look(b"[" + b"[]," * 400_000 + b"[]]"))


def test_a_label_of_thousands_of_digits_is_of_no_weights() -> None:
    fleet = object.__new__(Fleet)
    fleet._run, fleet.version = "run", 12
    assert [fleet.version_of(f"run-{end}") for end in ("12", "13", "9" * 5000, "x")] == [12, None, None, None]


@pytest.fixture
def teacher_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ScoringServers]:
    """Return a client of servers that score everything at once, those of these addresses excepted, which hang."""
    (tmp_path / "token").write_text("a-token-of-some-length\n")
    monkeypatch.setattr(scoring, "SILENCE", 0.2)
    monkeypatch.setattr(scoring, "_LOOK", 0.05)

    def make(*servers: str, hanging: Collection[str] = ()) -> ScoringServers:
        begun: set[str] = set()  # a server hangs once it has been given something to score

        async def info(client: httpx.AsyncClient, *, seconds: float) -> dict[str, Any]:
            if str(client.base_url) in begun:
                await asyncio.sleep(seconds)
                raise ServerError("silent")
            return {"model": "abc", "max_model_len": 100}

        async def scores(client: httpx.AsyncClient, prompt: Any, responses: Any, *, top_k: int) -> list[Any]:
            if (url := str(client.base_url)) in hanging:
                begun.add(url)
                await asyncio.sleep(3600)
            await asyncio.sleep(0.01)  # so that each server gets some
            return [prompt]

        monkeypatch.setattr(scoring, "ask_info", info)
        monkeypatch.setattr(scoring, "ask_scores", scores)
        options: dict[str, Any] = {"token_file": tmp_path / "token", "timeout": 0.3, "model_sha256": "abc"}
        options |= {"builder": SimpleNamespace(is_vision=False), "max_model_len": 100}
        return ScoringServers(servers, **options, is_stopped=lambda: False, note=lambda _: None)

    return make


def score_requests(number: int) -> list[Any]:
    return [SimpleNamespace(prompt=index, responses=[]) for index in range(number)]


def test_a_teachers_answers_are_signs_of_life(teacher_servers: Callable[..., ScoringServers]) -> None:
    """Scoring the responses of a step may take longer than log.stall_minutes."""
    before = signs_of_life()[0]
    found = teacher_servers("http://a").scores(score_requests(9), top_k=0)
    assert found == [[index] for index in range(9)] and signs_of_life()[0] - before >= 9


def test_what_a_teachers_server_does_not_answer_another_is_asked_for(
    teacher_servers: Callable[..., ScoringServers],
) -> None:
    """It hangs with what it was given; it is asked meanwhile whether it is there."""
    servers = teacher_servers("http://a", "http://b", hanging=["http://b"])
    assert servers.scores(score_requests(30), top_k=0) == [[index] for index in range(30)]


@pytest.mark.timeout(30)
def test_a_teachers_server_that_hangs_holds_no_later_step_up(
    teacher_servers: Callable[..., ScoringServers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its first silence costs time: from then on the others have answered long before it is given up."""
    servers = teacher_servers("http://a", "http://b", hanging=["http://b"])
    servers.scores(score_requests(30), top_k=0)
    monkeypatch.setattr(scoring, "SILENCE", 3600)
    assert servers.scores(score_requests(30), top_k=0) == [[index] for index in range(30)]


def test_teachers_servers_that_all_hang_are_gone(teacher_servers: Callable[..., ScoringServers]) -> None:
    with pytest.raises(ServersGoneError, match="no server of the teacher has answered"):
        teacher_servers("http://b", hanging=["http://b"]).scores(score_requests(3), top_k=0)
