"""What is done around the start of a vLLM engine in this process, which has a learner and a run of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from vlm_rl.distributed import from_main

_COMPILER = ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS")  # the second, on a CPU


@contextmanager
def starting() -> Iterator[None]:
    """Keep the start of an engine from changing this process."""
    with _memory_left_alone(), threads_kept(), compiler_kept(), _own_shared_memory():
        yield


@contextmanager
def _memory_left_alone() -> Iterator[None]:
    """Keep vLLM's CPU worker from binding this process's memory, the learner's too, to one NUMA node."""
    operators: Any = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        del operators.init_cpu_memory_env  # torch looks it up again at its next use


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads, and the function that sets it, which vLLM's CPU worker replaces.

    On a GPU vLLM leaves one thread to this process, in which an offloaded optimizer computes on the host.
    """
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        set_threads(threads)


@contextmanager
def compiler_kept() -> Iterator[None]:
    """Restore what vLLM sets for torch's compiler: one process that compiles, here and in what is started from here.

    These are variables of the environment, which torch itself has read by the time that this file is imported.
    """
    before = {name: os.environ.get(name) for name in _COMPILER}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_shared_memory() -> Iterator[None]:
    """Give this run's engines shared memory of their own.

    Without a GPU the ranks of an engine reduce in shared memory, which vLLM names after the end of the address where
    they meet. To a launcher's ranks that is env:// in every run, so two runs on a machine would share it, and what a
    killed run left behind would keep every later one from starting. The name goes once all ranks have joined.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    method = ExecutorWithExternalLauncher._distributed_args
    name = from_main(lambda: f"vlm-rl-{uuid4().hex}")

    def with_name(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        _, rank, local_rank = method(self)
        return f"env://:{name}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = with_name
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = method
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink(missing_ok=True)
