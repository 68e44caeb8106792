"""Serve the demo, and decide who may ask for what.

The page needs few of gradio's routes: its own assets, its configuration and the event queue. The guard answers
nothing else, so that file serving, uploads and proxying do not exist here, whatever the library adds. A request must
name this machine as its host (a foreign name would be a rebinding attack) and, where a browser sends an origin, come
from the page itself.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request, Response
from gradio.themes import Base
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_rl.demo.app import build_page
from vlm_rl.demo.export import MEDIA_TYPES, export
from vlm_rl.demo.library import Library
from vlm_rl.demo.live import LiveOptions, build_live, open_live
from vlm_rl.demo.page_state import PageStates
from vlm_rl.demo.theme import head, stylesheet_of_app
from vlm_rl.demo.uploads import MAX_BYTES, PICTURE_PATH
from vlm_rl.demo.url_state import MAX_QUERY, UrlState
from vlm_rl.errors import UserError
from vlm_rl.report import vega

# gradio's page has inline scripts and styles, and its HTML component compiles its template with eval
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; manifest-src 'self'; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_READ = re.compile(
    r"/|/(assets|static)/[\w./@-]+|/theme\.css|/config/?|/favicon\.ico|/manifest\.json"
    r"|/charts/(vega|loader)\.js"
    rf"|/export/({'|'.join(map(re.escape, MEDIA_TYPES))})"
    r"|/gradio_api/(info/?|app_id/?|startup-events|queue/data|heartbeat/\w+)"
    rf"|{PICTURE_PATH}/[\w-]+"
)
_WRITE = re.compile(rf"/gradio_api/(queue/join|cancel|reset)/?|{PICTURE_PATH}")
_MAX_BODY = 64 * 1024  # bytes; the page posts a few short strings, and a picture to a route of its own


class Guard:
    """Refuse foreign hosts and origins, unknown routes and large bodies; add the security headers."""

    def __init__(self, app: ASGIApp, *, open_wider: bool) -> None:
        self._app = app
        self._open_wider = open_wider

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
        elif scope["type"] == "http":
            await PlainTextResponse(refusal[1], status_code=refusal[0])(scope, receive, send_with_headers)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        if scope["type"] != "http":
            return 403, "only HTTP"
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not host_allowed(host, open_wider=self._open_wider):
            return 403, "unknown host"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "foreign origin"
        routes = {"GET": _READ, "HEAD": _READ, "POST": _WRITE}.get(scope["method"])
        if routes is None or ".." in scope["path"] or not routes.fullmatch(scope["path"]):
            return 404, "not found"
        most = MAX_BYTES if scope["path"] == PICTURE_PATH else _MAX_BODY
        if scope["method"] == "POST" and not _small(headers.get("content-length"), most):
            return 413, "too large"
        return None


def host_allowed(host: str, *, open_wider: bool) -> bool:
    """Say whether a Host header names this machine; names can be rebound to it, so only its own count.

    `open_wider` adds IP addresses as such and the machine's own name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in ("localhost", "127.0.0.1", "::1"):
        return True
    if not open_wider:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in (socket.gethostname().lower(), socket.getfqdn().lower())
    return True


def _small(length: str | None, most: int) -> bool:
    return length is not None and length.isdecimal() and int(length) <= most


def make_server(folders: Sequence[Path], *, open_wider: bool = False, live: LiveOptions | None = None) -> ASGIApp:
    """Return the page behind its guard, as an ASGI application. Raises UserError where there is nothing to show."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio asks each time before it would phone home
    warnings.filterwarnings("ignore", message="A `<script>` tag", category=UserWarning)  # ours hold a chart's data
    library = Library(folders)
    states = PageStates(library)
    live_panel = open_live(states, live)
    outer = FastAPI(openapi_url=None, routes=list(live_panel.uploads.routes()))
    _add_exports(outer, states)
    _add_charts(outer)
    return guarded(build_page(states, live=partial(build_live, live_panel)), outer, open_wider=open_wider)


def guarded(page: gr.Blocks, outer: FastAPI, *, open_wider: bool = False) -> ASGIApp:
    """Return a page with its style, in an application that may have routes of its own, behind the guard."""
    inner: Any = gr.mount_gradio_app(
        outer,
        page,
        path="/",
        theme=Base(
            primary_hue="blue",
            neutral_hue="slate",
            font=["system-ui", "sans-serif"],  # plain names: no font is fetched
            font_mono=["ui-monospace", "monospace"],
        ),
        css=stylesheet_of_app(),
        head=head(),
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        max_file_size=1,
    )
    return Guard(inner, open_wider=open_wider)


def _add_exports(app: FastAPI, states: PageStates) -> None:
    """Serve files of what the page shows, made on demand: nothing is written to disk, nothing on disk is served."""

    @app.get("/export/{name}")
    def export_file(name: str, request: Request) -> Response:
        query = str(request.url.query)
        if len(query) > MAX_QUERY:
            return PlainTextResponse("the address is too long", status_code=414)
        try:
            content = export(states.of(UrlState.parse(query)), name)
        except UserError as error:
            return PlainTextResponse(str(error), status_code=422)
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(content, media_type=MEDIA_TYPES[name], headers=headers)


def _add_charts(app: FastAPI) -> None:
    """Serve the two scripts that draw charts; the page fetches them when it first shows one."""

    @app.get("/charts/{name}.js")
    def chart_script(name: str) -> Response:
        script = vega.scripts()[("vega", "loader").index(name)]  # the guard lets no other name in
        return Response(script, media_type="text/javascript", headers={"cache-control": "max-age=3600"})


def launch(
    folders: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    open_wider: bool = False,
    live: LiveOptions | None = None,
) -> None:
    """Serve the page until interrupted.

    Raises UserError if `host` is not this machine's loopback and `open_wider` does not say so, if
    the port is taken, or if there is nothing to show.
    """
    if host not in ("127.0.0.1", "localhost", "::1") and not open_wider:
        raise UserError(f"--host {host} lets other machines in; say so with --open-wider if that is meant")
    app = make_server(folders, open_wider=open_wider, live=live)
    threading.Thread(target=vega.scripts, daemon=True).start()  # bundled before somebody looks at a chart
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose a different --port") from None
    place = f"[{host}]" if ":" in host else host
    print(f"demo at http://{place}:{port} (Ctrl-C ends it)", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning", server_header=False)
