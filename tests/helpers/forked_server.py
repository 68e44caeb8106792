"""`vlm-rl serve` whose engine and worker are forked: vLLM starts them anew, and each imports everything for 10 s.

They also sleep while they wait for each other. vLLM's own yield the processor, for a second after each message: two
servers then take most of two cores from the learner that they serve.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

from vlm_rl.cli import main

_get_context = multiprocessing.get_context


def _forking(method: str | None = None) -> BaseContext:
    """Return the context that forks. vLLM asks for it before it starts a process, when its modules are there."""
    queues: Any = sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")
    if queues is not None:
        queues.sched_yield = partial(time.sleep, 0.0005)
    return _get_context("fork" if method == "spawn" else method)


if __name__ == "__main__":
    multiprocessing.get_context = _forking  # type: ignore[assignment]
    sys.exit(main())
