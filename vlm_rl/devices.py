"""Where this process computes: the only file that asks whether there is a GPU, so that a test can answer.

`has_gpu` is one question for all that differs on a GPU. What is asked of the card itself (its memory, its name) is
here too. tests/test_architecture.py refuses these questions anywhere else.
"""

from __future__ import annotations

import os

import torch

_CPU_ALLOCATOR = "DefaultCPUAllocator"
PEAK_TFLOPS = {  # by a part of the card's name, the longer ones first
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}


def has_gpu() -> bool:
    """Tell whether this process has a CUDA GPU."""
    return torch.cuda.is_available()


def num_gpus() -> int:
    """Return the number of this machine's GPUs that torch can use."""
    return torch.cuda.device_count() if has_gpu() else 0


def gpu_memory(index: int | None = None) -> tuple[int, int]:
    """Return the free and the total bytes of a GPU; None for the current one."""
    return torch.cuda.mem_get_info(index)


def smallest_card() -> int | None:
    """Return the bytes of this machine's smallest GPU; None without one."""
    return min((torch.cuda.get_device_properties(index).total_memory for index in range(num_gpus())), default=None)


def gpu_names() -> set[str]:
    """Return the names of this machine's GPUs."""
    return {torch.cuda.get_device_name(index) for index in range(num_gpus())}


def gpu_capability() -> tuple[int, int]:
    """Return the compute capability of this process's GPU, such as (9, 0) of an H100."""
    return torch.cuda.get_device_capability()


def peak_rate() -> float | None:
    """Return the bfloat16 operations a second of this process's GPU by its data sheet, dense; None if unknown."""
    if not has_gpu():
        return None
    name = torch.cuda.get_device_name(None)
    return next((rate * 1e12 for part, rate in PEAK_TFLOPS.items() if part in name), None)


def reset_peak_memory() -> None:
    """Forget the peak of memory so far."""
    torch.cuda.reset_peak_memory_stats()


def peak_memory() -> tuple[int, int]:
    """Return the bytes that torch has allocated at most, and those of the card that were taken then, by whomever.

    Without those of an engine in this process. It has pools of its own, which torch goes on counting while it sleeps
    and the card has its memory back.
    """
    free, total = gpu_memory()
    released = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    here = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == torch.cuda.current_device()]
    pools = sum(segment["allocated_size"] for segment in here if tuple(segment["segment_pool_id"]) != (0, 0))
    return torch.cuda.max_memory_allocated() - pools, min(total, total - free + released)


def default_device() -> torch.device:
    """Return this process's device: its GPU, a different accelerator that torch knows, or the CPU."""
    if has_gpu():
        return torch.device("cuda", torch.cuda.current_device())
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def model_dtype(device: torch.device, setting: str = "auto") -> torch.dtype:
    """Return the dtype of a model's weights on the device: bfloat16 on an accelerator, float32 on a CPU.

    ``setting`` is model.dtype; anything but "auto" names the dtype itself.
    """
    if setting == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, setting)


class OutOfMemoryError(torch.OutOfMemoryError):
    """Memory ended in an update that is not repeated.

    Attributes:
        row_tokens: the most tokens of a row; fewer than configured once memory has ended before.
    """

    def __init__(self, message: str, *, row_tokens: int) -> None:
        super().__init__(message)
        self.row_tokens = row_tokens


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation of torch failed, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )


def tell_deepspeed_of_the_cpu() -> None:
    """Name the CPU to DeepSpeed before its import, where there is no GPU: it would warn that it guessed."""
    if not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def free_gpu_memory() -> None:
    """Give what torch keeps of freed memory back to the GPU, or to a different accelerator, if there is one."""
    if has_gpu():
        torch.cuda.empty_cache()
    elif torch.accelerator.is_available():
        torch.accelerator.empty_cache()
