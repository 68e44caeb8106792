"""vLLM's own OpenAI-compatible server of a tiny model, as a process beside the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.helpers.served import free_port

_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def vllm_server(model: Path, log: Path, *, seconds: float = 480) -> Iterator[str]:
    """Serve the model as `tiny` until the context ends; yields the address up to /v1."""
    port = free_port()
    words = f"--served-model-name tiny --host 127.0.0.1 --port {port} --dtype float32 --max-model-len 2048"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words.split()]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--max-num-seqs", "4", "--enforce-eager"],
            env=os.environ | _ENVIRONMENT,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + seconds
        while not _is_ready(port):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):  # it starts others
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
