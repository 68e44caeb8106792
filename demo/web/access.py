"""Decide who may ask: by the Host and the Origin of a request and, where others can reach the demo, by a token.

On loopback everybody on this machine may ask. The Host must then name this machine, since a foreign name that
resolves to it would be a rebinding attack. With `open_wider` or a public URL a visitor logs in with the token once
and gets a cookie; a program sends `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
import time
from collections import deque
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from vlm_rl.demo.web.rendering import render
from vlm_rl.errors import UserError
from vlm_rl.untrusted.plain_files import read_small

LOGIN_PATH = "/login"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOCAL_PAGES = "http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:*"
_TOKEN = re.compile(r"[!-~]{16,1000}")
_LOGIN_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_MAX_WRONG = 10  # wrong tokens within _WRONG_SECONDS, from everybody together
_WRONG_SECONDS = 60.0


class Access:
    """Who may ask for what.

    Args:
        token: what a visitor must know; None lets in everybody who can reach the demo.
        open_wider: whether IP addresses and the machine's own names count as hosts, besides loopback.
        public_url: the address at which a reverse proxy offers the demo.
        allows_local_frames: whether pages of this machine's loopback, such as a notebook, may show the demo in a
            frame.

    Attributes:
        frame_ancestors: the pages that may show it in a frame, as its policy says it.

    Raises UserError for an invalid URL, and if others would be let in without a token.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        open_wider: bool = False,
        public_url: str = "",
        allows_local_frames: bool = False,
    ) -> None:
        self._public = _split(public_url)
        self.public_url = public_url.rstrip("/")
        if token is None and (open_wider or public_url):
            raise UserError("a demo that others can reach needs a token")
        self._token = token
        self._allows_local_frames = allows_local_frames
        self.frame_ancestors = _LOCAL_PAGES if allows_local_frames else "'none'"
        self._open_wider = open_wider
        self._own_names = (socket.gethostname().lower(), socket.getfqdn().lower()) if open_wider else ()
        self._session = secrets.token_urlsafe(32)  # the cookie's value: the token itself is not stored in browsers
        self._wrong: deque[float] = deque(maxlen=_MAX_WRONG)  # when

    def check_origin(self, request: Request) -> None:
        """Raise HTTPException if the Host does not name this machine, or a different site's page asks.

        A GET of an image or a script has no Origin: there the browser says by Sec-Fetch-Site whose page asks. A link
        may be followed from anywhere: it opens a page of its own. Whose frame may show one, the policy says.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self.host_allowed(host):
            raise HTTPException(403, "unknown host")
        public = f"{self._public.scheme}://{self._public.netloc}"  # "://" without one, which no browser sends
        if origin not in (None, f"http://{host}", f"https://{host}", public):
            raise HTTPException(403, "foreign origin")
        asks = request.headers.get
        opened = ("document", "iframe") if self._allows_local_frames else ("document",)
        follows_link = asks("sec-fetch-mode") == "navigate" and asks("sec-fetch-dest") in opened
        if asks("sec-fetch-site") in ("cross-site", "same-site") and not (follows_link and request.method == "GET"):
            raise HTTPException(403, "foreign site")

    def host_allowed(self, host: str) -> bool:
        """Say whether a Host header names this machine, or the proxy's address."""
        if self.public_url and host.lower() == self._public.netloc.lower():
            return True
        try:
            parts = urlsplit(f"//{host}")
            name, _ = parts.hostname or "", parts.port
        except ValueError:
            return False
        if name in _LOOPBACK:
            return True
        if not self._open_wider:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._own_names
        return True

    @property
    def asks_for_token(self) -> bool:
        """Say whether a visitor must log in."""
        return self._token is not None

    def is_open_to(self, request: Request) -> bool:
        """Say whether the request comes from somebody who has logged in. Raises HTTPException as `_is_token` does."""
        if self._token is None:
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._is_token(token)
        cookie = request.cookies.get(_cookie_name(request), "")
        return hmac.compare_digest(cookie.encode(), self._session.encode())

    def login_page(self, request: Request, *, note: str = "") -> Response:
        """Return the page that asks for the token, with status 401."""
        if request.url.path not in ("/", LOGIN_PATH):
            raise HTTPException(401, "log in at the demo's page, or send Authorization: Bearer TOKEN")
        page = render("login", query=request.url.query, note=note)
        return HTMLResponse(page, 401, headers={"content-security-policy": _LOGIN_POLICY})

    def log_in(self, request: Request, body: bytes) -> Response:
        """Answer a sent form: the requested view with a cookie, or the login page again."""
        try:
            given = parse_qs(body.decode(), max_num_fields=1).get("token", [""])[0]
        except ValueError:
            given = ""
        if not self._is_token(given.strip()):
            return self.login_page(request, note="That is not the token.")
        response = RedirectResponse(f"./?{request.url.query}", 303)
        response.set_cookie(
            _cookie_name(request),
            self._session,
            path=self._public.path.rstrip("/") or "/",
            secure="https" in (request.url.scheme, self._public.scheme),
            httponly=True,
            samesite="strict",
        )
        return response

    def _is_token(self, given: str) -> bool:
        """Compare in constant time. Raises HTTPException for one more wrong token after too many.

        The right one is let in at any time: nobody may lock its owner out, and 16 characters are not guessed.
        """
        assert self._token is not None
        if hmac.compare_digest(given.encode(), self._token.encode()):
            return True
        now = time.monotonic()
        if len(self._wrong) == _MAX_WRONG and now - self._wrong[0] < _WRONG_SECONDS:
            raise HTTPException(429, "too many wrong tokens: wait a minute")
        self._wrong.append(now)
        return False


def read_token(path: Path) -> str:
    """Return the token in a file. Raises UserError if it cannot be read or is easy to guess."""
    try:
        token = read_small(path).strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--token-file {path} cannot be read as ASCII text: {error}") from None
    if not _TOKEN.fullmatch(token):
        raise UserError(
            f"--token-file {path} must hold 16 to 1000 printable characters without blanks; "
            "make one with: openssl rand -base64 24"
        )
    return token


def _split(public_url: str) -> SplitResult:
    try:
        parts = urlsplit(public_url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
    except ValueError:
        is_url = False
    if public_url and not is_url:
        raise UserError(f"--public-url {public_url!r} is not an address such as https://example.org/demo")
    return urlsplit(public_url)


def _cookie_name(request: Request) -> str:
    """Return a name of this demo's own: cookies are shared by all ports of a host."""
    return "vlm-rl-demo-" + re.sub(r"\W", "-", request.headers.get("host", "").lower(), flags=re.ASCII)
