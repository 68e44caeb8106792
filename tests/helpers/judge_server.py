"""A judge on a free port, with every fault that one can have: the first part of the path says which."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPLY = "It is fine.\nScore: 7/10"


class JudgeServer(ThreadingHTTPServer):
    """Keeps what it was asked, and the largest number of requests at the same time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.running = self.most = 0

    def url(self, behaviour: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{behaviour}/v1"


class Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.headers.append(dict(self.headers))
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        try:
            getattr(self, f"do_{self.path.split('/')[1]}")(body)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with self.server.lock:
                self.server.running -= 1
        self.close_connection = True

    def do_good(self, _body: dict[str, Any]) -> None:
        usage = {"prompt_tokens": 11, "completion_tokens": 5}
        self._json(200, {"choices": [{"message": {"content": REPLY}}], "usage": usage})

    def do_slow(self, body: dict[str, Any]) -> None:
        time.sleep(0.05)
        self.do_good(body)

    def do_busy_once(self, body: dict[str, Any]) -> None:
        if len(self.server.asked) == 1:
            self._json(429, {"error": {"message": "busy"}})
        else:
            self.do_good(body)

    def do_says(self, body: dict[str, Any]) -> None:
        """Say what it was asked, and the key."""
        text = f"{body['messages'][0]['content']} {self.headers.get('Authorization')} 3"
        self._json(200, {"choices": [{"message": {"content": text}}]})

    def do_error(self, _body: dict[str, Any]) -> None:
        self._json(500, {"error": {"message": f"no memory for {self.headers.get('Authorization')}"}})

    def do_refuse(self, _body: dict[str, Any]) -> None:
        self._json(404, {"error": {"message": "no such model"}})

    def do_redirect(self, _body: dict[str, Any]) -> None:
        self.send_response(307)
        self.send_header("Location", self.server.url("good") + "/chat/completions")
        self.end_headers()

    def do_hang(self, _body: dict[str, Any]) -> None:
        time.sleep(5)

    def do_drip(self, _body: dict[str, Any]) -> None:
        """Send a byte at a time: each pause is short, the whole never ends."""
        self._start("application/json")
        while True:
            self.wfile.write(b" ")
            time.sleep(0.02)

    def do_endless(self, _body: dict[str, Any]) -> None:
        self._start("application/json")
        while True:
            self.wfile.write(b"x" * 65536)

    def do_headers(self, _body: dict[str, Any]) -> None:
        self.send_response(200)
        while True:
            self.wfile.write(b"X: " + b"x" * 60000 + b"\r\n")

    def do_html(self, _body: dict[str, Any]) -> None:
        self._start("text/html")
        self.wfile.write(b"<h1>10/10</h1>")

    def do_garbage(self, _body: dict[str, Any]) -> None:
        self._start("application/json")
        self.wfile.write(b"{not json \xff\x00")

    def do_nested(self, _body: dict[str, Any]) -> None:
        self._start("application/json")
        self.wfile.write(b"[" * 500_000)

    def do_shape(self, _body: dict[str, Any]) -> None:
        self._json(200, {"choices": [7]})

    def do_empty(self, _body: dict[str, Any]) -> None:
        usage = {"prompt_tokens": -3, "completion_tokens": 4}
        self._json(200, {"choices": [{"message": {"content": None}}], "usage": usage})

    def do_no_score(self, _body: dict[str, Any]) -> None:
        self._json(200, {"choices": [{"message": {"content": "I would say 11/10"}}]})

    def do_gzip(self, _body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()

    def do_cut(self, _body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"choices": ')

    def do_silent(self, _body: dict[str, Any]) -> None:
        """Close the connection without a word."""

    def _start(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _json(self, status: int, tree: Any) -> None:
        body = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
