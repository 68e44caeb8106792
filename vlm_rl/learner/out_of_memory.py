"""Say what to change where a run does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from vlm_rl.config import Config, SftConfig, with_overrides
from vlm_rl.errors import UserError
from vlm_rl.learner.dry_run import dry_run, without_sampling
from vlm_rl.learner.fit import smaller_settings

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


def memory_advice(config: Config | SftConfig, error: BaseException, *, num_ranks: int) -> str:
    """Return what failed, what the plan had foreseen for each part, and the settings that make it smaller."""
    samples = isinstance(config, Config)
    config = config if isinstance(config, Config) else without_sampling(config)
    memory = dry_run(config, num_ranks=num_ranks).memory
    planned = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in memory.parts().items())
    smaller = [item for item in smaller_settings(config) if _goes_with(config, item[0])]
    if not samples:
        smaller = [item for item in smaller if not item[0].startswith("rollout.")]
        smaller.append((f"data.max_response_tokens={config.rollout.max_tokens // 2}", "shorter responses"))
    elif config.rollout.sampler != "transformers":
        smaller.insert(-1, ("rollout.vllm={gpu_memory_utilization: 0.3}", "a smaller share for the engine, on a GPU"))
    settings = "".join(f"\n  {setting}  # {effect}" for setting, effect in smaller)
    return (
        f"out of memory: {_first_sentence(error)}\n"
        f"planned for the update on each of {num_ranks} ranks, GiB: {planned}; in all {memory.update / 2**30:.1f} "
        f"(`--dry-run` shows the rest). To take less:{settings}"
    )


def _goes_with(config: Config, setting: str) -> bool:
    try:
        with_overrides(config, [setting])
    except UserError:
        return False
    return True


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text[text.find(_CPU_ALLOCATOR) :] if _CPU_ALLOCATOR in text else text
    return f"{text.split('. ')[0].rstrip('.')}."
