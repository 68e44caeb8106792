"""Attacks on rollout servers: requests that never come, and one whose head never ends."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from tests.attack.attack import Attack
from tests.attack.toys import toys
from tests.helpers.rollout_servers import RolloutServer

HALF_HEADS = (b"", b"GET /vlm_rl/info HTTP/1.1\r\nHost: ")


def config_of(folder: Path) -> Path:
    rollout = {"sampler": "server", "servers": ["http://127.0.0.1:1"], "server_token": str(folder / "token")}
    return toys().config("served", rollout=rollout)


def send_half_heads(folder: Path) -> str:
    """Open 200 connections that never finish a request, and see which the server still holds after at most 15 s.

    One more sends headers without an end.
    """
    with RolloutServer(config_of(folder), folder / "log") as server:
        server.wait()
        opened = [socket.create_connection((server.host, server.port)) for _ in range(200)]
        for index, connection in enumerate(opened):
            connection.sendall(HALF_HEADS[index % 2])
        held, end = opened, time.monotonic() + 15
        while held and time.monotonic() < end:
            time.sleep(0.2)
            held = [connection for connection in held if not is_closed(connection)]
        for connection in opened:
            connection.close()
        with socket.create_connection((server.host, server.port)) as endless, suppress(ConnectionError):
            endless.sendall(b"GET /vlm_rl/info HTTP/1.1\r\n")
            endless.sendall(b"A: b\r\n" * 5_000_000)
            return "30 MB of headers are read"
        with socket.create_connection((server.host, server.port)) as asking:
            asking.sendall(b"GET /vlm_rl/info HTTP/1.1\r\nHost: x\r\n\r\n")
            answered = asking.recv(64).split(b" ")[1].decode()
        return f"{len(opened) - len(held)} of {len(opened)} closed, a stranger is answered {answered}"


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


SERVED = "What may be hostile"
ATTACKS = (
    Attack(
        "half heads and an endless one to a rollout server",
        SERVED,
        "200 of 200 closed, a stranger is answered 401",
        send_half_heads,
        slow=True,
    ),
)
