"""Say what to change where a run does not fit into memory."""

from __future__ import annotations

import torch

from vlm_rl.config import Config
from vlm_rl.learner.dry_run import dry_run
from vlm_rl.learner.fit import smaller_settings

_CPU_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation of torch failed, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )


def memory_advice(config: Config, error: BaseException, *, num_ranks: int) -> str:
    """Return what failed, what the plan had foreseen for each part, and the settings that make it smaller."""
    memory = dry_run(config, num_ranks=num_ranks).memory
    planned = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in memory.parts().items())
    smaller = list(smaller_settings(config))
    if config.rollout.sampler != "transformers":
        smaller.insert(-1, ("rollout.vllm={gpu_memory_utilization: 0.3}", "a smaller share for the engine, on a GPU"))
    settings = "".join(f"\n  {setting}  # {effect}" for setting, effect in smaller)
    return (
        f"out of memory: {_first_sentence(error)}\n"
        f"planned for the update on each of {num_ranks} ranks, GiB: {planned}; in all {memory.update / 2**30:.1f} "
        f"(`--dry-run` shows the rest). To take less:{settings}"
    )


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text[text.find(_CPU_ALLOCATOR) :] if _CPU_ALLOCATOR in text else text
    return f"{text.split('. ')[0].rstrip('.')}."
