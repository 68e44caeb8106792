"""What vLLM is given, in this process and as a server: the engine's options, a prompt, and how to sample.

One place for both, so that a server samples from the distribution that the learner differentiates. Nothing here
imports vllm.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from vlm_rl.config import ENGINE_SHARE, LARGEST_ENGINE_SHARE
from vlm_rl.data.vision.family import video_metadata
from vlm_rl.devices import gpu_capability
from vlm_rl.errors import UserError
from vlm_rl.model_files.fp8 import FP8_LAYERS
from vlm_rl.model_files.model_folder import layer_configs
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.types import Problem, Video

if TYPE_CHECKING:
    import vllm

_INVARIANT_CAPABILITY = (9, 0)  # Hopper, whose own products do not depend on the batch


def engine_environment(*, on_cpu: bool) -> dict[str, str]:
    """Return the variables that vLLM needs, where the user has not set them."""
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",  # nothing leaves the machine
    }
    if on_cpu:
        return variables | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner shares these cores
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        }
    # Otherwise torch names a folder under the first compiled model's, and only while it compiles: the next start
    # would look elsewhere, and compile vLLM's own kernels again.
    return variables | {"TRITON_CACHE_DIR": str(compile_cache() / "triton_cache")}


def batch_invariance(*, on_cpu: bool, beside_learner: bool = False) -> dict[str, str]:
    """Return the variables with which vLLM computes a response the same whatever else is in its batch.

    Args:
        on_cpu: whether there is no card.
        beside_learner: whether a learner computes in the engine's process.

    Raises UserError on a CPU, beside a learner on a card before Hopper, and in a process that has imported vLLM
    without them: it reads them then.
    """
    variables = {"VLLM_BATCH_INVARIANT": "1"}
    if on_cpu:
        raise UserError("rollout.batch_invariant is true: vLLM's kernels for that are a GPU's; set it to false here")
    if beside_learner and (capability := gpu_capability()) < _INVARIANT_CAPABILITY:
        raise UserError(
            f"rollout.batch_invariant is true, and this GPU has compute capability {'.'.join(map(str, capability))}: "
            f"before {'.'.join(map(str, _INVARIANT_CAPABILITY))} vLLM puts its own matrix products, which have no "
            "gradients, in the place of torch's in this process; set it to false, or set rollout.sampler to server"
        )
    if "vllm" in sys.modules and os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        raise UserError(
            "rollout.batch_invariant is true, and this process has imported vLLM without it: start a new process, "
            "with VLLM_BATCH_INVARIANT=1 in its environment if it imports vLLM before the run"
        )
    return variables


def compile_cache() -> Path:
    """Return the folder in which vLLM keeps what it compiles."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "vllm"
    return Path(os.environ.get("VLLM_CACHE_ROOT", default)).expanduser()


SMALL_LAYERS = 8
"""Layers of a language model that a GPU's engine runs eagerly: what it launches for a step grows with them."""

