"""What the guard lets through to gradio: the page's own events and routes, and nothing that names a file."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import sys
import uuid
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

import gradio as gr
from starlette.responses import HTMLResponse

from tests.helpers.chat_server import chat_server
from tests.helpers.demo_events import JOIN, arrival, first_bodies, run_event
from tests.helpers.example_run import build_run
from tests.helpers.served import Served
from vlm_rl.demo.live.endpoints import Endpoint
from vlm_rl.demo.live.panel import LiveOptions
from vlm_rl.demo.server import make_server
from vlm_rl.demo.web import request_guard

CANARY = "canary-" + uuid.uuid4().hex
touched: list[object] = []  # what the process opened, resolved or connected to with the canary in its name


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "socket.getaddrinfo", "socket.connect", "shutil.copyfile") and CANARY in repr(arguments):
        touched.append((event, arguments))


sys.addaudithook(_watch)


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Iterator[Any]:
    """Return a page with every panel, whose live panel has a model to ask, behind its guard."""
    run = build_run(tmp_path_factory.mktemp("guard") / "run", steps=2, num_problems=4)
    with chat_server() as models:
        live = LiveOptions([Endpoint("far", models.url("good"), "m")])
        yield make_server([run.path], live=live)


@pytest.fixture(scope="module")
def client(app) -> Iterator[httpx.Client]:
    server = Served(app)
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        yield client
    server.stop()


@pytest.fixture(scope="module")
def events(client) -> list[dict[str, Any]]:
    return first_bodies(client.get("/config").json())


def with_file_data(body: dict[str, Any], files: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the body with file data in each of its places, bare and nested."""
    for place in range(len(body["data"])):
        before, after = body["data"][:place], body["data"][place + 1 :]
        yield body | {"data": [*before, next(files), *after]}
        yield body | {"data": [*before, [[{"value": [next(files)]}]], *after]}
    for key in ("session_hash", "event_data", "trigger_id", "fn_index", "data"):
        yield body | {key: next(files)}


def test_no_event_makes_the_server_read_or_fetch_what_its_body_names(client, events, tmp_path):
    private = tmp_path / CANARY
    private.write_text("a secret")
    meta = {"meta": {"_type": "gradio.FileData"}}
    files = [{"path": place} | meta for place in (str(private), f"http://{CANARY}.invalid/x")]
    touched.clear()
    for body in events:
        for attack in with_file_data(body | {"session_hash": "s"}, cycle(files)):
            is_dropped = attack.get("event_data", "") != body.get(
                "event_data", ""
            )  # only the changes of a view are read
            assert client.post(JOIN, json=attack).status_code == (200 if is_dropped else 422), attack
    assert len(events) > 5 and touched == []
    named = json.dumps(files[0])
    assert all(run_event(client, fill(body, text=named, texts=[named], number=0))["success"] for body in events)
    assert touched == [], "a file's name in a text is text"


def test_without_the_guard_gradio_itself_refuses_a_path_outside(tmp_path):
    """Posted to the mounted page directly, as if the guard had let the body through."""
    private = tmp_path / CANARY
    private.write_text("a secret")
    file = {"path": str(private), "meta": {"_type": "gradio.FileData"}}
    guard: Any = make_server([build_run(tmp_path / "run", steps=1, num_problems=2).path])
    server = Served(guard._app)
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as unguarded:
        body = arrival(unguarded, "")
        assert run_event(unguarded, body)["success"]
        touched.clear()
        assert not run_event(unguarded, body | {"data": [file]})["success"]
    server.stop()
    assert touched == []


def fill(body: dict[str, Any], *, text: Any, texts: list[str], number: float) -> dict[str, Any]:
    """Return the body with other values of the same kinds."""
    kinds = {str: text, list: texts, int: number, type(None): text}
    filled = body | {"data": [kinds[type(value)] for value in body["data"]]}
    if "event_data" in body:
        changes = [
            {"patch": patch, "key": key}
            for patch, key in zip([f"?{text}", *texts[:9]], cycle(("", "base", text[:99])))
        ]
        filled["event_data"] = {"query": text[:9000], "changes": changes, "number": 10**9}
    return filled


@pytest.mark.parametrize(
    ("text", "texts", "number"),
    [
        pytest.param("&".join(f"key{index}=1" for index in range(200)), ["none"] * 50, 1e308, marks=pytest.mark.slow),
        ("base=%ff%00\x00&step=99999999999999999999&low=-1&tab=<b>", ["\x00", ""], -1),
        pytest.param("runs=" + "x" * 15_000, ["y" * 1000], 0.5, marks=pytest.mark.slow),
        pytest.param(
            "at=" + "&runs=".join(map(str, range(1000))), list(map(str, range(1000))), 2**70, marks=pytest.mark.slow
        ),
    ],
)
def test_odd_values_of_the_right_kind_fail_no_event(client, events, capfd, text, texts, number):
    bodies = [fill(body, text=text, texts=texts, number=number) for body in events]
    assert [body["fn_index"] for body in bodies if not run_event(client, body)["success"]] == []
    assert capfd.readouterr().err == ""


