"""Send many requests to one endpoint: side by side, tried again, kept on the disk and counted.

    batch = BatchClient(endpoint, cache=Path("judge_cache"))
    replies = batch.ask(texts, body_of=request_of)

Whatever the endpoint does, each request gets a reply or the reason why it has none, within
(retries + 1) * timeout and the pauses between attempts. Where `concurrency` requests in a row have failed, the others
of the batch are not sent.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from vlm_rl.chat_endpoint.cache import ReplyCache, key_of
from vlm_rl.chat_endpoint.client import ChatEndpoint, Completion, EndpointError

_LONGEST_PAUSE = 30.0  # seconds between two attempts
_WAIT_SECONDS = 0.1  # between two looks at whether the run is stopped
_MIN_FAILURES = 3  # in a row before the rest of a batch is given up

T = TypeVar("T")

COSTS: tuple[str, ...] = ("requests", "cached", "prompt_tokens", "completion_tokens")


@dataclass(slots=True)
class BatchReply:
    """What came back for one request, and what that took."""

    completion: Completion | None = None
    failure: str = ""  # why there is none; empty if the batch was stopped before
    cost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COSTS, 0))

    @property
    def text(self) -> str | None:
        """Return the reply's text; None without a reply."""
        return None if self.completion is None else self.completion.text


class BatchClient:
    """Asks one endpoint many things. It holds no connection between batches."""

    def __init__(
        self,
        endpoint: ChatEndpoint,
        *,
        cache: Path,
        concurrency: int = 16,
        retries: int = 3,
        tokens_setting: str = "the judge's token limit",
        takes_cut: bool = False,
        send: Callable[[httpx.AsyncClient, dict[str, Any]], Awaitable[Completion]] | None = None,
    ) -> None:
        """Take the settings.

        Args:
            endpoint: to ask.
            cache: folder of replies that are not asked for again.
            concurrency: requests at the same time.
            retries: further attempts after a failure that may pass.
            tokens_setting: what the user calls the limit of a reply's tokens, for the message.
            takes_cut: whether a reply may hold no text where the limit of its tokens ended it.
            send: the method of the endpoint that sends a request; None asks for chat completions.
        """
        self.endpoint = endpoint
        self._cache = ReplyCache(cache)
        self._concurrency, self._retries = concurrency, retries
        self._tokens_setting, self._takes_cut = tokens_setting, takes_cut
        self._send = send or endpoint.complete
        self._is_aborted = False

    def ask(
        self,
        items: Sequence[T],
        *,
        body_of: Callable[[T], dict[str, Any]],
        apart_of: Callable[[T], str] = lambda item: "",
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list[BatchReply]:
        """Return a reply for each item, in order. Once `is_stopped` says so, the missing ones stay empty.

        Args:
            items: what is asked about.
            body_of: makes the request of an item, as the protocol of chat completions writes it. It is called when
                the request is sent, since a body may hold images.
            apart_of: makes a text of an item; equal requests with different texts are each sent.
            is_stopped: asked while waiting.

        Raises OSError if the cache cannot be written.
        """
        replies = [BatchReply() for _ in items]
        pairs = zip(items, replies, strict=True)
        batch = _Batch((body_of(item), apart_of(item), reply) for item, reply in pairs)
        asyncio.run(self._ask_all(batch, min(self._concurrency, len(items)), is_stopped))
        return replies

    def abort(self) -> None:
        """Ask no further; `ask` in another thread ends."""
        self._is_aborted = True

    async def _ask_all(self, batch: _Batch, num_workers: int, is_stopped: Callable[[], bool]) -> None:
        async with self.endpoint.connected(self._concurrency) as http:
            workers = {asyncio.create_task(self._work(http, batch)) for _ in range(num_workers)}
            while workers and not (self._is_aborted or is_stopped()):
                done, workers = await asyncio.wait(workers, timeout=_WAIT_SECONDS)
                for worker in done:
                    worker.result()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, http: httpx.AsyncClient, batch: _Batch) -> None:
        """Take requests from the batch until none is left."""
        for body, apart, reply in batch.left:
            if batch.failures >= max(_MIN_FAILURES, self._concurrency):
                asked = f"{self.endpoint.called} was not asked"
                reply.failure = f"{asked}: {batch.failures} requests in a row had failed"
                continue
            try:
                key = key_of(self.endpoint.url, body, apart)
                reply.completion = await self._answer(http, key, body, reply.cost, batch)
                batch.failures = 0
            except EndpointError as error:
                reply.failure = str(error)
                batch.failures += 1

    async def _answer(
        self, http: httpx.AsyncClient, key: str, body: dict[str, Any], cost: dict[str, int], batch: _Batch
    ) -> Completion:
        async with batch.locks[key]:  # of equal requests, one is sent
            if (kept := self._cache.get(key)) is not None:
                cost["cached"] = 1
                return kept
            completion = await self._complete(http, body, cost)
            cost.update(prompt_tokens=completion.prompt_tokens, completion_tokens=completion.completion_tokens)
            if not completion.text.strip() and not (self._takes_cut and completion.finish == "length"):
                empty = f"{self.endpoint.called}'s reply holds no text"
                raise EndpointError(f"{empty}; a reasoning model may need more {self._tokens_setting}")
            self._cache.put(key, completion)
            return completion

    async def _complete(self, http: httpx.AsyncClient, body: dict[str, Any], cost: dict[str, int]) -> Completion:
        for attempt in range(self._retries + 1):
            cost["requests"] += 1
            try:
                return await self._send(http, body)
            except EndpointError as error:
                if not error.may_pass or attempt == self._retries:
                    raise
            # Spread, so that requests that failed together do not come back together.
            await asyncio.sleep(min(_LONGEST_PAUSE, 2.0**attempt) * random.SystemRandom().uniform(0.5, 1.0))
        raise AssertionError


@dataclass(slots=True)
class _Batch:
    """What the workers of one batch share."""

    left: Iterator[tuple[dict[str, Any], str, BatchReply]]
    failures: int = 0  # in a row
    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
