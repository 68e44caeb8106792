"""What runs in the process of a LimitedWorker (limited.py): import one function, and call it within limits."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any


def serve(options: dict[str, Any]) -> None:
    """Answer a call per line of stdin until it closes.

    Args:
        options: `function` as module.name, and the limits `cpu_seconds` of a call, `memory` in bytes beside what the
            process has after its imports, and `output` in bytes of a reply.
    """
    # Libraries may print: stdout is for replies alone.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module, _, name = options["function"].rpartition(".")
    function = getattr(importlib.import_module(module), name)
    limit_process(options["memory"])
    while line := sys.stdin.buffer.readline():
        reply = answer(function, line, options["cpu_seconds"])
        data = json.dumps(reply).encode()
        if len(data) > options["output"]:
            data = json.dumps({"limit": f"returned more than {options['output'] >> 20} MiB"}).encode()
        replies.write(data + b"\n")
        replies.flush()


def limit_process(memory: int) -> None:
    """Limit this process: bytes beside what it has, no files written, no core dumps, and death by its CPU clock."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    kinds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        kinds[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for kind, value in kinds.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def answer(function: Any, line: bytes, cpu_seconds: float) -> dict[str, Any]:
    """Return the reply to one call; the kernel ends the process when the call's CPU time is used up."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return {"value": function(*json.loads(line))}
    except MemoryError:
        return {"limit": "needed more memory than it may take"}
    except BaseException as error:  # a panic of a library in Rust is no Exception
        return {"fault": f"{type(error).__name__}: {error}"[:500]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
