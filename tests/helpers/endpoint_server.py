"""A small server with the OpenAI protocol, and every fault that one can have: the path's first part says which."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.hostile import attack

WORDS = ["<think>", "one", " two", " three", "</th", "ink>", " so", " \\boxed{3}"]


class Server(ThreadingHTTPServer):
    """Keeps what it was asked, and how many streams were broken off by the client."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.broken = 0
        self.ended = threading.Event()

    def url(self, behaviour: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{behaviour}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None: ...

    @property
    def behaviour(self) -> str:
        return self.path.split("/")[1]

    def do_GET(self) -> None:
        names = ["a", "b"] if self.behaviour == "two" else ["only"]
        self._whole(200, {"data": [{"id": name} for name in names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        try:
            getattr(self, f"do_{self.behaviour}")(body)
        except (BrokenPipeError, ConnectionResetError):
            self.server.broken += 1
        self.server.ended.set()
        self.close_connection = True

    def do_good(self, _body: dict[str, Any]) -> None:
        self._start()
        for word in WORDS:
            self._event({"choices": [{"index": 0, "delta": {"content": word}}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"completion_tokens": 9}})
        self.wfile.write(b"data: [DONE]\n\n")

    def do_hostile(self, _body: dict[str, Any]) -> None:
        """Send markup, torn in the middle of its tags, in the reasoning and in the answer."""
        self._start()
        for piece in (
            "<think><scr",
            "ipt>window.pwned=1</script>",
            "<img src=x one",
            f"rror=window.pwned=1> {attack('endpoint-reasoning')}</thi",
            "nk>",
        ):
            self._event({"choices": [{"delta": {"content": piece}}]})
            time.sleep(0.05)
        text = r"$\href{javascript:window.pwned=1}{x}$ <a href='javascript:window.pwned=1'>y</a> \boxed{<b>7</b>} "
        text += attack("endpoint-answer")
        self._event({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]})

    def do_apart(self, _body: dict[str, Any]) -> None:
        """Send reasoning in its own field, counted by the server, in one write of odd pieces, cut at the limit."""
        self._start()
        self._event({"choices": [{"delta": {"reasoning_content": "hm <b>"}}]})
        self._event({"choices": [{"delta": {"content": "four"}}]})
        details = {"completion_tokens": 12, "completion_tokens_details": {"reasoning_tokens": 10}}
        self._event({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": details})

    def do_counts(self, _body: dict[str, Any]) -> None:
        """Count more tokens than can be."""
        self._start()
        self._event({"choices": [{"delta": {"content": "<think>a"}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"completion_tokens": 10**400}})

    def do_plain(self, body: dict[str, Any]) -> None:
        """Take the standard's own fields only, as OpenAI's servers do."""
        if "repetition_penalty" in body:
            self._whole(400, {"error": {"message": "Unrecognized request argument: repetition_penalty"}})
        else:
            self.do_good(body)

    def do_refuse(self, _body: dict[str, Any]) -> None:
        self._whole(400, {"error": {"message": f"no <i>such</i> model: {attack('endpoint-error')}"}})

    def do_broken(self, _body: dict[str, Any]) -> None:
        self._whole(500, {"error": f"out of memory for {self.headers.get('Authorization')}"})

    def do_redirect(self, _body: dict[str, Any]) -> None:
        self.send_response(307)
        self.send_header("Location", self.server.url("good") + "/chat/completions")
        self.end_headers()

    def do_hang(self, _body: dict[str, Any]) -> None:
        self._start()
        self._event({"choices": [{"delta": {"content": "wait"}}]})
        time.sleep(5)

    def do_endless(self, _body: dict[str, Any]) -> None:
        self._start()
        while True:
            self._event({"choices": [{"delta": {"content": "and "}}]})
            time.sleep(0.01)

    def do_drop(self, _body: dict[str, Any]) -> None:
        self._start()
        self._event({"choices": [{"delta": {"content": "half an"}}]})

    def do_fault(self, _body: dict[str, Any]) -> None:
        self._start()
        self._event({"choices": [{"delta": {"content": "half"}}]})
        self._event({"error": {"message": "engine died"}})

    def do_huge(self, _body: dict[str, Any]) -> None:
        self._start()
        piece = "x" * 50_000
        while True:
            self._event({"choices": [{"delta": {"content": piece}}]})

    def do_line(self, _body: dict[str, Any]) -> None:
        self._start()
        while True:
            self.wfile.write(b"x" * 65536)

    def do_garbage(self, _body: dict[str, Any]) -> None:
        self._start()
        self.wfile.write(b"data: {not json\n\n")

    def do_shape(self, _body: dict[str, Any]) -> None:
        self._start()
        self.wfile.write(b'data: {"choices": [7]}\n\n')

    def do_gzip(self, _body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(gzip.compress(b" " * 10**6))

    def _start(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def _event(self, tree: Any) -> None:
        self.wfile.write(f"data: {json.dumps(tree)}\n\n".encode())
        self.wfile.flush()

    def _whole(self, status: int, tree: Any) -> None:
        body = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def endpoint_server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
