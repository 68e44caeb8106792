"""What `vlm-rl serve` adds to the address of a vLLM server: a token on every route, and groups of responses.

vLLM loads RolloutEndpoint as an ASGI middleware. Its own API key leaves the routes that replace weights open, and
it keeps connections that send no request.

    GET  /vlm_rl/info        what is served, for the learner to compare with what it needs
    POST /vlm_rl/generate    one prompt with its images and videos, and all its responses
    POST /vlm_rl/score       the same with given responses, and the log-probs of their tokens
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import vllm
from PIL import Image
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http import auto

from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.remote.server_token import read_token
from vlm_rl.samplers.remote.timed_heads import TimedHeads
from vlm_rl.samplers.vllm.options import prompt_request, sampling_options, scoring_options
from vlm_rl.types import Video
from vlm_rl.untrusted.json_object import read_object

_INSTANCE = uuid.uuid4().hex  # a server that was started again is a different one
_TRIES = 3  # of a response whose prepared images were lost
TOKEN_FILE = "VLM_RL_SERVER_TOKEN_FILE"  # the environment variable with its path


class _TimedProtocol(TimedHeads, auto.AutoHTTPProtocol):
    """The protocol of HTTP that uvicorn would choose itself."""


auto.AutoHTTPProtocol = _TimedProtocol  # vLLM has no option for it, and uvicorn looks here after this was imported


class RolloutEndpoint:
    """The middleware. Raises UserError at the server's start where there is no token."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.token = read_token(Path(os.environ[TOKEN_FILE]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer our own routes, and pass on vLLM's, once the token is right."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if not self._is_allowed(scope):
            if scope["type"] != "http":
                return await send({"type": "websocket.close", "code": 1008})
            return await JSONResponse({"error": "wrong or missing token"}, 401)(scope, receive, send)
        if scope["path"] == "/vlm_rl/info":
            return await JSONResponse(await _info(_engine(scope)))(scope, receive, send)
        if work := {"/vlm_rl/generate": _generate, "/vlm_rl/score": _score}.get(scope["path"]):
            reply = await _unless_disconnected(work(_engine(scope), await _body(receive)), receive)
            return None if reply is None else await reply(scope, receive, send)
        return await self.app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())


def _engine(scope: Scope) -> Any:
    return scope["app"].state.engine_client


