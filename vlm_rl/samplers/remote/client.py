"""Ask one vLLM server, started by `vlm-rl serve`: whatever it does, the result is an answer or a ServerError."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import numpy as np
from PIL import Image

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.fingerprint import join_shards
from vlm_rl.types import Prompt

_MOST_BYTES = 1 << 20  # of a reply that says little; parsed, its lists take twenty times as much
_PROOF_BYTES = 1 << 26  # of the checksums of every tensor's shards
_TOKEN_BYTES = 128  # of an id with its log-prob and what else a token adds to a reply, at most
_POSITIVE = 0.01  # a log-prob that is above 0 by more is no rounding
_IDLE = 2.0  # seconds after which a connection is not used again: vLLM closes it after 5, also under a new request
_BODY = 60.0  # seconds for a reply's body, which a server has whole when it begins to send it


class ServerError(Exception):
    """A server that cannot be reached, is silent, or answers with anything else than it should."""


@dataclass(frozen=True, slots=True)
class ServerResponse:
    """One response, as the server gives it."""

    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, str]]  # tokens [start, end) were sampled by the weights with this label
    num_cached: int = 0  # prompt tokens whose keys and values the server had


@dataclass(frozen=True, slots=True, eq=False)
class ResponseScores:
    """How likely a server's model finds a response's tokens, at temperature 1."""

    logprobs: np.ndarray  # float32 [R]
    top_ids: np.ndarray  # int64 [R, k], the most likely ids, in order
    top_logprobs: np.ndarray  # float32 [R, k]


@asynccontextmanager
async def connected(url: str, token: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of one server, for the requests of one event loop."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE)
    headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
    options: dict[str, Any] = {"timeout": None, "limits": limits}
    options["trust_env"] = False  # a proxy of the environment is for the outside, and could read the token
    options["verify"] = not url.startswith("http:")  # reading the certificates takes longer than a small request
    async with httpx.AsyncClient(base_url=url, headers=headers, **options) as client:
        yield client


async def ask(
    client: httpx.AsyncClient,
    path: str,
    body: Any = None,
    *,
    seconds: float | None,
    post: bool = True,
    most: int = _MOST_BYTES,
) -> Any:
    """Return the reply's JSON. Raises ServerError, after this many seconds at the latest.

    Args:
        client: of the server.
        path: the route.
        body: sent as JSON; None sends none.
        seconds: until the whole reply is here; None waits.
        post: POST; otherwise GET.
        most: bytes of the reply.
    """
    try:
        async with asyncio.timeout(seconds):
            async with client.stream("POST" if post else "GET", path, json=body) as reply, asyncio.timeout(_BODY):
                data = bytearray()
                async for part in reply.aiter_raw():
                    data += part
                    if len(data) > most:
                        raise ServerError(f"{path}: a reply of more than {most} bytes")
        if reply.status_code != 200:
            raise ServerError(f"{path}: HTTP {reply.status_code}: {data[:200].decode(errors='replace')}")
        return json.loads(data) if data else None
    except TimeoutError:
        raise ServerError(f"{path}: silent for {seconds or _BODY:g} s") from None
    except (httpx.HTTPError, OSError) as error:
        raise ServerError(f"{path}: {type(error).__name__}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{path}: not JSON: {error}") from None


async def ask_info(client: httpx.AsyncClient, *, seconds: float) -> dict[str, Any]:
    """Ask the server for its model and settings. Raises ServerError."""
    info = await ask(client, "/vlm_rl/info", seconds=seconds, post=False)
    if not isinstance(info, dict):
        raise ServerError("/vlm_rl/info: not a mapping")
    return info


async def ask_proof(client: httpx.AsyncClient, *, layout: str, dtype: str, seconds: float) -> dict[str, Any]:
    """Return the checksum of the server's weights and the digests of all its workers' buffers.

    Args:
        client: connected to the server.
        layout: the learner's names and shapes, packed; "" asks for only the buffers.
        dtype: that the weights are hashed in.
        seconds: until the whole reply is here.

    Raises ServerError.
    """
    body = {"method": "vlm_rl_proof", "kwargs": {"layout": layout, "dtype": dtype}}
    reply = await ask(client, "/collective_rpc", body, seconds=seconds, most=_PROOF_BYTES)
    try:
        if not (proofs := reply["results"]):
            raise ValueError("of no worker")
        buffers = {
            f"{name} of rank {rank}" if len(proofs) > 1 else name: digest
            for rank, proof in enumerate(proofs)
            for name, digest in dict(proof["buffers"]).items()
        }
        if not layout:
            return {"buffers": buffers}
        shards = [{place: int(held, 16) for place, held in proof["shards"].items()} for proof in proofs]
        return {"buffers": buffers, "checksum": join_shards(shards, {}).checksum}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ServerError(f"/collective_rpc: not a proof: {error}") from None


def media_mismatch(info: Mapping[str, Any], builder: PromptBuilder) -> str | None:
    """Return how a server reads images or videos otherwise than a run does, or None.

    Args:
        info: what /vlm_rl/info says.
        builder: the prompt builder of the run's model.
    """
    if not builder.is_vision:
        return None
    videos, most = int(info.get("max_videos", 0)), builder.max_videos
    if videos < most:
        return (
            f"it takes {videos} videos of a prompt, and this run has prompts with {most}: start it with "
            f"rollout.vllm.limit_mm_per_prompt.video={most}"
        )
    needed = builder.engine_options_for(videos)["mm_processor_kwargs"]
    if (given := info.get("mm_processor_kwargs")) != needed:
        return (
            f"it serves mm_processor_kwargs {given!r}, and this run needs {needed!r}: start it with `vlm-rl serve` "
            "and this run's configuration"
        )
    return None


async def ask_group(
    client: httpx.AsyncClient, prompt: Prompt, params: SamplingParams, seeds: Sequence[int], *, builder: PromptBuilder
) -> list[ServerResponse]:
    """Return one response for each seed; the images are sent once. Waits without limit.

    Args:
        client: connected to the server.
        prompt: to answer.
        params: how to sample.
        seeds: of the responses.
        builder: the prompt builder of the model, which knows the ids that end a response or are banned.

    Raises ServerError if a reply is not what these parameters can give.
    """
    body = {
        **_prompt_body(prompt),
        "params": asdict(params),
        "seeds": list(seeds),
        "eos_ids": sorted(builder.eos_ids),
        "banned_ids": sorted(builder.banned_ids),
    }
    most = _MOST_BYTES + len(seeds) * params.max_tokens * _TOKEN_BYTES
    reply = await ask(client, "/vlm_rl/generate", body, seconds=None, most=most)
    try:
        responses = [_checked(item, params, builder=builder) for item in reply["responses"]]
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ServerError(f"/vlm_rl/generate: not a group of responses: {error!r}"[:300]) from None
    if len(responses) != len(seeds):
        raise ServerError(f"/vlm_rl/generate: {len(responses)} responses instead of {len(seeds)}")
    return responses


async def ask_scores(
    client: httpx.AsyncClient, prompt: Prompt, responses: Sequence[np.ndarray], *, top_k: int
) -> list[ResponseScores]:
    """Return the scores of responses to a prompt, in order. Waits without limit.

    Args:
        client: connected to the server.
        prompt: that was answered.
        responses: their ids.
        top_k: how many of the most likely ids are wanted of each token.

    Raises ServerError if a reply is no scores of these.
    """
    body = {**_prompt_body(prompt), "responses": [ids.tolist() for ids in responses], "top_k": top_k}
    most = _MOST_BYTES + sum(map(len, responses)) * (1 + top_k) * _TOKEN_BYTES
    reply = await ask(client, "/vlm_rl/score", body, seconds=None, most=most)
    try:
        scores = [
            ResponseScores(
                np.array(item["logprobs"], np.float32).reshape(len(ids)),
                np.array(item["top_ids"], np.int64).reshape(len(ids), top_k),
                np.array(item["top_logprobs"], np.float32).reshape(len(ids), top_k),
            )
            for item, ids in zip(reply["scores"], responses, strict=True)
        ]
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ServerError(f"/vlm_rl/score: not the scores of these responses: {error!r}"[:300]) from None
    for score in scores:
        if not (np.isfinite(score.logprobs).all() and np.isfinite(score.top_logprobs).all()):
            raise ServerError("/vlm_rl/score: a log-prob that is not finite")
        if score.top_ids.size and score.top_ids.min() < 0:
            raise ServerError("/vlm_rl/score: an id below 0")
    return scores


def _prompt_body(prompt: Prompt) -> dict[str, Any]:
    images = [{"size": list(image.size), "data": _written(image)} for image in prompt.images]
    videos = [
        {
            "size": list(video.frames[0].size),
            "frames": [_written(frame) for frame in video.frames],
            "seconds": [float(second) for second in video.seconds],
        }
        for video in prompt.videos
    ]
    return {"ids": prompt.sampler_ids.tolist(), "images": images, "videos": videos}


def _written(image: Image.Image) -> str:
    return base64.b64encode(image.convert("RGB").tobytes()).decode()


def _checked(item: Mapping[str, Any], params: SamplingParams, *, builder: PromptBuilder) -> ServerResponse:
    """Return a response. Raises ValueError for one that the parameters cannot give, such as one that was aborted."""
    ids, logprobs = item["ids"], item["logprobs"]
    versions = [(start, end, str(label)) for start, end, label in item["versions"]]
    if not (0 < len(ids) == len(logprobs) <= params.max_tokens):
        raise ValueError(f"{len(ids)} tokens and {len(logprobs)} log-probs, of at most {params.max_tokens}")
    size = builder.config.get_text_config().vocab_size
    if not all(type(token) is int and 0 <= token < size and token not in builder.banned_ids for token in ids):
        raise ValueError("a token that is not an id of the vocabulary, or is banned")
    if not all(type(number) in (float, int) and -math.inf < float(number) <= _POSITIVE for number in logprobs):
        raise ValueError("a log-prob that is not finite, or above 0")
    if ids[-1] not in builder.eos_ids and len(ids) < params.max_tokens:
        raise ValueError(f"{len(ids)} tokens of {params.max_tokens} without an end: {item['finish']}")
    if [start for start, _, _ in versions] != [0, *(end for _, end, _ in versions)][:-1] or not versions:
        raise ValueError("versions with gaps")
    if not all(type(end) is int and start <= end for start, end, _ in versions):
        raise ValueError("versions of parts that are no tokens")
    if versions[-1][1] != len(ids):
        raise ValueError(f"versions of {versions[-1][1]} tokens of {len(ids)}")
    if not (type(cached := item["cached"]) is int and 0 <= cached < 2**31):
        raise ValueError("a number of cached tokens that cannot be")
    return ServerResponse(ids, [float(number) for number in logprobs], versions, cached)
