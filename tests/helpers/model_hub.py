"""A hub on a free port: the endpoints that huggingface_hub calls to make a repository and to upload a folder."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ModelHub(ThreadingHTTPServer):
    """Keeps what was created and which files each repository holds; every file counts as small."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ModelHub

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:  # of the repository and its files, before a commit
        self._reply({"id": "me/toy", "sha": "0" * 40, "siblings": [], "private": True})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers.get("Authorization", ""))
        kind = next(word for word in ("create", "validate-yaml", "preupload", "commit") if word in self.path)
        self._reply(getattr(self, "_" + kind.replace("-", "_"))(body))

    def _create(self, body: bytes) -> dict[str, Any]:
        self.server.created.append(json.loads(body))
        return {"url": f"{self.server.url}/me/toy", "name": "me/toy"}

    def _validate_yaml(self, _body: bytes) -> dict[str, Any]:
        return {"errors": [], "warnings": []}

    def _preupload(self, body: bytes) -> dict[str, Any]:
        files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                 for file in json.loads(body)["files"]]  # fmt: skip
        return {"files": files}

    def _commit(self, body: bytes) -> dict[str, Any]:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return {"commitUrl": f"{self.server.url}/me/toy/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}

    def _reply(self, tree: dict[str, Any]) -> None:
        text = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    """Serve a hub in a thread of this process."""
    with ModelHub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
