"""Guard gradio: let through what the page needs, in the form in which the page sends it.

The page needs few of gradio's routes: its own assets, its configuration and the event queue. The guard answers
nothing else, so that file serving, uploads and proxying do not exist here, whatever the library adds. Bodies are read
here, in bounded size and time. What an event may hold is derived from the page: the number of its values, and texts
and numbers as their components send them. gradio gets what was checked, written again, so that no file data, which
gradio would read from disk or fetch, can reach it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import gradio as gr
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_rl.demo.files.export import MEDIA_TYPES
from vlm_rl.demo.web.access import LOGIN_PATH, Access
from vlm_rl.demo.web.uploads import MAX_BYTES, PICTURE_PATH
from vlm_rl.demo.web.view_changes import ViewChanges
from vlm_rl.report.html import script_hashes

BODY_SECONDS = 30.0  # for a whole body; 8 MiB come in that time at 2.2 Mbit/s
_MAX_BODY = 64 * 1024  # bytes; the page posts a few short strings, and a picture to a route of its own
_MAX_UPLOADS = 8  # pictures read at a time; others wait, so that half-sent ones cannot fill the memory
_MAX_UNCOLLECTED = 1_000  # messages of events that nobody has collected, over all pages: some 100 MB
_JOIN, _DATA = "/gradio_api/queue/join", "/gradio_api/queue/data"
_READ = re.compile(
    r"/|/(assets|static)/[\w./@-]+|/theme\.css|/config/?|/favicon\.ico|/manifest\.json"
    r"|/charts/(vega|loader)\.js"
    rf"|/export/({'|'.join(map(re.escape, MEDIA_TYPES))})"
    rf"|/gradio_api/(info/?|app_id/?|startup-events|heartbeat/\w+)|{_DATA}"
    rf"|{PICTURE_PATH}/[\w-]+"
)
_WITH_QUERY = re.compile(rf"/export/.*|{_DATA}|/gradio_api/info/?")
_INLINE_SCRIPT = re.compile(r"<script(?: data-gradio-mode)?>(.*?)</script>", re.DOTALL)
_TEMPLATE = Path(gr.__file__).parent / "templates" / "frontend" / "index.html"
_HEADERS = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # with no-referrer, a browser hides the origin of the login form
}


def content_policy(scripts: Sequence[str] = (), *, frame_ancestors: str = "'none'") -> str:
    """Return the Content-Security-Policy of gradio's page with these inline scripts.

    `frame_ancestors` are the pages that may show it in a frame.
    Its HTML component compiles its template with eval, and its components set styles on elements.
    """
    return (
        f"default-src 'none'; script-src 'self' 'unsafe-eval' {script_hashes(scripts)}; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; connect-src 'self'; "
        "manifest-src 'self'; base-uri 'self'; form-action 'none'; "
        f"frame-ancestors {frame_ancestors}; object-src 'none'"
    )


_Name: TypeAlias = Annotated[str, Field(pattern="^[0-9A-Za-z_-]{1,64}$")]


class _Body(BaseModel):
    """What the page posts; keys that have no name here are dropped."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Reset(_Body):
    event_id: _Name


class _Cancel(_Reset):
    session_hash: _Name
    fn_index: int


class _Event(_Body):
    session_hash: _Name
    # only the event of a changed view has one that is read
    event_data: Annotated[ViewChanges | None, Field(strict=False)] = None


def _events_of(page: gr.Blocks) -> TypeAdapter[_Event]:
    """Build the reader of the bodies of the page's events, which raises ValidationError for all else."""
    literal: Any = Literal  # these types are made here and now: no type checker can read them
    annotated: Any = Annotated
    values: Any = tuple
    models = [
        create_model(
            f"Event{index}",
            __base__=_Event,
            fn_index=(literal[index], ...),
            trigger_id=(literal[(None, *(block for block, _ in event.targets))], None),
            data=(values[tuple(map(_sent_by, event.inputs))], ...),
        )
        for index, event in page.fns.items()
        if event.fn is not None  # the others run in the page alone
    ]
    return TypeAdapter(annotated[reduce(or_, models), Field(discriminator="fn_index")])


def _sent_by(component: Any) -> Any:
    """Return the type of the values that a component sends."""
    if isinstance(component, gr.Number):
        return int | float | None
    if isinstance(component, gr.Dropdown):
        return list[str] | None if component.multiselect else str | int | None
    return str | None if isinstance(component, gr.Textbox) else str


