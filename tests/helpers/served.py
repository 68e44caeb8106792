"""Servers of the tests: free ports, waiting for one, and an ASGI application in a thread of the test's process."""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import uvicorn


def free_port() -> int:
    """Return a port that nobody listens on, below those that the system hands out.

    A port that the system chose may be chosen again, for another process, before its user opens it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


class Running(Protocol):
    """A process, of which its exit code is asked: None while it runs."""

    def poll(self) -> int | None: ...


def wait_for_status(
    process: Running,
    port: int,
    path: str,
    status: int,
    *,
    log: Path,
    host: str = "127.0.0.1",
    seconds: float = 480,
) -> None:
    """Wait until a server's process answers a path with this status; a failure shows the end of its log."""
    end = time.monotonic() + seconds
    while _status_of(host, port, path) != status:
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.1)


def _status_of(host: str, port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


class Served:
    """A running server on a port that is free, or the one that is given; `stop` ends it."""

    def __init__(self, app: Any, *, port: int | None = None, http: Any = "auto") -> None:
        self.port = port or free_port()
        self._server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error", http=http)
        )
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> tuple[int, dict[str, str]]:
        """Return the status and the headers, in lower case, of one request whose path is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)
