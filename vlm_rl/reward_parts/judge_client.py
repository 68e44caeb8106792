"""One chat completion from an OpenAI-compatible endpoint, with limits of time and size.

What a server sends is hostile input: the whole reply has a time limit and MAX_BYTES, compressed replies are refused,
redirects are not followed, and no proxy or password of the environment is used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any

import httpx

MAX_BYTES = 2**20  # of a reply's body
_MAY_PASS = frozenset((408, 409, 425, 429))  # statuses of a server that is busy; those from 500 on too


class JudgeError(Exception):
    """Raised where a request fails; `may_pass` says whether another attempt makes sense."""

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply."""

    text: str  # may be empty
    prompt_tokens: int = 0  # as the server counts
    completion_tokens: int = 0


def make_client(*, key: str, concurrency: int, certificates: SSLContext) -> httpx.AsyncClient:
    """Return a client, a context manager. An empty key sends none. Loading certificates is slow: once is enough."""
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=concurrency)
    return httpx.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=False, verify=certificates)


async def complete(client: httpx.AsyncClient, url: str, body: Mapping[str, Any], *, timeout: float) -> Completion:
    """Ask for a chat completion. Raises JudgeError for whatever the server does instead of giving one.

    Args:
        client: from make_client.
        url: of the server, up to and including /v1.
        body: the request.
        timeout: seconds for everything, from the connection to the last byte.
    """
    content = json.dumps(body).encode()  # httpx would not encode half of a surrogate pair, which a response may hold
    try:
        async with (
            asyncio.timeout(timeout),
            client.stream("POST", f"{url.rstrip('/')}/chat/completions", content=content) as answer,
        ):
            data = await _read(answer)
    except TimeoutError:
        raise JudgeError(f"the judge did not reply within {timeout:g} s", may_pass=True) from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
        raise JudgeError(
            f"the connection failed: {_short(str(error)) or type(error).__name__}", may_pass=True
        ) from None
    if answer.status_code != 200:
        may_pass = answer.status_code in _MAY_PASS or answer.status_code >= 500
        raise JudgeError(f"the judge answered {answer.status_code}: {_error_text(data)}", may_pass=may_pass)
    kind = answer.headers.get("content-type", "")
    if "json" not in kind:
        raise JudgeError(f"the judge sent {_short(kind) or 'no content type'}, not application/json")
    return _completion(data)


async def _read(answer: httpx.Response) -> bytes:
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise JudgeError("the judge sent a compressed reply, which was not asked for")
    data = bytearray()
    async for chunk in answer.aiter_raw():
        data += chunk
        if len(data) > MAX_BYTES:
            raise JudgeError(f"the judge's reply is larger than {MAX_BYTES // 2**10} KiB")
    return bytes(data)


def _completion(data: bytes) -> Completion:
    try:
        tree = json.loads(data)
        text = tree["choices"][0]["message"]["content"]
        usage = tree.get("usage") or {}
        counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise JudgeError("the judge's reply is not a chat completion") from None
    prompt_tokens, completion_tokens = (n if type(n) is int and 0 <= n < 10**9 else 0 for n in counts)
    return Completion(text if isinstance(text, str) else "", prompt_tokens, completion_tokens)


def _error_text(data: bytes) -> str:
    """Return the message of an error of the protocol, or the beginning of the body."""
    try:
        error = json.loads(data)["error"]
        return _short(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, TypeError, KeyError, RecursionError):
        return _short(data[:2000].decode("utf-8", errors="replace"))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:200]}…"
