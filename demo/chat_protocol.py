"""Write a chat completion's request in the OpenAI protocol, and read its stream. Nothing here opens a connection.

What a server sends is hostile input: the sizes are limited here, the times in demo/endpoints.py.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from vlm_rl.data.images import decode_image, encode_png, fit_to_grid
from vlm_rl.demo.replies import END_THINK, THINK, AskSettings, LiveQuestion, Reply, Stop, split_growing
from vlm_rl.types import IMAGE_MARKER

if TYPE_CHECKING:
    import httpx

_MAX_BYTES = 8 * 2**20  # of a reply on the wire
_MAX_LINE = 2**20
_MAX_TEXT = 200_000  # characters shown
_MIN_PIXELS, _MAX_PIXELS = 3136, 1_003_520  # of the picture sent, as in the recipes


class EndpointError(Exception):
    """Raised where the server fails; the message is for the page."""


class ReplyReader:
    """Collects what has come of a reply."""

    def __init__(self) -> None:
        self.stop: Stop = ""
        self.note = ""
        self.refusal = ""
        self._reasoning: list[str] = []  # of servers that keep it apart
        self._content: list[str] = []
        self._num_chars = 0
        self._usage: tuple[int, int | None] | None = None  # (tokens, of these in the reasoning)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event of the stream. Raises EndpointError for an error in it, and beyond the limits."""
        if event.get("error"):
            raise EndpointError(f"the server reports: {shorten(error_text(json.dumps({'error': event['error']})))}")
        self._usage = _usage(event.get("usage")) or self._usage
        for choice in (event.get("choices") or [])[:1]:
            delta = choice.get("delta") or {}
            self._append(self._reasoning, delta.get("reasoning_content") or delta.get("reasoning"))
            self._append(self._content, delta.get("content"))
            reason = choice.get("finish_reason")
            if reason:
                self.stop = "length" if reason == "length" else "stop"

    def state(self, *, stop: Stop, failure: str = "") -> Reply:
        """Return the reply as it is now; without the server's own counts every piece counts as one token."""
        text = "".join(self._content)
        if self._reasoning:
            closing = END_THINK if self._content or self.stop else ""
            text = f"{THINK}{''.join(self._reasoning)}{closing}{text}"
        tokens, reasoning = self._usage or (len(self._reasoning) + len(self._content), None)
        is_exact = reasoning is not None
        if reasoning is None:
            thought, answer = split_growing(text, is_over=bool(stop or failure))
            reasoning = round(tokens * len(thought or "") / max(1, len(thought or "") + len(answer)))
        return Reply(
            phase="failed" if failure else "ended" if stop else "writing",
            text=text,
            tokens=tokens,
            reasoning_tokens=reasoning,
            counted_by="server" if self._usage else "estimate",
            is_split_exact=is_exact,
            stop=stop,
            note=failure or self.note,
        )

    def _append(self, pieces: list[str], text: object) -> None:
        if not isinstance(text, str) or not text:
            return
        pieces.append(text)
        self._num_chars += len(text)
        if self._num_chars > _MAX_TEXT:
            raise EndpointError(f"the reply is longer than {_MAX_TEXT:,} characters")


def _usage(tree: object) -> tuple[int, int | None] | None:
    """Return (tokens, of these in the reasoning where the server says so); None for counts that cannot be."""
    if not isinstance(tree, dict) or not _is_count(tree.get("completion_tokens")):
        return None
    details = tree.get("completion_tokens_details")
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return tree["completion_tokens"], reasoning if _is_count(reasoning) and reasoning else None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 10**9


def body_of(question: LiveQuestion, settings: AskSettings, *, model: str, system: str) -> dict[str, Any]:
    """Return the request; a picture is sent as pixels alone, no larger than the recipes allow.

    Args:
        question: text and picture.
        settings: how to draw.
        model: the server's name of it.
        system: the system message; "" sends none.

    Raises UserError for a picture that cannot be read.
    """
    content: list[dict[str, Any]] = []
    if question.image is not None:
        image = decode_image(question.image, where="the picture")
        fitted = fit_to_grid(image, min_pixels=_MIN_PIXELS, max_pixels=_MAX_PIXELS)
        address = f"data:image/png;base64,{base64.b64encode(encode_png(fitted)).decode()}"
        content.append({"type": "image_url", "image_url": {"url": address}})
    content.append({"type": "text", "text": question.text.replace(IMAGE_MARKER, "").strip()})
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    return {
        "model": model,
        "messages": [*messages, {"role": "user", "content": content}],
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "top_p": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, up to [DONE]."""
    buffer, total = b"", 0
    async for chunk in answer.aiter_raw():
        total += len(chunk)
        *lines, buffer = (buffer + chunk).split(b"\n")
        if total > _MAX_BYTES or len(buffer) > _MAX_LINE:
            raise EndpointError(f"the reply is larger than {_MAX_BYTES // 2**20} MiB, or has no line ends")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


async def beginning(answer: httpx.Response, *, characters: int = 300) -> str:
    """Return the start of a reply as text, whatever its size."""
    data = b""
    async for chunk in answer.aiter_raw():
        data += chunk
        if len(data) > 4 * characters:
            break
    return shorten(data.decode("utf-8", errors="replace"), characters)


def error_text(text: str) -> str:
    """Return the message inside an error of the protocol, or the text as it is."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError, RecursionError):
        return text


def shorten(text: str, characters: int = 300) -> str:
    """Return a text in one line, cut after so many characters."""
    text = " ".join(text.split())
    return text if len(text) <= characters else f"{text[:characters]}…"