async def _info(engine: Any) -> dict[str, Any]:
    config = engine.vllm_config
    model = config.model_config
    return {
        "model": hashlib.sha256((Path(model.model) / "config.json").read_bytes()).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": "fp8" if model.quantization == "online" else model.quantization,  # as `vlm-rl serve` asks
        "max_model_len": model.max_model_len,
        "logprobs_mode": model.logprobs_mode,
        "mm_processor_kwargs": model.multimodal_config and model.multimodal_config.mm_processor_kwargs,
        "max_videos": model.multimodal_config.get_limit_per_prompt("video") if model.multimodal_config else 0,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "backend": config.weight_transfer_config and config.weight_transfer_config.backend,
        "world_size": config.parallel_config.world_size_across_dp,
        "vllm": vllm.__version__,
        "instance": _INSTANCE,
        "weight_version": await engine.get_weight_version(),
        "is_paused": await engine.is_paused(),
    }


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _unless_disconnected(work: Any, receive: Receive) -> JSONResponse | None:
    """Return the work's reply; None if the client has left before, and the work is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _generate(engine: Any, body: bytes) -> JSONResponse:
    """Sample one response for each seed. Answer 400 to a request that cannot be read or that vLLM refuses."""
    try:
        asked = read_object(body)
        media = _images(asked), _videos(asked)
        params = SamplingParams(**asked["params"])
        prompt = prompt_request(_ids(asked["ids"]), *media)
        tokens = {"eos_ids": asked["eos_ids"], "banned_ids": asked["banned_ids"]}
        settings = [_checked(sampling_options(vllm, params, seed=seed, **tokens)) for seed in asked["seeds"]]
        responses = await _gathered([response_of(engine, prompt, setting) for setting in settings])
    except (ValueError, TypeError, LookupError, AssertionError) as error:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"[:500]}, 400)
    return JSONResponse({"responses": responses})


async def _score(engine: Any, body: bytes) -> JSONResponse:
    """Return the log-probs of given responses. Errors are answered as by `_generate`."""
    try:
        asked = read_object(body)
        media, k = (_images(asked), _videos(asked)), asked["top_k"]
        setting = _checked(scoring_options(vllm, top_k=k))
        prompts = [prompt_request(_ids([*asked["ids"], *ids]), *media) for ids in asked["responses"]]
        works = [
            scores_of(engine, prompt, setting, tokens=len(ids), top_k=k)
            for prompt, ids in zip(prompts, asked["responses"], strict=True)
        ]
        scores = await _gathered(works)
    except (ValueError, TypeError, LookupError, AssertionError) as error:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"[:500]}, 400)
    return JSONResponse({"scores": scores})


def _ids(given: Any) -> list[int]:
    """Return token ids. Raises ValueError as `_checked` does."""
    return msgspec.convert(given, list[int])


def _checked(setting: vllm.SamplingParams) -> vllm.SamplingParams:
    """Return vLLM's parameters. Raises ValueError for those that the engine's process cannot read.

    vLLM checks few types in the front end. The engine's process would stop reading at such a request, and answer
    nobody any more.
    """
    msgspec.msgpack.decode(msgspec.msgpack.encode(setting), type=vllm.SamplingParams)
    return setting


async def scores_of(engine: Any, prompt: Any, setting: Any, *, tokens: int, top_k: int) -> dict[str, Any]:
    """Return the log-probs of the last tokens of a prompt, and the most likely ids in the place of each."""
    output = await _retried(engine, prompt, setting)
    table = output.prompt_logprobs
    logprobs, top_ids, top_logprobs = [], [], []
    for place in range(len(table) - tokens, len(table)):
        start, end = table.start_indices[place], table.end_indices[place]  # the token itself comes first
        logprobs.append(table.logprobs[start])
        top_ids.append(table.token_ids[start + 1 : end][:top_k])
        top_logprobs.append(table.logprobs[start + 1 : end][:top_k])
    return {"logprobs": logprobs, "top_ids": top_ids, "top_logprobs": top_logprobs}


async def _gathered(works: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return all results in order; the first exception cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def response_of(engine: Any, prompt: Any, setting: Any) -> dict[str, Any]:
    """Return one response."""
    result = await _retried(engine, prompt, setting)
    (output,) = result.outputs
    return {
        "ids": list(output.token_ids),
        "logprobs": list(output.logprobs.logprobs) if output.logprobs else [],
        "versions": [[span.start, span.end, span.version] for span in output.weight_versions or ()],
        "finish": output.finish_reason,
        "cached": result.num_cached_tokens or 0,
    }


async def _retried(engine: Any, prompt: Any, setting: Any) -> Any:
    """Return vLLM's result of one request, asked for again where vLLM has lost a prepared image.

    The server's front end and its engine each keep a list of the prepared images, and the front end sends only those
    that it takes for new. Where the lists differ, the request ends as an error or an AssertionError, which brings
    them into line.
    """
    for _ in range(_TRIES - 1):
        try:
            result = await _finished(engine, prompt, setting)
        except AssertionError:
            continue
        if result.outputs[0].finish_reason != "error":
            return result
    return await _finished(engine, prompt, setting)


async def _finished(engine: Any, prompt: Any, setting: Any) -> Any:
    """Return vLLM's result. A cancelled request is aborted once the engine has it.

    vLLM's own generate() can be cancelled while a request is prepared. Its images are then known to the front end,
    and never reach the engine: the next request with one of them fails.
    """
    adding = asyncio.ensure_future(engine.add_request(uuid.uuid4().hex, prompt, setting))
    try:
        queue = await asyncio.shield(adding)
        while not (result := await queue.get()).finished:
            pass
    except asyncio.CancelledError:
        queue = await adding
        await engine.abort(queue.request_id, internal=True)
        raise
    return result


def _images(asked: dict[str, Any]) -> list[Image.Image]:
    return [_image(item["size"], item["data"]) for item in asked["images"]]


def _videos(asked: dict[str, Any]) -> list[Video]:
    return [
        Video(tuple(_image(item["size"], frame) for frame in item["frames"]), item["seconds"])
        for item in asked["videos"]
    ]


def _image(size: Sequence[int], data: str) -> Image.Image:
    return Image.frombytes("RGB", (size[0], size[1]), base64.b64decode(data))
