"""Send requests to one server with the OpenAI protocol, such as vLLM's.

    key = read_key("JUDGE_API_KEY", setting="--judge-key-env")
    endpoint = ChatEndpoint("http://127.0.0.1:8000/v1", key=key, timeouts=Timeouts(60.0))
    async with endpoint.connected() as http:
        completion = await endpoint.complete(http, body)

What a server sends is hostile input. A reply has limits of time and size, compressed replies are refused, redirects
are not followed, and no proxy or password of the environment is used. The key is masked in all that comes back.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import httpx

from vlm_rl.config import is_plain_address, is_variable_name
from vlm_rl.errors import UserError
from vlm_rl.types import Problem, group_by_marker, split_at_markers
from vlm_rl.untrusted.json_object import read_object

MAX_BYTES = 2**20  # of a reply that comes as one JSON object
_MAX_SHOWN = 300  # characters of the server's words in a message
_MAY_PASS = frozenset((408, 409, 425, 429))  # statuses of a server that is busy; those from 500 on too
_SHORTEST_SECRET = 6  # characters of a key: a shorter one is a placeholder, such as x or EMPTY
_REFUSALS = frozenset((400, 422))
_IMAGE_TYPES = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"RIFF", "webp"))


class EndpointError(Exception):
    """Raised where a request fails. The message is short and has no key; `status` is 0 where no whole reply came."""

    def __init__(self, reason: str, *, status: int = 200) -> None:
        super().__init__(reason)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Tell whether another attempt makes sense."""
        return self.status in _MAY_PASS or self.status >= 500 or not self.status

    @property
    def is_refusal(self) -> bool:
        """Tell whether the server does not take the request as it is, such as a parameter that it does not know."""
        return self.status in _REFUSALS


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; None is no limit of its own."""

    whole: float  # for everything, from the connection to the last byte
    connect: float | None = None
    pause: float | None = None  # between two pieces of a reply, the first included


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply."""

    text: str  # may be empty
    prompt_tokens: int = 0  # as the server counts
    completion_tokens: int = 0
    reasoning: str = ""  # that a server sends apart from the text
    finish: str = ""  # why it ended, in the server's words: "length" where it was cut off


def read_key(variable: str, *, setting: str) -> str:
    """Return the API key that an environment variable holds; "" for the variable "".

    Raises UserError, which never holds a key, where the variable is not set or no header may hold its value.

    Args:
        variable: its name.
        setting: what the user calls this name, for the message.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if re.fullmatch(r"[!-~]+", key):
        return key
    if not is_variable_name(variable):  # the key itself, perhaps
        raise UserError(f"{setting} must be the name of an environment variable, such as JUDGE_API_KEY")
    problem = "holds a space, a line end or a letter that no header may hold" if key else "is not set"
    raise UserError(f"{setting}: the environment variable {variable} {problem}: set it to the key")


def check_address(url: str, *, setting: str, key_setting: str) -> None:
    """Raise UserError if this is not a plain address; the message does not repeat it, since it may hold a key."""
    if not is_plain_address(url):
        raise UserError(
            f"{setting} is not a plain http(s) address such as http://127.0.0.1:8000/v1; a key goes into an "
            f"environment variable, see {key_setting}"
        )


def image_part(data: bytes) -> dict[str, Any]:
    """Return an image of a prepared set, a PNG, JPEG or WEBP, as a part of a message's content."""
    kind = next(name for start, name in _IMAGE_TYPES if data.startswith(start))
    address = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": address}}


