"""A hub on a free port: the endpoints that huggingface_hub calls to download a model, and to upload a folder."""

from __future__ import annotations

import base64
import hashlib
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
        self.published: dict[str, dict[str, dict[str, bytes]]] = {}  # repository -> commit, the newest last -> files
        self.sent: list[str] = []  # paths of the files that were downloaded

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ModelHub  # pyright: ignore[reportIncompatibleVariableOverride]  # no other makes this handler

    def log_message(self, format: str, *_: object) -> None: ...  # noqa: A002

    def do_HEAD(self) -> None:
        self._send_file(*self._asked_file())

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            self.server.sent.append(self.path)
            self._send_file(*self._asked_file())
        elif not self.server.published:  # asked about a repository before a commit
            self._reply({"id": "me/toy", "sha": "0" * 40, "siblings": [], "private": True})
        else:
            _, _, _, owner, model, kind, revision = self.path.partition("?")[0].split("/")[:7]
            self._describe(f"{owner}/{model}", revision, tree=kind == "tree")

    def _describe(self, repository: str, revision: str, *, tree: bool) -> None:
        """Reply with the commit of a revision, or with the files of a commit."""
        commits = self.server.published.get(repository)
        if commits is None:
            self._refuse("RepoNotFound")
            return
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            self._refuse("RevisionNotFound")
        elif tree:
            self._reply([{"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                         for path, data in commits[commit].items()])  # fmt: skip
        else:
            self._reply({"id": repository, "sha": commit, "siblings": []})

    def _asked_file(self) -> tuple[bytes, str]:
        _, owner, model, _, commit, path = self.path.split("/", 5)
        return self.server.published[f"{owner}/{model}"][commit][path], commit

    def _send_file(self, data: bytes, commit: str) -> None:
        self.send_response(200)
        for key, value in {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit, "Content-Length": len(data)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

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

    def _reply(self, tree: Any) -> None:
        text = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    """Serve a hub in a thread of this process."""
    with ModelHub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
