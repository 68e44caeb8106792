"""Ask servers with the OpenAI protocol that the operator named at start; the page only chooses among their names.

    vlm-rl demo runs/a --endpoint teacher=http://127.0.0.1:8000/v1,Qwen2.5-VL-7B --endpoint-key teacher=TEACHER_KEY

A server's reply is hostile input: its size, its pauses and its whole duration are limited, redirects are not
followed, compressed replies are refused, and the key is masked in every message.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from vlm_rl.config import is_plain_address
from vlm_rl.demo.chat_protocol import EndpointError, ReplyReader, beginning, body_of, error_text, events
from vlm_rl.demo.replies import AskSettings, IsCancelled, LiveQuestion, Replies, Reply
from vlm_rl.errors import UserError

PUBLISH_SECONDS = 0.1
_NAME = re.compile(r"[\w][\w .:-]{0,39}")
_UNUSUAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # vLLM's names; they undo a generation_config

States: TypeAlias = "queue.SimpleQueue[Reply | None]"  # None follows the last one


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds."""

    connect: float = 5.0
    pause: float = 60.0  # between two pieces of a reply, the first included
    whole: float = 600.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server as the operator named it."""

    name: str
    url: str  # up to and including /v1
    model: str  # "": the server's only one
    key: str = field(default="", repr=False)


def parse_endpoints(words: Sequence[str], keys: Sequence[str] = ()) -> list[Endpoint]:
    """Read options of the form NAME=URL[,model]; `keys` are NAME=VARIABLE, the environment variables of their keys.

    Raises UserError that names the option at fault.
    """
    variables = dict(_pair(word, "--endpoint-key", "NAME=VARIABLE") for word in keys)
    endpoints: dict[str, Endpoint] = {}
    for word in words:
        name, rest = _pair(word, "--endpoint", "NAME=URL[,model]")
        url, _, model = rest.partition(",")
        if not is_plain_address(url):
            raise UserError(
                f"--endpoint {word}: {url!r} is not a plain http(s) address such as http://127.0.0.1:8000/v1; "
                "a key goes into an environment variable, see --endpoint-key"
            )
        if not _NAME.fullmatch(name) or name in endpoints:
            raise UserError(f"--endpoint {word}: the name {name!r} is taken or not made of letters, digits and . : -")
        endpoints[name] = Endpoint(name, url.rstrip("/"), model, _key(name, variables))
    if unknown := sorted(set(variables) - set(endpoints)):
        raise UserError(f"--endpoint-key {unknown[0]}=...: there is no --endpoint of this name")
    return list(endpoints.values())


def _pair(word: str, option: str, form: str) -> tuple[str, str]:
    name, equals, rest = word.partition("=")
    if not equals or not name or not rest:
        raise UserError(f"{option} {word}: it must have the form {form}")
    return name, rest


def _key(name: str, variables: Mapping[str, str]) -> str:
    variable = variables.get(name)
    if variable is None:
        return ""
    if not os.environ.get(variable):
        raise UserError(f"--endpoint-key {name}={variable}: the environment variable {variable} is not set")
    return os.environ[variable]


class EndpointBackend:
    """A Backend (demo/replies.py): one streamed chat completion."""

    def __init__(self, endpoint: Endpoint, *, system: str, timeouts: Timeouts | None = None) -> None:
        """Take the system prompt that the checkpoints beside it are asked with."""
        self.name, self.template = endpoint.name, "plain"  # a model of others may know no tags
        self._endpoint, self._system, self._timeouts = endpoint, system, timeouts or Timeouts()

    def ask(self, question: LiveQuestion, settings: AskSettings, *, is_cancelled: IsCancelled) -> Replies:
        """See Backend.ask. The connection has its own event loop, in which any wait can be broken off."""
        yield Reply("loading")
        states: States = queue.SimpleQueue()
        left = threading.Event()

        def stop() -> bool:
            return left.is_set() or is_cancelled()

        def run() -> None:
            try:
                asyncio.run(self._guarded(question, settings, stop, states))
            finally:
                states.put(None)  # whatever fails, the column does not wait

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            while (state := states.get()) is not None:
                yield state
        finally:
            left.set()
            thread.join()

    async def _guarded(
        self, question: LiveQuestion, settings: AskSettings, stop: IsCancelled, states: States
    ) -> None:
        """Stream until the end, `stop` or the deadline; the last state says which."""
        reader = ReplyReader()
        task = asyncio.create_task(self._stream(question, settings, reader, states))
        deadline = time.monotonic() + self._timeouts.whole
        problem = ""
        try:
            while not task.done() and not stop() and time.monotonic() < deadline:
                await asyncio.wait([task], timeout=0.05)
            if not task.done():
                task.cancel()
                if not stop():
                    problem = f"the server has not finished within {self._timeouts.whole:.0f} s"
            with suppress(asyncio.CancelledError):
                await task
        except EndpointError as error:
            problem = str(error)
        except httpx.TimeoutException as error:
            what = "connect" if isinstance(error, httpx.ConnectTimeout) else "send anything"
            limit = self._timeouts.connect if what == "connect" else self._timeouts.pause
            problem = f"the server did not {what} for {limit:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            problem = f"the connection failed: {error or type(error).__name__}"
        except Exception as error:  # no reply, however odd, may leave the column waiting
            problem = f"the reply cannot be read: {type(error).__name__}"
        if problem:
            states.put(reader.state(stop="", failure=self._masked(problem)))
        else:
            states.put(reader.state(stop="cancelled" if task.cancelled() else reader.stop or "stop"))

    async def _stream(
        self, question: LiveQuestion, settings: AskSettings, reader: ReplyReader, states: States
    ) -> None:
        limits = httpx.Timeout(self._timeouts.pause, connect=self._timeouts.connect)
        headers = {"Accept-Encoding": "identity"}
        if self._endpoint.key:
            headers["Authorization"] = f"Bearer {self._endpoint.key}"
        # trust_env: no proxy, and no password of a .netrc, that the operator did not name here
        async with httpx.AsyncClient(timeout=limits, headers=headers, trust_env=False) as client:
            model = self._endpoint.model or await self._only_model(client)
            body = body_of(question, settings, model=model, system=self._system)
            if await self._try(client, {**body, **_UNUSUAL}, reader, states):
                return
            reader.note = "with the server's own top-k and repetition penalty, which it does not let a client set"
            if not await self._try(client, body, reader, states):
                raise EndpointError(reader.refusal)

    async def _try(
        self,
        client: httpx.AsyncClient,
        body: dict[str, Any],
        reader: ReplyReader,
        states: States,
    ) -> bool:
        """Return False where the server refuses the request as such; `reader.refusal` says why."""
        async with client.stream("POST", f"{self._endpoint.url}/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                reader.refusal = f"the server answered {answer.status_code}: {error_text(await beginning(answer))}"
                if answer.status_code in (400, 422):
                    return False
                raise EndpointError(reader.refusal)
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise EndpointError("the server sent a compressed reply, which was not asked for")
            published = 0.0
            async for event in events(answer):
                reader.add(event)
                if time.monotonic() - published > PUBLISH_SECONDS:
                    states.put(reader.state(stop=""))
                    published = time.monotonic()
            if not reader.stop:
                raise EndpointError("the connection ended in the middle of the reply")
        return True

    async def _only_model(self, client: httpx.AsyncClient) -> str:
        async with client.stream("GET", f"{self._endpoint.url}/models") as answer:
            text = await beginning(answer, characters=100_000)
        try:
            names = [str(entry["id"]) for entry in json.loads(text)["data"]]
        except (ValueError, TypeError, KeyError):
            names = []
        if len(names) != 1:
            raise EndpointError(
                f"the server does not name one model ({len(names)} listed): say which with --endpoint "
                f"{self.name}=URL,model"
            )
        return names[0]

    def _masked(self, text: str) -> str:
        key = self._endpoint.key
        return text.replace(key, "***") if key else text
