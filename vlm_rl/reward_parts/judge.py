"""Let a model behind an OpenAI-compatible endpoint score responses.

    judge = Judge(config, cache=Path("runs/a/judge_cache"))
    judge.verdicts([(problem, response, grade, num_tokens), ...])

Whatever the endpoint does, each response gets a value from 0 to 1 or the reason why it has none, within
(retries + 1) * timeout and the pauses between attempts. Where `concurrency` responses in a row have none, the others
of the batch are not asked for.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from vlm_rl.config import JudgeConfig
from vlm_rl.errors import UserError
from vlm_rl.reward_parts.judge_cache import ReplyCache, key_of
from vlm_rl.reward_parts.judge_client import Completion, JudgeError, complete, make_client
from vlm_rl.templates import END_THINK
from vlm_rl.types import IMAGE_MARKER, Call, Outcome, name_videos

_LONGEST_PAUSE = 30.0  # seconds between two attempts
_WAIT_SECONDS = 0.1  # between two looks at whether the run is stopped
_MIN_FAILURES = 3  # in a row before the rest of a batch is given up
_PLACEHOLDER = re.compile(r"\{(question|answer|response|extracted)\}")
_NUMBER = r"-?\d{1,9}(?:\.\d{1,9})?"
_SCORE = re.compile(rf"(?<![\w.])({_NUMBER})(?:\s*/\s*({_NUMBER}))?(?![\w])")
_JSON_SCORE = re.compile(rf'"score"\s*:\s*({_NUMBER})\s*[,}}]')
_YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_IMAGE_TYPES = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"RIFF", "webp"))


@dataclass(slots=True)
class JudgeVerdict:
    """What the judge says of one response, and what that took."""

    outcome: Outcome = 0.0
    cost: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("requests", "cached", "prompt_tokens", "completion_tokens"), 0)
    )


def read_score(text: str, config: JudgeConfig) -> float | None:
    """Return the judge's score as 0 to 1, or None where the reply holds none between `lowest` and `highest`.

    What a reasoning model writes before `</think>` is left out. In `8/10` the score is 8, if 10 is the highest.
    """
    text = text.rpartition(END_THINK)[2]
    if config.parser == "yes_no":
        words = _YES_NO.findall(text)
        return float(words[-1].lower() == "yes") if words else None
    pattern = _JSON_SCORE if config.parser == "json" else _SCORE
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    score, *out_of = (float(number) for number in matches[-1].groups() if number)
    if not config.lowest <= score <= config.highest or out_of not in ([], [config.highest]):
        return None
    return (score - config.lowest) / (config.highest - config.lowest)


class Judge:
    """Asks for scores. It holds no connection between batches."""

    def __init__(self, config: JudgeConfig, *, cache: Path) -> None:
        """Read the prompt file and the API key. Raises UserError where one is missing or cannot be used."""
        self._config = config
        self._prompt = _read_prompt(Path(config.prompt))
        self._key = _read_key(config.api_key_env)
        self._cache = ReplyCache(Path(config.cache) if config.cache else cache)
        self._certificates = httpx.create_ssl_context()
        self._is_aborted = False

    def verdicts(
        self, calls: Sequence[Call], *, is_stopped: Callable[[], bool] = lambda: False
    ) -> list[JudgeVerdict]:
        """Return a verdict for each response, in order. Once `is_stopped` says so, those that are missing have 0.

        Raises OSError where the cache cannot be written.
        """
        verdicts = [JudgeVerdict() for _ in calls]
        asyncio.run(self._ask_all(calls, verdicts, lambda: self._is_aborted or is_stopped()))
        return verdicts

    def abort(self) -> None:
        """Ask no further; `verdicts` in another thread ends."""
        self._is_aborted = True

    async def _ask_all(
        self, calls: Sequence[Call], verdicts: Sequence[JudgeVerdict], is_stopped: Callable[[], bool]
    ) -> None:
        batch = _Batch(iter(zip(calls, verdicts, strict=True)))
        async with make_client(
            key=self._key, concurrency=self._config.concurrency, certificates=self._certificates
        ) as client:
            workers = {
                asyncio.create_task(self._work(client, batch))
                for _ in range(min(self._config.concurrency, len(calls)))
            }
            while workers and not is_stopped():
                done, workers = await asyncio.wait(workers, timeout=_WAIT_SECONDS)
                for worker in done:
                    worker.result()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, client: httpx.AsyncClient, batch: _Batch) -> None:
        """Take responses from the batch until none is left."""
        for call, verdict in batch.left:
            if batch.failures >= max(_MIN_FAILURES, self._config.concurrency):
                verdict.outcome = f"the judge was not asked: {batch.failures} requests in a row had failed"
                continue
            try:
                verdict.outcome = await self._judge(client, call, verdict.cost, batch)
                batch.failures = 0
            except JudgeError as error:
                verdict.outcome = self._masked(str(error))
                batch.failures += 1

    async def _judge(self, client: httpx.AsyncClient, call: Call, cost: dict[str, int], batch: _Batch) -> Outcome:
        body = self._body(call)
        key = key_of(self._config.url, body)
        async with batch.locks[key]:  # of equal requests, one is sent
            text = self._cache.get(key)
            if text is not None:
                cost["cached"] = 1
            else:
                reply = await self._complete(client, body, cost)
                cost.update(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
                if not reply.text.strip():
                    raise JudgeError(
                        "the judge's reply holds no text; a reasoning model may need more reward.judge.max_tokens"
                    )
                text = self._masked(reply.text)  # a hostile server may send the key back
                self._cache.put(key, text)
        score = read_score(text, self._config)
        return f"the judge's reply holds no score: {' '.join(text.split())[-200:]!r}" if score is None else score

    async def _complete(self, client: httpx.AsyncClient, body: dict[str, Any], cost: dict[str, int]) -> Completion:
        for attempt in range(self._config.retries + 1):
            cost["requests"] += 1
            try:
                return await complete(client, self._config.url, body, timeout=self._config.timeout)
            except JudgeError as error:
                if not error.may_pass or attempt == self._config.retries:
                    raise
            # Spread, so that requests that failed together do not come back together.
            await asyncio.sleep(min(_LONGEST_PAUSE, 2.0**attempt) * random.SystemRandom().uniform(0.5, 1.0))
        raise AssertionError

    def _body(self, call: Call) -> dict[str, Any]:
        problem, response, grade, _ = call
        config = self._config
        texts = {
            "question": name_videos(problem.question, problem.videos).replace(IMAGE_MARKER, "").strip(),
            "answer": problem.answer,
            "response": response,
            "extracted": grade.extracted or "",
        }
        # In one pass: a placeholder in the model's own text stays text.
        prompt = _PLACEHOLDER.sub(lambda match: texts[match[1]], self._prompt)
        content: Any = prompt
        if config.images and problem.images:
            content = [_image_part(data) for data in problem.images] + [{"type": "text", "text": prompt}]
        return {
            "model": config.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }

    def _masked(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


@dataclass(slots=True)
class _Batch:
    """What the workers of one batch share."""

    left: Iterator[tuple[Call, JudgeVerdict]]
    failures: int = 0  # in a row
    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))


def _image_part(data: bytes) -> dict[str, Any]:
    kind = next(name for start, name in _IMAGE_TYPES if data.startswith(start))  # a prepared set holds no other
    address = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": address}}


def _read_prompt(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward.judge.prompt: {path} cannot be read as text: {error}; give a text file") from None
    if "{response}" not in text:
        raise UserError(f"reward.judge.prompt: {path} does not hold {{response}}, where the response is put: add it")
    return text


def _read_key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not re.fullmatch(r"[!-~]+", key):
        problem = "holds a space, a line end or a letter that no header may hold" if key else "is not set"
        raise UserError(f"reward.judge.api_key_env: the environment variable {variable} {problem}: set it to the key")
    return key
