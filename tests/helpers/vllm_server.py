"""vLLM's own OpenAI-compatible server of a tiny model, as a process beside the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.served import free_port, wait_for_status

_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def vllm_server(model: Path, log: Path, *, seconds: float = 480) -> Iterator[str]:
    """Serve the model as `tiny` until the context ends; yields the address up to /v1."""
    port = free_port()
    words = f"--served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32 --max-model-len 8192"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words.split()]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--max-num-seqs", "4", "--enforce-eager"],
            env=os.environ | _ENVIRONMENT | {"TORCH_COMPILE_DISABLE": "0"},  # as a user's
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        wait_for_status(process, port, "/health", 200, log=log, seconds=seconds)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):  # it starts others
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
