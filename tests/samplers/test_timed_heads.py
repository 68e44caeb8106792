"""What a stranger may send to a rollout server before it says what it wants."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import auto

from vlm_rl.samplers.remote.timed_heads import HEAD_BYTES, TimedHeads


class Timed(TimedHeads, auto.AutoHTTPProtocol):
    """As in vlm_rl.samplers.vllm.endpoint, which imports vLLM."""


async def refuse(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(refuse, http=Timed, lifespan="off", log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"GET / HTTP/1.1\r\n", b"A: b\r\n" * 10_000),
        (b"GET / HTTP/1.1\r\nA: ", b"b" * 60_000),
        (b"GET /", b"b" * 60_000),
    ],
    ids=["headers", "one header", "address"],
)
def test_a_head_without_an_end_ends_its_connection(port: int, head: bytes, rest: bytes) -> None:
    """Kept whole, its short headers took 200 MB a second."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as asking, pytest.raises(ConnectionError):
        asking.sendall(head)
        for _ in range(500):
            asking.sendall(rest)


def test_heads_below_the_limit_and_bodies_above_it_are_answered(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as asking:
        for length in (0, 4 * HEAD_BYTES):
            head = f"POST / HTTP/1.1\r\nHost: x\r\nA: {'b' * (HEAD_BYTES - 1000)}\r\nContent-Length: {length}\r\n\r\n"
            asking.sendall(head.encode())
            assert asking.recv(1000).startswith(b"HTTP/1.1 401")
            asking.sendall(b"c" * length)
