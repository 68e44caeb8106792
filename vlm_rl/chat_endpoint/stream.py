"""Read one reply while it grows.

    for reply in stream(endpoint, body, is_cancelled=cancelled.is_set):
        print(reply.content)

Leaving the generator early closes the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from typing import Any, Literal

import httpx

from vlm_rl.chat_endpoint.client import ChatEndpoint, EndpointError, error_message, is_count
from vlm_rl.untrusted.json_object import read_object

_SECONDS = 0.1  # between two looks at a reply
_MAX_BYTES = 8 * 2**20  # of a reply on the wire, where each piece has a frame around it
_MAX_LINE = 2**20
_MAX_TEXT = 200_000  # characters


class StreamedReply:
    """What has come of a reply.

    Attributes:
        num_pieces: of the text.
        counts: the server's: tokens, and those of the reasoning where it says so; None if it counts nothing.
        finish_reason: that the server gives with one of the last pieces.
        end: how the reply ended; "" while it runs and where it failed.
        error: why it failed.
    """

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self.num_pieces = 0
        self.counts: tuple[int, int | None] | None = None
        self.finish_reason: Literal["", "stop", "length"] = ""
        self.end: Literal["", "stop", "length", "cancelled"] = ""
        self.error: EndpointError | None = None
        self._endpoint = endpoint
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._num_chars = 0

    @property
    def reasoning(self) -> str:
        """Return the reasoning of a server that keeps it apart."""
        return self._endpoint.masked("".join(self._reasoning))

    @property
    def content(self) -> str:
        """Return the text."""
        return self._endpoint.masked("".join(self._content))

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event. Raises EndpointError for an error in it and beyond the limits."""
        if event.get("error"):
            said = self._endpoint.shown(error_message(event["error"]))
            raise EndpointError(f"{self._endpoint.called} reports: {said}")
        self.counts = _counts(event.get("usage")) or self.counts
        for choice in (event.get("choices") or [])[:1]:
            delta = choice.get("delta") or {}
            self._append(self._reasoning, delta.get("reasoning_content") or delta.get("reasoning"))
            self._append(self._content, delta.get("content"))
            if reason := choice.get("finish_reason"):
                self.finish_reason = "length" if reason == "length" else "stop"

    def _append(self, pieces: list[str], text: object) -> None:
        if not isinstance(text, str) or not text:
            return
        pieces.append(text)
        self.num_pieces += 1
        self._num_chars += len(text)
        if self._num_chars > _MAX_TEXT:
            raise EndpointError(f"the reply is longer than {_MAX_TEXT:,} characters")


def stream(
    endpoint: ChatEndpoint,
    body: Mapping[str, Any],
    *,
    is_cancelled: Callable[[], bool],
    model_setting: str = "the model",
) -> Generator[StreamedReply, None, None]:
    """Yield a reply, the same object again each time that it has grown, until it has ended or failed.

    Args:
        endpoint: to ask.
        body: the request; where its model is "", the only one that the server lists is asked.
        is_cancelled: asked while waiting.
        model_setting: where the user names the model, for the message.
    """
    reply, seen = StreamedReply(endpoint), 0
    with asyncio.Runner() as runner:  # the task runs while this generator waits; leaving the runner cancels it
        task = runner.get_loop().create_task(_read(endpoint, body, reply, model_setting))
        while not task.done() and not is_cancelled():
            runner.run(asyncio.wait([task], timeout=_SECONDS))
            if reply.num_pieces > seen and not task.done():
                seen = reply.num_pieces
                yield reply
    if task.cancelled():
        reply.end = "cancelled"
    else:
        task.result()
    yield reply


async def _read(endpoint: ChatEndpoint, body: Mapping[str, Any], reply: StreamedReply, model_setting: str) -> None:
    """Add all that the server sends to the reply, its failure too."""
    try:
        async with endpoint.connected() as http:
            if not body["model"]:
                names = await endpoint.models(http)
                if len(names) != 1:
                    listed = f"{endpoint.called} does not name one model ({len(names)} listed)"
                    raise EndpointError(f"{listed}: say which with {model_setting}")
                body = {**body, "model": names[0]}
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
            async with endpoint.answer(http, "chat/completions", body, late="has not finished") as answer:
                await _read_events(answer, reply)
        if not reply.finish_reason:
            raise EndpointError("the connection ended in the middle of the reply", status=0)
        reply.end = reply.finish_reason
    except EndpointError as error:
        reply.error = error


async def _read_events(answer: httpx.Response, reply: StreamedReply) -> None:
    try:
        async for event in _events(answer):
            reply.add(event)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EndpointError(f"the reply cannot be read: {type(error).__name__}") from None


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, up to [DONE]."""
    buffer, total = b"", 0
    async for chunk in answer.aiter_raw():
        total += len(chunk)
        *lines, buffer = (buffer + chunk).split(b"\n")
        if total > _MAX_BYTES or len(buffer) > _MAX_LINE:
            raise EndpointError(f"the reply is larger than {_MAX_BYTES // 2**20} MiB, or has no line ends")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                yield read_object(data)


def _counts(tree: object) -> tuple[int, int | None] | None:
    """Return (tokens, of these in the reasoning where the server says so); None for counts that cannot be."""
    if not isinstance(tree, dict) or not is_count(tree.get("completion_tokens")):
        return None
    details = tree.get("completion_tokens_details")
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return tree["completion_tokens"], reasoning if is_count(reasoning) and reasoning else None
