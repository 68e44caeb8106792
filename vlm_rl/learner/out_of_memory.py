"""Say what to change where a run does not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vlm_rl.config import Config
from vlm_rl.learner.dry_run import dry_run

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
    settings = "".join(f"\n  {line}" for line in _smaller(config))
    return (
        f"out of memory: {_first_sentence(error)}\n"
        f"planned for the update on each of {num_ranks} ranks, GiB: {planned}; in all {memory.update / 2**30:.1f} "
        f"(`--dry-run` shows the rest). To take less:{settings}"
    )


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text[text.find(_CPU_ALLOCATOR) :] if _CPU_ALLOCATOR in text else text
    return f"{text.split('. ')[0].rstrip('.')}."


def _smaller(config: Config) -> Iterator[str]:
    """Yield the settings that are left, those that cost least time first."""
    train, model, rollout = config.train, config.model, config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    if train.micro_batch_tokens > longest:
        yield f"train.micro_batch_tokens={longest}  # shorter rows, now {train.micro_batch_tokens} tokens"
    if not model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true  # activations are computed again"
    if train.zero_stage < 3 and not model.lora:
        yield f"train.zero_stage={train.zero_stage + 1}  # more is divided among the ranks"
    if "offload_optimizer" not in train.deepspeed.get("zero_optimization", {}):
        yield "train.deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}  # its moments in host memory"
    if train.zero_stage == 2 and rollout.sampler != "server" and not rollout.offload_optimizer:
        yield "rollout.offload_optimizer=true  # moments in host memory while responses are drawn"
    if model.lora is None:
        yield "model.lora={rank: 16}  # no gradients and moments of the model itself"
    if rollout.sampler != "transformers":
        yield "rollout.vllm={gpu_memory_utilization: 0.3}  # a smaller share for the engine, on a GPU"
    yield f"rollout.max_tokens={rollout.max_tokens // 2}  # shorter responses"
