"""An ASGI application on a free port, in a thread of the test's own process."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from typing import Any

import uvicorn


class Served:
    """A running server; `stop` ends it."""

    def __init__(self, app: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

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