_COMPILING = ("compilation_config", "optimization_level", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
_BLOCK = 256  # tokens, at least those of a block of keys and values
_SMALL_CACHE = 4 * 2**30  # bytes; an engine's share of a card is more


def engine_options(settings: EngineSettings, *, on_cpu: bool) -> dict[str, Any]:
    """Return the options of vllm.LLM that the learner's distribution needs, with the user's own.

    A small model runs eagerly on a GPU, unless the user's options ask for anything compiled.

    Args:
        settings: the model, and how it samples; `vllm_options` are the user's own (rollout.vllm).
        on_cpu: whether the engine has no GPU.

    Raises UserError for a card that cannot multiply in FP8.
    """
    builder = settings.builder
    options: dict[str, Any] = {
        "model": settings.model_path,
        # By default Mistral's own files (consolidated*.safetensors, params.json, tekken.json) would come first, and
        # nobody checked those.
        "load_format": "safetensors",
        "config_format": "hf",
        "tokenizer_mode": "hf",
        "dtype": str(settings.dtype).removeprefix("torch."),
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.batch_size,
        "seed": settings.seed,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "enforce_eager": on_cpu,
        "tensor_parallel_size": settings.tensor_parallel,
    }
    if settings.quantization is not None:
        options |= _fp8_options(on_cpu=on_cpu)
    if on_cpu:
        # A prompt cut into chunks samples a token that vLLM discards and then winds the request's
        # generator back, which CPU generators cannot do: seeded requests die.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(8192, settings.max_model_len)
    elif is_small(builder.config):
        options["enforce_eager"] = not any(key in settings.vllm_options for key in _COMPILING)
        cache = cache_bytes(
            builder.config, dtype=settings.dtype, max_model_len=settings.max_model_len, batch_size=settings.batch_size
        )
        if cache is not None and cache <= _SMALL_CACHE:
            # An engine's share of a card would be millions of blocks, which vLLM makes one by one and all of which it
            # visits before each batch, when its caches are reset.
            options["kv_cache_memory_bytes"] = cache
    own, given = builder.engine_options, dict(settings.vllm_options)
    if "limit_mm_per_prompt" in own and isinstance(limits := given.get("limit_mm_per_prompt"), Mapping):
        given["limit_mm_per_prompt"] = {**own["limit_mm_per_prompt"], **limits}  # what the user leaves out stays ours
    return {**options, **own, **given}


def shared_card(*, on_cpu: bool) -> dict[str, Any]:
    """Return the options of an engine in the learner's process: it sleeps in updates, and takes a part of the card.

    Args:
        on_cpu: whether there is no card to share.
    """
    return {"enable_sleep_mode": not on_cpu} | ({} if on_cpu else {"gpu_memory_utilization": ENGINE_SHARE})


def whole_card(*, on_cpu: bool) -> dict[str, Any]:
    """Return the options of an engine without a learner beside it; a transformers sampler takes none."""
    return {} if on_cpu else {"gpu_memory_utilization": LARGEST_ENGINE_SHARE}


_FP8_CAPABILITY = (8, 9)  # Ada Lovelace, the first that multiplies matrices in FP8; Hopper is 9.0


def _fp8_options(*, on_cpu: bool) -> dict[str, Any]:
    """Return vLLM's options that round the layers of vlm_rl.model_files.fp8 while it loads them.

    A scale for each output row, and one for each token of the input: without both vLLM would choose a kernel that
    reorders the weights.
    """
    if not on_cpu and (capability := gpu_capability()) < _FP8_CAPABILITY:
        raise UserError(
            f"rollout.quantization is fp8, and this GPU has compute capability {'.'.join(map(str, capability))}: "
            f"matrices are multiplied in FP8 from {'.'.join(map(str, _FP8_CAPABILITY))} on; leave it out here"
        )
    return {
        "quantization": "online",
        "quantization_config": {"targets": {f"re:{FP8_LAYERS}": "fp8_per_channel"}},
    }


def check_media_limits(options: Mapping[str, Any], problems: Iterable[Problem], *, more_images: int = 0) -> None:
    """Raise UserError naming the first problem with more images or videos than rollout.vllm lets a prompt have.

    Args:
        options: rollout.vllm.
        problems: of the run.
        more_images: the most that an environment shows in addition to a problem's.
    """
    most = media_limits(options)
    for problem in problems if most else ():
        images = len(problem.images) - sum(map(len, problem.videos)) + more_images  # without the frames of videos
        for kind, count in (("image", images), ("video", len(problem.videos))):
            limit = most.get(kind)
            if isinstance(limit, int) and count > limit:
                raise UserError(
                    f"rollout.vllm.limit_mm_per_prompt lets a prompt have {limit} {kind}s, and problem "
                    f"{problem.id!r} has {count}: raise it, or remove it"
                )


def media_limits(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return kind -> the most of a prompt, of the kinds that rollout.vllm limits."""
    limits = options.get("limit_mm_per_prompt")
    if not isinstance(limits, Mapping):
        return {}
    return {kind: limit.get("count") if isinstance(limit, Mapping) else limit for kind, limit in limits.items()}


def is_small(config: Any) -> bool:
    """Tell whether compiling the model of this transformers configuration takes longer than it saves."""
    return config.get_text_config().num_hidden_layers <= SMALL_LAYERS


def cache_bytes(config: Any, *, dtype: torch.dtype, max_model_len: int, batch_size: int) -> int | None:
    """Return bytes that hold the keys and values of a batch at full length; None if the model has other states.

    It is twice what plain attention needs: vLLM keeps blocks of tokens, and pads those of some models.

    Args:
        config: the model's transformers configuration.
        dtype: of keys and values.
        max_model_len: most tokens of a prompt and its response together.
        batch_size: responses side by side.
    """
    text = config.get_text_config()
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        return None  # their states are kept in the same blocks, and are not keys and values
    widths = [
        (getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)
        * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
        for layer in layer_configs(text)
    ]
    token = 2 * len(widths) * max(widths) * dtype.itemsize
    return 2 * token * batch_size * (max_model_len + _BLOCK)


def start_note(*, is_eager: bool, on_cpu: bool) -> str:
    """Return a line about what the start of an engine compiles; empty if that is nothing.

    An engine in this process compiles nothing on a CPU (vlm_rl.samplers.vllm.lean_steps).

    Raises UserError if the model is compiled, and the cache of that cannot be written.
    """
    if is_eager and on_cpu:
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            return ""
        return "engine: vLLM compiles one function at the first responses, ten to twenty seconds the first time"
    if is_eager:
        return "engine: vLLM runs this model eagerly, and compiles only kernels"
    folder = compile_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"vLLM keeps what it compiles in {folder}, which cannot be written ({error.strerror}): name a folder "
            "that outlives the run in VLLM_CACHE_ROOT"
        ) from error
    return (
        "engine: vLLM compiles this model, one to two minutes the first time; kept in "
        f"{shown(folder)} for the next start"
    )


def shown(folder: Path) -> str:
    """Return the folder's path, with ~ for the user's home."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def prompt_request(
    token_ids: Sequence[int], images: Sequence[Image.Image], videos: Sequence[Video] = ()
) -> dict[str, Any]:
    """Return vLLM's request for a prompt whose placeholders of images and videos are not expanded: vLLM expands them.

    Each comes with its hash: vLLM would take its own, which is slower, once for each response of the group.
    """
    data: dict[str, list[Any]] = {}
    digests: dict[str, list[str]] = {}
    if images:
        data["image"] = list(images)
        digests["image"] = [_digest([image]) for image in images]
    if videos:
        data["video"] = [(video.pixels(), video_metadata(video)) for video in videos]
        digests["video"] = [_digest(video.frames, video.seconds) for video in videos]
    request: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
    return request | ({"multi_modal_data": data, "multi_modal_uuids": digests} if data else {})


def _digest(images: Sequence[Image.Image], seconds: Sequence[float] = ()) -> str:
    about = (images[0].mode, images[0].size, *seconds)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(about).encode())
    for image in images:
        digest.update(image.tobytes())
    return digest.hexdigest()