MALFORMED = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"data": ["\xff"]}',
    "another encoding": '{"data": [""], "fn_index": 0, "session_hash": "s"}'.encode("utf-16"),
    "null": b"null",
    "a list": b"[]",
    "deep lists": b"[" * 60_000,
    "deep data": b'{"fn_index": EVENT, "session_hash": "s", "data": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "no such event": b'{"fn_index": 10000, "session_hash": "s", "data": [""]}',
    "a negative event": b'{"fn_index": -1, "session_hash": "s", "data": [""]}',
    "an event by text": b'{"fn_index": "0", "session_hash": "s", "data": [""]}',
    "an event of many digits": b'{"fn_index": ' + b"9" * 5000 + b', "session_hash": "s", "data": [""]}',
    "no event": b'{"session_hash": "s", "data": [""]}',
    "no session": b'{"fn_index": EVENT, "data": [""]}',
    "a session of odd characters": b'{"fn_index": EVENT, "session_hash": "../s", "data": [""]}',
    "too few values": b'{"fn_index": EVENT, "session_hash": "s", "data": []}',
    "too many values": b'{"fn_index": EVENT, "session_hash": "s", "data": ["", ""]}',
    "no list of values": b'{"fn_index": EVENT, "session_hash": "s", "data": ""}',
    "a number for a text": b'{"fn_index": EVENT, "session_hash": "s", "data": [5]}',
    "null for a text": b'{"fn_index": EVENT, "session_hash": "s", "data": [null]}',
    "half a character": b'{"fn_index": EVENT, "session_hash": "s", "data": ["\\ud800"]}',
    "another event's trigger": b'{"fn_index": EVENT, "session_hash": "s", "data": [""], "trigger_id": 5}',
    "NaN": b'{"fn_index": NaN, "session_hash": "s", "data": [""]}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_malformed_events_are_refused_without_a_line_in_the_log(client, events, capfd, body):
    event = next(known["fn_index"] for known in events if known["data"] == [""])
    body = body.replace(b"EVENT", str(event).encode())
    assert client.post(JOIN, content=body, headers={"Content-Type": "application/json"}).status_code == 422
    for path in ("/gradio_api/cancel", "/gradio_api/reset"):
        assert client.post(path, content=body, headers={"Content-Type": "application/json"}).status_code == 422
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/?page=none&deep_link=..%2f..%2fetc&__theme=x", {}, 200),
        ("/config?page=none&deep_link=x", {}, 200),
        ("/", {"X-Forwarded-Host": "["}, 200),
        ("/", {"X-Gradio-Server": "http://["}, 200),
        ("/", {"Origin": "http://["}, 403),
        ("/", {"Host": "["}, 403),
        ("/gradio_api/queue/data?session_hash=nobody", {}, 404),
        ("/gradio_api/queue/data", {}, 404),
        ("/export/samples.csv?" + "&".join(f"key{index}=1" for index in range(200)), {}, 200),
        ("/export/samples.csv?runs=" + "x" * 9000, {}, 414),
        ("/live/picture/none", {}, 404),
    ],
)
def test_odd_addresses_and_headers_are_answered_without_a_line_in_the_log(client, capfd, path, headers, status):
    assert client.get(path, headers=headers).status_code == status
    assert capfd.readouterr().err == ""


def test_results_that_nobody_collects_are_forgotten(app, client, monkeypatch):
    monkeypatch.setattr(request_guard, "_MAX_UNCOLLECTED", 4)
    body = arrival(client, "")
    for number in range(15):
        client.post(JOIN, json=body | {"session_hash": f"s{number}"}).raise_for_status()
    run_event(client, body)  # after which those before it are done
    client.post(JOIN, json=body | {"session_hash": "last"}).raise_for_status()
    waiting = sum(messages.qsize() for messages in app._waiting.values())
    assert 0 < waiting < 15  # each event sends several; those of the last one may have come already


def test_gradio_never_learns_a_foreign_address_of_its_own(client):
    for name in ("X-Forwarded-Host", "X-Gradio-Server"):
        assert "evil" not in client.get("/", headers={name: "http://evil.example"}).text


def test_the_page_may_run_its_own_inline_scripts_and_no_other(client):
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    script_sources = policy.partition("script-src ")[2].partition(";")[0].split()
    assert {source for source in script_sources if not source.startswith("'sha256-")} == {"'self'", "'unsafe-eval'"}
    assert len(script_sources) == 2 + len(re.findall(r"<script(?! type)", answer.text))
    assert "'unsafe-inline'" not in client.get("/config").headers["content-security-policy"].partition("style-src")[0]


@pytest.mark.parametrize(("smuggled", "num_hashes"), [("", 5), ("<script>alert(1)</script>", 0)])
def test_a_script_that_is_one_too_many_takes_the_others_permission(app, smuggled, num_hashes):
    template = Path(gr.__file__).parent / "templates" / "frontend" / "index.html"
    guard = copy.copy(app)
    guard._app = HTMLResponse(template.read_text() + smuggled)

    async def policy() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as client:
            return (await client.get("/")).headers["content-security-policy"]

    assert asyncio.run(policy()).count("'sha256-") == num_hashes
