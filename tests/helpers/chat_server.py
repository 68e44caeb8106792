"""A server with the OpenAI protocol, and every fault that one can have: the first part of the path says which.

A request with `stream` is answered in pieces, any other one as a whole.
"""

from __future__ import annotations

import gzip
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.helpers.hostile import attack

REPLY = "It is fine.\nScore: 7/10"
WORDS = ["<think>", "one", " two", " three", "</th", "ink>", " so", " \\boxed{3}"]  # of the same reply in a stream
MODELS = {"two": ["a", "b"], "none": [], "echo": ["s3cret"]}


class ChatServer(ThreadingHTTPServer):
    """Keeps what it was asked, the largest number of requests at a time, and how many the client broke off."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, certificate: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        if certificate:
            self.socket = certificate.wrap_socket(self.socket, server_side=True)
        self.scheme = "https" if certificate else "http"
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.running = self.most = 0
        self.broken: list[str] = []  # behaviours whose client left before the end, as that is noticed
        self.ended = threading.Event()  # set after each request

    def url(self, behaviour: str) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}/{behaviour}/v1"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that refuses the certificate."""


class Handler(BaseHTTPRequestHandler):
    server: ChatServer  # pyright: ignore[reportIncompatibleVariableOverride]  # no other makes this handler

    def log_message(self, format: str, *_: object) -> None: ...  # noqa: A002

    @property
    def behaviour(self) -> str:
        return self.path.split("/")[1]

    def do_GET(self) -> None:
        """List models, or do as `list_FAULT` says."""
        self.body: dict[str, Any] = {}
        fault = self.behaviour.removeprefix("list_")
        self._answer(getattr(self, f"do_{fault}") if fault != self.behaviour else self._list)

    def _list(self) -> None:
        self._json(200, {"data": [{"id": name} for name in MODELS.get(self.behaviour, ["only"])]})

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(self.body)
            self.server.headers.append(dict(self.headers))
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        self._answer(getattr(self, f"do_{self.behaviour}"))
        with self.server.lock:
            self.server.running -= 1
        self.server.ended.set()

    def _answer(self, behave: Any) -> None:
        try:
            behave()
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            self.server.broken.append(self.behaviour)
        self.close_connection = True

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    # -- replies that are meant well -----------------------------------------------------------------

    def do_good(self) -> None:
        if self.is_stream:
            self._stream(*WORDS, usage={"completion_tokens": 9})
        else:
            self._whole(REPLY, usage={"prompt_tokens": 11, "completion_tokens": 5})

    do_two = do_none = do_good

    def do_slow(self) -> None:
        time.sleep(0.05)
        self.do_good()

    def do_busy_once(self) -> None:
        if len(self.server.asked) == 1:
            self._json(429, {"error": {"message": "busy"}})
        else:
            self.do_good()

    def do_apart(self) -> None:
        """Send reasoning in its own field, counted by the server, cut at the limit."""
        self._start("text/event-stream")
        self._event({"choices": [{"delta": {"reasoning_content": "hm <b>"}}]})
        self._event({"choices": [{"delta": {"content": "four"}}]})
        details = {"completion_tokens": 12, "completion_tokens_details": {"reasoning_tokens": 10}}
        self._event({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": details})

    def do_plain(self) -> None:
        """Take the standard's own fields only, as OpenAI's servers do."""
        if "repetition_penalty" in self.body:
            self._json(400, {"error": {"message": "Unrecognized request argument: repetition_penalty"}})
        else:
            self.do_good()

    def do_echo(self) -> None:
        """Say what it was asked, and the key."""
        text = f"{self.body['messages'][-1]['content']} {self.headers.get('Authorization')} 3"
        if self.is_stream:
            self._stream(text[:-6], text[-6:])
        else:
            self._whole(text)

    def do_hostile(self) -> None:
        """Send markup, torn in the middle of its tags, in the reasoning and in the answer."""
        torn = ("<think><scr", "ipt>window.pwned=1</script>", "<img src=x one")
        last = f"rror=window.pwned=1> {attack('endpoint-reasoning')}</thi"
        text = r"$\href{javascript:window.pwned=1}{x}$ <a href='javascript:window.pwned=1'>y</a> \boxed{<b>7</b>} "
        self._stream(*torn, last, "nk>", text + attack("endpoint-answer"), pause=0.05)

    def do_half(self) -> None:
        """Send half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
        self._stream("<think>a\ud800</think>", "4")

    def do_box(self) -> None:
        """Answer how many pictures there are, in a box; think for ever where there is none."""
        content = self.body["messages"][-1]["content"]
        pictures = sum(part["type"] == "image_url" for part in content)
        if pictures:
            text = f"<answer>\\boxed{{{pictures}}}</answer>"
            self._whole(text, usage={"completion_tokens": 7}, reasoning="I count")
        else:
            self._whole(None, usage={"completion_tokens": 9}, reasoning="hm", finish="length")

    def do_probs(self) -> None:
        """Classify a chat, at /classify: the second of two labels is likely where the response says so."""
        assert self.path == "/probs/classify"
        said = self.body["messages"][-1]["content"]
        self._json(200, {"data": [{"index": 0, "label": None, "probs": [0.25, 0.75] if "good" in said else [1, 0]}]})

    def do_no_probs(self) -> None:
        self._json(200, {"data": [{"probs": [float(len(self.server.asked)) + 1]}]})

    def do_box_twice(self) -> None:
        """Answer two requests, and be broken from then on."""
        if len(self.server.asked) <= 2:
            self.do_box()
        else:
            self.do_broken()

    # -- faults ------------------------------------------------------------------------------------------

    def do_counts(self) -> None:
        """Count more tokens than can be, and fewer."""
        if self.is_stream:
            self._stream("<think>a", usage={"completion_tokens": 10**400})
        else:
            self._whole("7", usage={"prompt_tokens": -3, "completion_tokens": 10**400})

    def do_refuse(self) -> None:
        self._json(400, {"error": {"message": f"no <i>such</i> model: {attack('endpoint-error')}"}})

    def do_broken(self) -> None:
        self._json(500, {"error": f"out of memory for {self.headers.get('Authorization')}"})

    def do_cut_key(self) -> None:
        """Send the key where a message is cut."""
        self._json(500, {"error": f"{'x' * 290} {self.headers.get('Authorization')} {'y' * 290}"})

    def do_redirect(self) -> None:
        self.send_response(307)
        self.send_header("Location", self.server.url("good") + "/chat/completions")
        self.end_headers()

    def do_hang(self) -> None:
        """Say a word in a stream, otherwise nothing, and be silent then."""
        if self.is_stream:
            self._start("text/event-stream")
            self._piece("wait")
        time.sleep(5)

    def do_drip(self) -> None:
        """Send a byte at a time: each pause is short, the whole never ends."""
        self._start("application/json")
        while True:
            self.wfile.write(b" ")
            time.sleep(0.02)

    def do_endless(self) -> None:
        self._start("text/event-stream" if self.is_stream else "application/json")
        while True:
            if self.is_stream:
                self._piece("and ")
                time.sleep(0.01)
            else:
                self.wfile.write(b"x" * 65536)

    def do_endless_error(self) -> None:
        self.send_response(503)
        self.end_headers()
        while True:
            self.wfile.write(b"busy " * 10_000)

    def do_headers(self) -> None:
        self.send_response(200)
        while True:
            self.wfile.write(b"X: " + b"x" * 60000 + b"\r\n")

    def do_html(self) -> None:
        self._start("text/html")
        self.wfile.write(b"<h1>10/10</h1>")

    def do_garbage(self) -> None:
        self._start("application/json")
        self.wfile.write(b"data: {not json \xff\x00\n\n")

    def do_nested(self) -> None:
        self._start("application/json")
        self.wfile.write(b"data: " * self.is_stream + b"[" * 500_000 + b"\n\n")

    def do_shape(self) -> None:
        if self.is_stream:
            self._start("text/event-stream")
            self._event({"choices": [7]})
        else:
            self._json(200, {"choices": [7]})

    def do_empty(self) -> None:
        self._whole(None, usage={"prompt_tokens": -3, "completion_tokens": 4})

    def do_no_score(self) -> None:
        self._whole("I would say 11/10")

    def do_gzip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(gzip.compress(b" " * 10**6))

    def do_cut(self) -> None:
        """Break off in the middle: of a stream between two pieces, of a whole reply before the length it gave."""
        if self.is_stream:
            self._start("text/event-stream")
            self._piece("half an")
        else:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": ')

    def do_fault(self) -> None:
        self._start("text/event-stream")
        self._piece("half")
        self._event({"error": {"message": f"engine died with {self.headers.get('Authorization')}"}})

    def do_huge(self) -> None:
        self._start("text/event-stream")
        while True:
            self._piece("x" * 50_000)

    def do_line(self) -> None:
        self._start("text/event-stream")
        while True:
            self.wfile.write(b"x" * 65536)

    def do_silent(self) -> None:
        """Close the connection without a word."""

    # -- words of the protocol -------------------------------------------------------------------------

    def _start(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _json(self, status: int, tree: Any) -> None:
        data = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _whole(
        self, text: str | None, *, usage: dict[str, int] | None = None, reasoning: str = "", finish: str = "stop"
    ) -> None:
        message = {"content": text, **({"reasoning_content": reasoning} if reasoning else {})}
        self._json(200, {"choices": [{"message": message, "finish_reason": finish}], "usage": usage})

    def _stream(self, *pieces: str, usage: dict[str, int] | None = None, pause: float = 0.0) -> None:
        self._start("text/event-stream")
        for piece in pieces:
            self._piece(piece)
            time.sleep(pause)
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if usage:
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _piece(self, text: str) -> None:
        self._event({"choices": [{"index": 0, "delta": {"content": text}}]})

    def _event(self, tree: Any) -> None:
        self.wfile.write(f"data: {json.dumps(tree)}\n\n".encode())
        self.wfile.flush()


def self_signed(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Return a server's certificate for 127.0.0.1 that nobody signed, and the file that makes it trusted."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", *options, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


@contextmanager
def chat_server(certificate: ssl.SSLContext | None = None) -> Iterator[ChatServer]:
    """Yield a server on a free port; with a certificate it speaks TLS."""
    server = ChatServer(certificate)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
