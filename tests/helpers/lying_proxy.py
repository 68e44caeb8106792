"""A proxy in front of a rollout server that passes everything on, except for the groups of responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Lie = Callable[[dict[str, Any]], tuple[int, bytes]]  # the server's reply -> status and body instead


class LyingProxy(ThreadingHTTPServer):
    """Set `lie` to change what the proxy says."""

    daemon_threads = True
    lie: Lie | None = None

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: LyingProxy  # pyright: ignore[reportIncompatibleVariableOverride]  # no other makes this handler

    def log_message(self, format: str, *_: object) -> None: ...  # noqa: A002

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {"Authorization": self.headers["Authorization"], "Content-Type": "application/json"}
        reply = httpx.request(
            self.command, self.server.target + self.path, content=body, headers=headers, timeout=300
        )
        status, data = reply.status_code, reply.content
        if self.path == "/vlm_rl/generate" and self.server.lie is not None:
            status, data = self.server.lie(reply.json())
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET


def changed(change: Callable[[dict[str, Any]], Any]) -> Lie:
    """Return a lie that changes the first response of each group."""

    def lie(reply: dict[str, Any]) -> tuple[int, bytes]:
        change(reply["responses"][0])
        return 200, json.dumps(reply).encode()

    return lie


@contextmanager
def lying_proxy(target: str) -> Iterator[LyingProxy]:
    """Yield a proxy that runs until the context ends."""
    proxy = LyingProxy(target)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
