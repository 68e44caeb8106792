"""Many requests to one OpenAI-compatible endpoint: side by side, tried again, kept on the disk and counted.

    endpoint = JudgeEndpoint("http://127.0.0.1:8000/v1", cache=Path("judge_cache"), key_env="JUDGE_API_KEY")
    replies = endpoint.ask(texts, body_of=request_of)

Whatever the endpoint does, each request gets a reply or the reason why it has none, within
(retries + 1) * timeout and the pauses between attempts. Where `concurrency` requests in a row have failed, the others
of the batch are not sent.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from vlm_rl.errors import UserError
from vlm_rl.reward_parts.judge_cache import ReplyCache, key_of
from vlm_rl.reward_parts.judge_client import Completion, JudgeError, complete, make_client

_LONGEST_PAUSE = 30.0  # seconds between two attempts
_WAIT_SECONDS = 0.1  # between two looks at whether the run is stopped
_MIN_FAILURES = 3  # in a row before the rest of a batch is given up

T = TypeVar("T")

COSTS: tuple[str, ...] = ("requests", "cached", "prompt_tokens", "completion_tokens")


@dataclass(slots=True)
class JudgeReply:
    """What came back for one request, and what that took."""

    text: str | None = None
    failure: str = ""  # why there is no text; empty where the batch was stopped before
    cost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COSTS, 0))


class JudgeEndpoint:
    """A server to ask. It holds no connection between batches."""

    def __init__(
        self,
        url: str,
        *,
        cache: Path,
        key_env: str = "",
        key_setting: str = "--judge-key-env",
        concurrency: int = 16,
        timeout: float = 60.0,
        retries: int = 3,
        tokens_setting: str = "the judge's token limit",
    ) -> None:
        """Read the API key.

        Args:
            url: of the server, up to and including /v1.
            cache: folder of replies that are not asked for again.
            key_env: the environment variable that holds the API key; "" sends none.
            key_setting: what the user calls `key_env`, for the message.
            concurrency: requests at the same time.
            timeout: seconds for a whole reply.
            retries: further attempts after a failure that may pass.
            tokens_setting: what the user calls the limit of a reply's tokens, for the message.

        Raises UserError for a key that is missing or that no header may hold.
        """
        self.url = url
        self._key = _read_key(key_env, key_setting)
        self._cache = ReplyCache(cache)
        self._concurrency, self._timeout, self._retries = concurrency, timeout, retries
        self._tokens_setting = tokens_setting
        self._certificates = httpx.create_ssl_context()
        self._is_aborted = False

    def ask(
        self,
        items: Sequence[T],
        *,
        body_of: Callable[[T], dict[str, Any]],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[JudgeReply]:
        """Return a reply for each item, in order. Once `is_stopped` says so, the missing ones stay empty.

        Args:
            items: what is asked about.
            body_of: makes the request of an item, as the protocol of chat completions writes it. It is called when
                the request is sent, since a body may hold images.
            is_stopped: asked while waiting.

        Raises OSError where the cache cannot be written.
        """
        replies = [JudgeReply() for _ in items]
        batch = _Batch((body_of(item), reply) for item, reply in zip(items, replies, strict=True))
        asyncio.run(self._ask_all(batch, min(self._concurrency, len(items)), is_stopped))
        return replies

    def models(self) -> list[str]:
        """Return the names of the models that the server lists; [] where it keeps no list.

        Raises UserError where no server answers.
        """
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            answer = httpx.get(
                f"{self.url.rstrip('/')}/models",
                headers=headers,
                timeout=self._timeout,
                trust_env=False,
                verify=self._certificates,
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            reason = self._masked(str(error)) or type(error).__name__
            raise UserError(f"{self.url}: no server answers ({reason}); start it, or correct the address") from None
        try:
            return [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return []

    def abort(self) -> None:
        """Ask no further; `ask` in another thread ends."""
        self._is_aborted = True

    async def _ask_all(self, batch: _Batch, num_workers: int, is_stopped: Callable[[], bool]) -> None:
        async with make_client(
            key=self._key, concurrency=self._concurrency, certificates=self._certificates
        ) as client:
            workers = {asyncio.create_task(self._work(client, batch)) for _ in range(num_workers)}
            while workers and not (self._is_aborted or is_stopped()):
                done, workers = await asyncio.wait(workers, timeout=_WAIT_SECONDS)
                for worker in done:
                    worker.result()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, client: httpx.AsyncClient, batch: _Batch) -> None:
        """Take requests from the batch until none is left."""
        for body, reply in batch.left:
            if batch.failures >= max(_MIN_FAILURES, self._concurrency):
                reply.failure = f"the judge was not asked: {batch.failures} requests in a row had failed"
                continue
            try:
                reply.text = await self._answer(client, body, reply.cost, batch)
                batch.failures = 0
            except JudgeError as error:
                reply.failure = self._masked(str(error))
                batch.failures += 1

    async def _answer(
        self, client: httpx.AsyncClient, body: dict[str, Any], cost: dict[str, int], batch: _Batch
    ) -> str:
        key = key_of(self.url, body)
        async with batch.locks[key]:  # of equal requests, one is sent
            text = self._cache.get(key)
            if text is not None:
                cost["cached"] = 1
                return text
            completion = await self._complete(client, body, cost)
            cost.update(prompt_tokens=completion.prompt_tokens, completion_tokens=completion.completion_tokens)
            if not completion.text.strip():
                raise JudgeError(
                    f"the judge's reply holds no text; a reasoning model may need more {self._tokens_setting}"
                )
            text = self._masked(completion.text)  # a hostile server may send the key back
            self._cache.put(key, text)
            return text

    async def _complete(self, client: httpx.AsyncClient, body: dict[str, Any], cost: dict[str, int]) -> Completion:
        for attempt in range(self._retries + 1):
            cost["requests"] += 1
            try:
                return await complete(client, self.url, body, timeout=self._timeout)
            except JudgeError as error:
                if not error.may_pass or attempt == self._retries:
                    raise
            # Spread, so that requests that failed together do not come back together.
            await asyncio.sleep(min(_LONGEST_PAUSE, 2.0**attempt) * random.SystemRandom().uniform(0.5, 1.0))
        raise AssertionError

    def _masked(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


@dataclass(slots=True)
class _Batch:
    """What the workers of one batch share."""

    left: Iterator[tuple[dict[str, Any], JudgeReply]]
    failures: int = 0  # in a row
    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))


def _read_key(variable: str, setting: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not re.fullmatch(r"[!-~]+", key):
        problem = "holds a space, a line end or a letter that no header may hold" if key else "is not set"
        raise UserError(f"{setting}: the environment variable {variable} {problem}: set it to the key")
    return key