def sampling_options(
    module: Any,
    params: SamplingParams,
    *,
    seed: int,
    eos_ids: Sequence[int],
    banned_ids: Sequence[int],
    whole: bool = True,
) -> vllm.SamplingParams:
    """Return vLLM's parameters of one response; with `whole` it is given out once, when it has ended.

    Args:
        module: the vllm module.
        params: those of all responses.
        seed: of this response.
        eos_ids: tokens that end it.
        banned_ids: tokens that are never sampled.
        whole: give the response out once; otherwise as it grows.
    """
    kinds = module.sampling_params.RequestOutputKind
    # Not from_optional(): that clamps a bias to -100, and a large enough logit would get past it.
    return module.SamplingParams(
        n=1,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
        max_tokens=params.max_tokens,
        seed=seed,
        stop_token_ids=list(eos_ids),
        logit_bias=dict.fromkeys(banned_ids, -float("inf")) or None,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=kinds.FINAL_ONLY if whole else kinds.CUMULATIVE,
    )


def scoring_options(module: Any, *, top_k: int) -> vllm.SamplingParams:
    """Return vLLM's parameters of a prompt whose tokens are scored, with the most likely ids in the place of each.

    vLLM scores prompts at temperature 1 and bans no id there. One token is sampled, since none cannot be.
    """
    return module.SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=top_k,
        flat_logprobs=True,
        detokenize=False,
        output_kind=module.sampling_params.RequestOutputKind.FINAL_ONLY,
    )
