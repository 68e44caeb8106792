"""Ask a teacher's servers for its log-probs of responses. What one does not answer, another is asked for."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import alive
from vlm_rl.samplers.remote.client import (
    ResponseScores,
    ServerError,
    ask_info,
    ask_scores,
    connected,
    media_mismatch,
)
from vlm_rl.samplers.remote.fleet import SILENCE, ServersGoneError
from vlm_rl.samplers.remote.server_token import read_token
from vlm_rl.types import Prompt

_SIDE_BY_SIDE = 4  # groups that one rank has asked a server for
_LOOK = 5.0  # seconds between two looks whether a server that scores is there


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """Responses to one prompt, whose tokens are to be scored."""

    prompt: Prompt
    responses: Sequence[np.ndarray]  # ids


class ScoringServers:
    """The servers of a teacher, which is frozen: any of them may answer any request."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        token_file: Path,
        timeout: float,
        model_sha256: str,
        builder: PromptBuilder,
        max_model_len: int,
        is_stopped: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        """Read the token; no server is asked.

        Args:
            servers: their addresses.
            token_file: the file with their token.
            timeout: seconds without any server, after which the run is to end.
            model_sha256: of the teacher's config.json.
            builder: the prompt builder of the learner's model.
            max_model_len: tokens that a server must at least take.
            is_stopped: tells whether the run is to end.
            note: prints a line.

        Raises UserError if there is no token.
        """
        self.servers, self.token = [url.rstrip("/") for url in servers], read_token(token_file)
        self.timeout, self._max_model_len = timeout, max_model_len
        self._model_sha256, self._builder = model_sha256, builder
        self._is_stopped, self._note = is_stopped, note
        self._said: dict[str, str] = {}

    def scores(self, requests: Sequence[ScoreRequest], *, top_k: int) -> list[list[ResponseScores]]:
        """Return the scores of each request's responses, in order.

        Args:
            requests: the prompts and their responses.
            top_k: how many of the most likely ids are wanted of each token.

        Raises ServersGoneError if no server has answered for the timeout, or the run is to end.
        """
        found: dict[int, list[ResponseScores]] = {}
        waiting, last = deque(range(len(requests))), time.monotonic()
        while waiting:
            before = len(found)
            asyncio.run(self._round(requests, waiting, found, top_k))
            now = time.monotonic()
            last = now if len(found) > before else last
            if waiting and (self._is_stopped() or now - last >= self.timeout):
                raise ServersGoneError(
                    f"no server of the teacher has answered for {now - last:.0f} s: {', '.join(self.servers)}: start "
                    "servers with `vlm-rl serve`, then resume"
                )
            if waiting:
                time.sleep(min(1.0, self.timeout / 10))
        return [found[index] for index in range(len(requests))]

    async def _round(
        self,
        requests: Sequence[ScoreRequest],
        waiting: deque[int],
        found: dict[int, list[ResponseScores]],
        top_k: int,
    ) -> None:
        """Ask each server until it fails, nothing waits or all is found. What failed waits again."""
        is_complete = asyncio.Event()

        async def work(client: httpx.AsyncClient) -> None:
            while waiting:
                index = waiting.popleft()
                request = requests[index]
                try:
                    found[index] = await ask_scores(client, request.prompt, request.responses, top_k=top_k)
                except BaseException:
                    waiting.append(index)
                    raise
                alive()
                if len(found) == len(requests):
                    is_complete.set()

        async def look(client: httpx.AsyncClient) -> None:
            if problem := self._mismatch(await ask_info(client, seconds=SILENCE)):
                raise ServerError(problem)

        async def look_after(client: httpx.AsyncClient) -> None:
            while True:
                await asyncio.sleep(_LOOK)
                await look(client)

        async def serve(url: str) -> None:
            try:
                async with connected(url, self.token) as client, asyncio.TaskGroup() as group:
                    await look(client)
                    looking = group.create_task(look_after(client))  # a server that hangs never answers
                    await asyncio.gather(*(group.create_task(work(client)) for _ in range(_SIDE_BY_SIDE)))
                    looking.cancel()
            except* ServerError as errors:
                self._say(url, str(errors.exceptions[0]))

        serving, complete = asyncio.gather(*map(serve, self.servers)), asyncio.create_task(is_complete.wait())
        await asyncio.wait({serving, complete}, return_when=asyncio.FIRST_COMPLETED)
        complete.cancel()
        serving.cancel()  # one that hangs is still being looked for
        with suppress(asyncio.CancelledError):
            await serving

    def _mismatch(self, info: Mapping[str, Any]) -> str | None:
        """Return how a server differs from what scores, or None."""
        if info.get("model") != self._model_sha256:
            return f"it serves a model other than the teacher, whose config.json has the digest {self._model_sha256}"
        if fault := media_mismatch(info, self._builder):
            return fault
        if not isinstance(length := info.get("max_model_len"), int) or length < self._max_model_len:
            return (
                f"it takes {length} tokens, and the longest prompt and response with one more are "
                f"{self._max_model_len}: serve a configuration with a larger rollout.max_tokens"
            )
        return None

    def _say(self, url: str, text: str) -> None:
        if self._said.get(url) != text:
            self._said[url] = text
            self._note(f"teacher's server {url}: {text}")