def question_content(problem: Problem, *, suffix: str = "") -> list[dict[str, Any]]:
    """Return the content of the message that asks a problem: texts, with each marker's images or frames in its place.

    `suffix` is written after the question.
    """
    texts, _ = split_at_markers(problem.question, problem.videos)
    texts[-1] += suffix
    parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
    pictures = group_by_marker(problem.question, problem.images, problem.videos)
    for of_marker, text in zip(pictures, texts[1:], strict=True):
        parts += [*map(image_part, of_marker), {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


class ChatEndpoint:
    """One server. It holds no connection between two calls of `connected`."""

    def __init__(self, url: str, *, key: str = "", called: str = "the server", timeouts: Timeouts) -> None:
        """Read the certificates that are trusted, once for all connections.

        Args:
            url: of the server, up to and including /v1.
            key: the API key; "" sends none.
            called: what messages call the server.
            timeouts: of each request.
        """
        self.url, self.called, self.timeouts = url, called, timeouts
        self._key = key
        self._certificates = False if url.startswith("http:") else httpx.create_ssl_context()

    def connected(self, num_connections: int = 1) -> httpx.AsyncClient:
        """Return a client for the requests of one event loop, a context manager."""
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return httpx.AsyncClient(
            headers=headers,
            limits=httpx.Limits(max_connections=num_connections),
            timeout=httpx.Timeout(self.timeouts.pause, connect=self.timeouts.connect),
            trust_env=False,
            verify=self._certificates,
        )

    @asynccontextmanager
    async def answer(
        self, http: httpx.AsyncClient, path: str, body: Mapping[str, Any] | None, *, late: str = "did not reply"
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and yield the reply, whose body is still to be read.

        Args:
            http: from `connected`.
            path: below the server's address.
            body: of a POST; None makes a GET.
            late: what is said of the server once the whole time is over.

        Raises EndpointError for any status but 200, and for whatever happens until the caller has read the body.
        """
        # In ASCII: a model's response may hold half of a surrogate pair, which has no UTF-8.
        content = None if body is None else json.dumps(body).encode()
        request = ("GET" if body is None else "POST", f"{self.url.rstrip('/')}/{path}")
        limits = self.timeouts
        try:
            async with asyncio.timeout(limits.whole), http.stream(*request, content=content) as answer:
                status = answer.status_code
                is_packed = answer.headers.get("content-encoding", "identity") != "identity"
                if status != 200:
                    said = "" if is_packed else self.shown(error_text(await read(answer)))
                    raise EndpointError(f"{self.called} answered {status}: {said}", status=status)
                if is_packed:
                    raise EndpointError(f"{self.called} sent a compressed reply, which was not asked for")
                yield answer
        except TimeoutError:
            raise EndpointError(f"{self.called} {late} within {limits.whole:g} s", status=0) from None
        except httpx.ConnectTimeout:
            raise EndpointError(f"{self.called} did not connect for {limits.connect:g} s", status=0) from None
        except httpx.TimeoutException:
            raise EndpointError(f"{self.called} did not send anything for {limits.pause:g} s", status=0) from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            reason = self.shown(str(error)) or type(error).__name__
            raise EndpointError(f"the connection failed: {reason}", status=0) from None

    async def complete(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> Completion:
        """Return a chat completion. Raises EndpointError for whatever the server does instead of giving one."""
        data = await self._object(http, "chat/completions", body)
        try:
            tree = read_object(data)
            message, finish = tree["choices"][0]["message"], tree["choices"][0].get("finish_reason")
            text, reasoning = message["content"], message.get("reasoning_content") or message.get("reasoning")
            usage = tree.get("usage") or {}
            counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise EndpointError(f"{self.called}'s reply is not a chat completion") from None
        asked, made = (count if is_count(count) else 0 for count in counts)
        texts = [self.masked(part) if isinstance(part, str) else "" for part in (text, reasoning, finish)]
        return Completion(texts[0], asked, made, reasoning=texts[1], finish=texts[2])

    async def classify(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> Completion:
        """Return the probabilities that vLLM's /classify gives a chat, as numbers with spaces between them.

        Raises EndpointError for whatever the server does instead of giving some.
        """
        data = await self._object(http, "classify", body)
        try:
            values = read_object(data)["data"][0]["probs"]
            if not values or not all(type(value) in (int, float) and 0 <= value <= 1 for value in values):
                raise ValueError
        except (ValueError, TypeError, KeyError, IndexError):
            raise EndpointError(f"{self.called}'s reply holds no probabilities") from None
        return Completion(" ".join(map(repr, values)))

    async def _object(self, http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> bytes:
        """Return the bytes of a reply that says that it is JSON, and is not too large."""
        async with self.answer(http, path, body) as answer:
            data = await read(answer)
        if len(data) > MAX_BYTES:
            raise EndpointError(f"{self.called}'s reply is larger than {MAX_BYTES // 2**10} KiB")
        kind = answer.headers.get("content-type", "")
        if "json" not in kind:
            shown = self.shown(kind) or "no content type"
            raise EndpointError(f"{self.called} sent {shown}, not application/json")
        return data

    async def models(self, http: httpx.AsyncClient) -> list[str]:
        """Return the names of the models that the server lists; [] where it keeps no list.

        Raises EndpointError if no server answers.
        """
        try:
            async with self.answer(http, "models", None) as answer:
                tree = read_object(await read(answer))
            return [self.shown(str(model["id"])) for model in tree["data"]]
        except (ValueError, KeyError, TypeError):
            return []
        except EndpointError as error:
            if error.status:
                return []
            raise

    def model_named(self, name: str, *, setting: str) -> str:
        """Return the name of the model to ask, once the server has listed those that it has.

        Args:
            name: of the model; "" takes the only one that the server has.
            setting: what the user calls this name, for the messages.

        Raises UserError if no server answers, for a name that it does not list, and if it has several or none.
        """

        async def listed() -> list[str]:
            async with self.connected() as http:
                return await self.models(http)

        try:
            served = asyncio.run(listed())
        except EndpointError as error:
            raise UserError(f"{self.url}: no server answers ({error}); start it, or correct the address") from None
        if name and (name in served or not served):  # not every server lists its models
            return name
        shown = ", ".join(served[:8])
        if name:
            raise UserError(f"{setting} is {name!r}; {self.url} serves {shown}")
        if len(served) != 1:
            raise UserError(f"{setting} is missing; {self.url} serves {shown or 'no list of models'}")
        return served[0]

    def masked(self, text: str) -> str:
        """Return a text of the server's without the key, which it may send back. A placeholder for one stays."""
        return text.replace(self._key, "***") if len(self._key) >= _SHORTEST_SECRET else text

    def shown(self, text: str) -> str:
        """Return a text of the server's as a message may hold it: in one line, short, without the key."""
        text = " ".join(self.masked(text).split())
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


async def read(answer: httpx.Response) -> bytes:
    """Return the body of a reply; of one beyond MAX_BYTES only its beginning, which is longer than that."""
    data = bytearray()
    async for chunk in answer.aiter_raw():
        data += chunk
        if len(data) > MAX_BYTES:
            break
    return bytes(data)


def error_text(data: bytes) -> str:
    """Return the message inside an error of the protocol, or the text as it is."""
    try:
        return error_message(read_object(data)["error"])
    except (ValueError, KeyError):
        return data.decode("utf-8", errors="replace")


def error_message(error: Any) -> str:
    """Return the message of the field `error`, which is a text or an object with a message."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether this can be a number of tokens."""
    return type(value) is int and 0 <= value < 10**9
