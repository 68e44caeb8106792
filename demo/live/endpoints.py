"""Ask servers with the OpenAI protocol that the operator named at start; the page only chooses among their names.

vlm-rl demo runs/a --endpoint teacher=http://127.0.0.1:8000/v1,Qwen2.5-VL-7B --endpoint-key teacher=TEACHER_KEY
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_rl.chat_endpoint.client import ChatEndpoint, Timeouts, check_address, image_part, read_key
from vlm_rl.chat_endpoint.stream import StreamedReply, stream
from vlm_rl.data.images import decode_image, encode_png, fit_to_grid
from vlm_rl.demo.live.replies import AskSettings, IsCancelled, LiveQuestion, Replies, Reply, split_growing
from vlm_rl.errors import UserError
from vlm_rl.templates import END_THINK, TEMPLATES, THINK
from vlm_rl.types import IMAGE_MARKER

_NAME = re.compile(r"[\w][\w .:-]{0,39}")
_UNUSUAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # vLLM's names; they undo a generation_config
_USUAL_NOTE = "with the server's own top-k and repetition penalty, which it does not let a client set"
_TIMEOUTS = Timeouts(whole=600.0, connect=5.0, pause=60.0)
_MIN_PIXELS, _MAX_PIXELS = 3136, 1_003_520  # of the picture sent, as in the recipes


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
        check_address(url, setting=f"--endpoint {name}=URL", key_setting="--endpoint-key")
        if not _NAME.fullmatch(name) or name in endpoints:
            raise UserError(f"--endpoint {word}: the name {name!r} is taken or not made of letters, digits and . : -")
        key = read_key(variables.get(name, ""), setting=f"--endpoint-key {name}")
        endpoints[name] = Endpoint(name, url.rstrip("/"), model, key)
    if unknown := sorted(set(variables) - set(endpoints)):
        raise UserError(f"--endpoint-key {unknown[0]}=...: there is no --endpoint of this name")
    return list(endpoints.values())


def _pair(word: str, option: str, form: str) -> tuple[str, str]:
    name, equals, rest = word.partition("=")
    if not equals or not name or not rest:
        raise UserError(f"{option} must have the form {form}")  # the word may be a key
    return name, rest


class EndpointBackend:
    """A Backend (demo/live/replies.py): one streamed chat completion."""

    def __init__(self, endpoint: Endpoint, *, system: str, timeouts: Timeouts = _TIMEOUTS) -> None:
        """Take the system prompt that the checkpoints beside it are asked with."""
        self.name, self.template = endpoint.name, TEMPLATES["plain"]  # a model of others may know no tags
        self._model, self._system = endpoint.model, system
        self._endpoint = ChatEndpoint(endpoint.url, key=endpoint.key, timeouts=timeouts)

    def ask(self, question: LiveQuestion, settings: AskSettings, *, is_cancelled: IsCancelled) -> Replies:
        """See Backend.ask."""
        yield Reply("loading")
        body = body_of(question, settings, model=self._model, system=self._system)
        asked = {"is_cancelled": is_cancelled, "model_setting": f"--endpoint {self.name}=URL,model"}
        for more, note in ((_UNUSUAL, ""), ({}, _USUAL_NOTE)):
            for reply in stream(self._endpoint, body | more, **asked):
                if more and reply.error and reply.error.is_refusal:
                    break
                yield _shown(reply, note)
            else:
                return


def _shown(reply: StreamedReply, note: str) -> Reply:
    """Return a reply as the page shows it; without the server's own counts every piece counts as one token."""
    text = reply.content
    if reply.reasoning:
        text = f"{THINK}{reply.reasoning}{END_THINK if text or reply.end else ''}{text}"
    tokens, reasoning = reply.counts or (reply.num_pieces, None)
    is_exact = reasoning is not None
    if reasoning is None:
        thought, answer = split_growing(text, is_over=bool(reply.end or reply.error))
        reasoning = round(tokens * len(thought or "") / max(1, len(thought or "") + len(answer)))
    return Reply(
        phase="failed" if reply.error else "ended" if reply.end else "writing",
        text=text,
        tokens=tokens,
        reasoning_tokens=reasoning,
        counted_by="server" if reply.counts else "estimate",
        is_split_exact=is_exact,
        stop=reply.end,
        note=str(reply.error or note),
    )


def body_of(question: LiveQuestion, settings: AskSettings, *, model: str, system: str) -> dict[str, Any]:
    """Return the request; a picture is sent as pixels alone, no larger than the recipes allow.

    Args:
        question: text and picture.
        settings: how to sample.
        model: the server's name of it.
        system: the system message; "" sends none.

    Raises UserError for a picture that cannot be read.
    """
    content: list[dict[str, Any]] = []
    if question.image is not None:
        image = decode_image(question.image, where="the picture")
        fitted = fit_to_grid(image, min_pixels=_MIN_PIXELS, max_pixels=_MAX_PIXELS)
        content.append(image_part(encode_png(fitted)))
    content.append({"type": "text", "text": question.text.replace(IMAGE_MARKER, "").strip()})
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    return {
        "model": model,
        "messages": [*messages, {"role": "user", "content": content}],
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "top_p": 1.0,
    }
