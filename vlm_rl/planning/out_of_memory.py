"""Say what to change where a run does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from vlm_rl.config import Config, SftConfig
from vlm_rl.errors import UserError
from vlm_rl.planning.dry_run import dry_run, without_sampling
from vlm_rl.planning.fits import single_settings

_CPU_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation of torch failed, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )


@contextmanager
def advised(advice: Callable[[BaseException], str]) -> Iterator[None]:
    """Turn a failed allocation of torch into a UserError with this advice."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise UserError(advice(error)) from error
        raise


def eval_memory_advice(error: BaseException) -> str:
    """Return what failed in an evaluation, and what makes it smaller."""
    return (
        f"out of memory: {_first_sentence(error)} To take less: a smaller --max-tokens or --max-prompt-tokens; on "
        "GPUs --tensor-parallel N under torchrun; or end what else holds the memory"
    )


def memory_advice(config: Config | SftConfig, error: BaseException) -> str:
    """Return what failed, what the plan had foreseen for each part, and the settings that make it smaller."""
    samples = isinstance(config, Config)
    config = config if isinstance(config, Config) else without_sampling(config)
    plan = dry_run(config)
    planned = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in plan.memory.parts().items())
    smaller = single_settings(config, samples=samples)
    if samples and config.rollout.sampler in ("auto", "vllm"):
        smaller.insert(-1, ("rollout.vllm={gpu_memory_utilization: 0.3}", "a smaller share for the engine, on a GPU"))
    settings = "".join(f"\n  {setting}  # {effect}" for setting, effect in smaller)
    return (
        f"out of memory: {_first_sentence(error)}\n"
        f"planned for the update on each of {plan.num_ranks} ranks, GiB: {planned}; in all "
        f"{plan.memory.update / 2**30:.1f} "
        f"(`--dry-run` shows the rest). To take less, in a new run:{settings}"
    )


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text[text.find(_CPU_ALLOCATOR) :] if _CPU_ALLOCATOR in text else text
    return f"{text.split('. ')[0].rstrip('.')}."
