"""The connections of the demo: how many, how long, and what malformed ones leave in the log."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from tests.helpers.example_run import build_run
from tests.helpers.served import Served
from vlm_rl.demo.server import BoundedProtocol, make_server

HEAD = b"HTTP/1.1\r\nHost: localhost\r\n"
HALF_A_PICTURE = b"POST /live/picture " + HEAD + b"Content-Length: 1000000\r\n\r\n" + bytes(300_000)
HALF_AN_EVENT = b"POST /gradio_api/queue/join " + HEAD + b"Content-Length: 1000\r\n\r\n{"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    run = build_run(tmp_path_factory.mktemp("server") / "run", steps=1, num_problems=2)
    server = Served(make_server([run.path]), http=BoundedProtocol)
    yield server
    server.stop()


@contextmanager
def connection(served: Served, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as opened:
        opened.sendall(sent)
        yield opened


def last_words(opened: socket.socket) -> bytes:
    """Return all that the server sends before it closes the connection."""
    words = b""
    with suppress(ConnectionResetError):
        while more := opened.recv(65536):
            words += more
    return words


@pytest.mark.parametrize("first", [b"", b"GET /theme.css " + HEAD + b"\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(served, monkeypatch, first):
    monkeypatch.setattr("vlm_rl.samplers.remote.timed_heads.HEAD_SECONDS", 0.3)
    with connection(served, first) as opened:
        assert not first or opened.recv(100).startswith(b"HTTP/1.1 200")
        opened.sendall(b"GET / HTTP/1.1\r\n")
        last_words(opened)


@pytest.mark.parametrize("sent", [HALF_A_PICTURE, HALF_AN_EVENT])
def test_a_body_that_does_not_come_is_answered_408(served, monkeypatch, sent):
    monkeypatch.setattr("vlm_rl.demo.web.request_guard.BODY_SECONDS", 0.3)
    with connection(served, sent) as opened:
        assert last_words(opened).startswith(b"HTTP/1.1 408")


def test_a_refusal_does_not_wait_for_the_rest_of_the_body(served):
    with connection(served, b"POST /none " + HEAD + b"Content-Length: 1000000\r\n\r\nx") as opened:
        assert last_words(opened).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("asking", [b"", b"GET /theme.css " + HEAD + b"\r\n"])
def test_connections_that_ask_for_nothing_make_room(served, monkeypatch, asking):
    monkeypatch.setattr("vlm_rl.demo.server.MAX_CONNECTIONS", 10)
    with ExitStack() as held:
        for _ in range(30):
            held.enter_context(connection(served, asking))
        assert served.ask("GET", "/theme.css")[0] == 200
        while served.num_connections > 10:
            time.sleep(0.01)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00",  # the beginning of TLS
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET /" + b"a" * 100_000,
        b"GET / " + HEAD + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n",
        b"CONNECT evil.example:80 " + HEAD + b"\r\n",
        b"GET /theme.css " + HEAD + b"\r\n\x00\x01\r\n\r\n",
        b"GET /theme.css " + HEAD + b"Cookie: \xff;;=;a=\x80\r\n\r\n",
        b"POST /gradio_api/queue/join " + HEAD + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
        b"POST /gradio_api/queue/join " + HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /gradio_api/queue/join " + HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HALF_A_PICTURE,
        HALF_AN_EVENT,
        b"GET /gradio_api/heartbeat/s " + HEAD + b"\r\n",
    ],
    ids=range(14),
)
def test_malformed_and_broken_off_requests_leave_no_line_in_the_log(served, capfd, sent):
    with connection(served, sent) as opened, suppress(OSError):  # it may be closed already
        opened.shutdown(socket.SHUT_WR)
        opened.recv(100)
    assert served.ask("GET", "/theme.css")[0] == 200
    assert capfd.readouterr().err == ""