class RequestGuard:
    """Refuse what the page does not send, ask for the token where one is needed, add the security headers."""

    def __init__(self, app: ASGIApp, page: gr.Blocks, access: Access) -> None:
        self._app = app
        self._bodies: dict[str, TypeAdapter[Any]] = {
            _JOIN: _events_of(page),
            "/gradio_api/cancel": TypeAdapter(_Cancel),
            "/gradio_api/reset": TypeAdapter(_Reset),
        }
        self._access = access
        self._waiting = page._queue.pending_messages_per_session
        self._uploads = asyncio.Semaphore(_MAX_UPLOADS)
        self._num_scripts = len(_INLINE_SCRIPT.findall(_TEMPLATE.read_text(encoding="utf-8")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                policy = content_policy(frame_ancestors=self._access.frame_ancestors)
                headers.setdefault("content-security-policy", policy)
                headers.update(_HEADERS)
            await send(message)

        request = Request(_without_proxy_headers(scope), receive)
        try:
            answer, body = await self._admit(request)
        except HTTPException as refusal:
            # its body may lie unread on the connection
            answer = PlainTextResponse(refusal.detail, refusal.status_code, headers={"connection": "close"})
            body = b""
        except ClientDisconnect:
            return
        await answer(request.scope, _replayed(body, receive), send_with_headers)

    async def _admit(self, request: Request) -> tuple[ASGIApp, bytes]:
        """Return the handler of a request, and the body that it gets. Raises HTTPException for a refusal."""
        path, is_post = request.scope["path"], request.method == "POST"
        self._access.check_origin(request)
        if is_post and path == LOGIN_PATH and self._access.asks_for_token:
            return self._access.log_in(request, await self._body(request)), b""
        if not self._access.is_open_to(request):
            return self._access.login_page(request), b""
        if is_post:
            is_known = path == PICTURE_PATH or path in self._bodies
        else:
            is_known = request.method in ("GET", "HEAD") and ".." not in path and _READ.fullmatch(path)
        if not is_known:
            raise HTTPException(404, "not found")
        if path == _DATA and request.query_params.get("session_hash") not in self._waiting:
            raise HTTPException(404, "no event of this page is waiting")
        if not _WITH_QUERY.fullmatch(path):
            request.scope["query_string"] = b""  # the page's script reads the view from it, gradio must not
        body = await self._body(request) if is_post else b""
        if path in self._bodies:
            body = _rewritten(body, self._bodies[path])
        if path == _JOIN:
            self._drop_uncollected()
        return self._page if path == "/" else self._app, body

    def _drop_uncollected(self) -> None:
        """Forget the oldest results beyond _MAX_UNCOLLECTED: clients that never read theirs must not fill memory."""
        excess = sum(messages.qsize() for messages in self._waiting.values()) - _MAX_UNCOLLECTED
        for messages in list(self._waiting.values()):
            for _ in range(min(excess, messages.qsize())):
                messages.get_nowait()
                excess -= 1

    async def _body(self, request: Request) -> bytes:
        """Read a whole body. Raises HTTPException if it is too large or too slow."""
        is_picture = request.scope["path"] == PICTURE_PATH
        length = request.headers.get("content-length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > (MAX_BYTES if is_picture else _MAX_BODY):
            raise HTTPException(413, "too large")
        try:
            async with asyncio.timeout(BODY_SECONDS), self._uploads if is_picture else nullcontext():
                return await request.body()
        except TimeoutError:
            raise HTTPException(408, "the body took too long") from None

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send gradio's page with a policy that allows its own inline scripts alone."""
        headers = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        start: Message = {}
        html = b""

        async def keep(message: Message) -> None:
            nonlocal start, html
            start = start or message
            html += message.get("body", b"")

        await self._app({**scope, "headers": headers}, receive, keep)
        scripts = _INLINE_SCRIPT.findall(html.decode())
        if len(scripts) == self._num_scripts:  # a script that a run smuggled in would add one
            policy = content_policy(scripts, frame_ancestors=self._access.frame_ancestors)
            MutableHeaders(scope=start)["content-security-policy"] = policy
        await send(start)
        await send({"type": "http.response.body", "body": html})


def _rewritten(body: bytes, kind: TypeAdapter[Any]) -> bytes:
    """Read a body and write it again. Raises HTTPException for one that the page does not send."""
    try:
        return kind.dump_json(kind.validate_json(body))
    except ValidationError:
        raise HTTPException(422, "not what this page sends") from None


def _without_proxy_headers(scope: Scope) -> Scope:
    """Return the scope without the headers that could make gradio believe it has a different address."""
    return {**scope, "headers": [(name, value) for name, value in scope["headers"] if not name.startswith(b"x-")]}


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read already, and then what the connection brings."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
