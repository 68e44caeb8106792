"""Serve the demo: the page behind its guard (demo/web/request_guard.py), on a bounded number of connections."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request, Response
from gradio.themes import Base
from h11 import LocalProtocolError
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlm_rl.demo.app import build_page
from vlm_rl.demo.files.export import MEDIA_TYPES, export
from vlm_rl.demo.live.panel import LiveOptions, build_live, open_live
from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.url_state import MAX_QUERY, UrlState
from vlm_rl.demo.panels.page_state import UNREADABLE, PageStates
from vlm_rl.demo.web.access import Access, read_token
from vlm_rl.demo.web.request_guard import RequestGuard
from vlm_rl.demo.web.theme import head, stylesheet_of_app
from vlm_rl.errors import UserError
from vlm_rl.report import vega
from vlm_rl.samplers.remote.timed_heads import TimedHeads

MAX_CONNECTIONS = 400  # a process may have 1024 files open; an open page has up to six connections

_MAX_EVENTS = 200  # waiting for their turn
MAX_SESSIONS = 200  # whose components' last values gradio holds


def make_server(
    folders: Sequence[Path],
    *,
    access: Access | None = None,
    live: LiveOptions | None = None,
    first_view: str = "",
) -> ASGIApp:
    """Return the page behind its guard, as an ASGI application.

    Args:
        folders: the runs, or folders of them.
        access: who may visit; None for the loopback alone, without a token.
        live: of the live panel.
        first_view: the query of an address that has none.

    Raises UserError if there is nothing to show.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio asks each time before it would phone home
    warnings.filterwarnings("ignore", message="A `<script>` tag", category=UserWarning)  # ours hold a chart's data
    library = Library(folders)
    states = PageStates(library, first_view=first_view)
    live_panel = open_live(states, live)
    outer = FastAPI(openapi_url=None, routes=list(live_panel.uploads.routes()))
    _add_exports(outer, states)
    _add_charts(outer)
    return guarded(build_page(states, live=partial(build_live, live_panel)), outer, access=access)


def guarded(page: gr.Blocks, outer: FastAPI, *, access: Access | None = None) -> ASGIApp:
    """Return a page with its style, in an application that may have routes of its own, behind the guard."""
    access = access or Access()
    page.queue(max_size=_MAX_EVENTS)
    page.state_session_capacity = MAX_SESSIONS
    # gradio compares the paths in a body with those that it may read only in an app that was launched, and has no
    # public way to say so of one that is mounted. The guard lets no path through; this holds if it ever did.
    page.has_launched = True
    inner: Any = gr.mount_gradio_app(
        outer,
        page,
        path="/",
        root_path=access.public_url or None,
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
    return RequestGuard(inner, page, access)


def _add_exports(app: FastAPI, states: PageStates) -> None:
    """Serve files of what the page shows, made on demand: nothing is written to disk, nothing on disk is served."""

    @app.get("/export/{name}")
    def export_file(name: str, request: Request) -> Response:
        query = str(request.url.query)
        if len(query) > MAX_QUERY:
            return PlainTextResponse("the address is too long", status_code=414)
        try:
            content = export(states.of(UrlState.parse(query)), name)
        except UNREADABLE as error:
            return PlainTextResponse(str(error), status_code=422)
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(content, media_type=MEDIA_TYPES[name], headers=headers)


def _add_charts(app: FastAPI) -> None:
    """Serve the two scripts that draw charts; the page fetches them when it first shows one."""

    @app.get("/charts/{name}.js")
    def chart_script(name: str) -> Response:
        script = vega.scripts()[("vega", "loader").index(name)]  # the guard lets no other name in
        return Response(script, media_type="text/javascript", headers={"cache-control": "max-age=3600"})


class BoundedProtocol(TimedHeads, H11Protocol):
    """HTTP on at most MAX_CONNECTIONS connections, each of which must send its next request in HEAD_SECONDS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:  # those who ask for nothing make room
            others: Any = self.connections - {self}
            next((other for other in others if not other._is_asking), self).transport.abort()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # a request whose body is malformed gets no other answer
        with suppress(LocalProtocolError):  # it has one already
            super().send_400_response(msg)
        self.transport.close()


UVICORN_OPTIONS: dict[str, Any] = {
    "http": BoundedProtocol,
    "ws": "none",
    "backlog": 100,  # accepted at once, each of them a file, before the first is counted
    "log_level": "error",  # a malformed request is the sender's mistake and takes no line
    "server_header": False,
}


def launch(
    folders: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    open_wider: bool = False,
    public_url: str = "",
    token_file: Path | None = None,
    live: LiveOptions | None = None,
    first_view: str = "",
) -> None:
    """Serve the page until interrupted.

    Where others can reach it, through `open_wider`, `public_url` or a given `token_file`, visitors must log in.

    Args:
        folders: the runs, or folders of them.
        host: the address to listen on.
        port: to listen on.
        open_wider: says that `host` may be other than the loopback.
        public_url: where visitors reach the page through a proxy.
        token_file: holds the token; where one is needed and no file given, it is made and printed.
        live: of the live panel.
        first_view: the query of an address that has none.

    Raises UserError if `host` is not this machine's loopback and `open_wider` does not say so, if the token or the
    URL is unfit, if the port is taken, or if there is nothing to show.
    """
    if host not in ("127.0.0.1", "localhost", "::1") and not open_wider:
        raise UserError(f"--host {host} lets other machines in; say so with --open-wider if that is meant")
    token = read_token(token_file) if token_file else None
    fresh = secrets.token_urlsafe(24) if token is None and (open_wider or public_url) else None
    access = Access(token=token or fresh, open_wider=open_wider, public_url=public_url)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose a different --port") from None
    app = make_server(folders, access=access, live=live, first_view=first_view)
    threading.Thread(target=vega.scripts, daemon=True).start()  # bundled before somebody looks at a chart
    place = f"[{host}]" if ":" in host else host
    print(f"demo at {public_url or f'http://{place}:{port}'} (Ctrl-C ends it)", flush=True)
    if fresh:
        print(f"token: {fresh}", flush=True)
    uvicorn.run(app, host=host, port=port, **UVICORN_OPTIONS)
