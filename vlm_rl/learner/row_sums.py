"""The sums of the gradients of a step's rows, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vlm_rl.config import TrainConfig


def are_summed_here(config: TrainConfig, dtype: torch.dtype, ranks: int) -> bool:
    """Tell whether `sum_rows` applies: ZeRO 2 with float32 sums of bfloat16 gradients, whole on one rank's device.

    Args:
        config: the ZeRO stage, and train.deepspeed.
        dtype: of the weights.
        ranks: of the run.
    """
    is_ours = not config.deepspeed.keys() & {"bf16", "data_types"}  # the dtypes of sums and masters
    on_device = config.offload_device("offload_optimizer") == "none"
    return config.zero_stage == 2 and dtype == torch.bfloat16 and ranks == 1 and on_device and is_ours


def sum_rows(engine: Any) -> None:
    """Add each row's gradients to DeepSpeed's float32 sums as soon as they are there, and to nothing else.

    DeepSpeed copies each gradient into a bucket, reduces the bucket over the one rank, takes it apart and adds the
    parts: a fifth of what the host does for a row (perf/row_sums.py). The sums have the same bits.

    Args:
        engine: a DeepSpeed engine for which `are_summed_here`.
    """
    zero = engine.optimizer
    for hook in zero._grad_acc_hooks:
        hook.remove()
    engine.enable_backward_allreduce = False  # else each backward pass would empty buckets that are not there
    zero._grad_acc_hooks[:] = [
        parameter.register_post_accumulate_grad_hook(_adder(zero, group, parameter))
        for group, parameters in enumerate(zero.bit16_groups)
        for parameter in parameters
        if parameter.requires_grad
    ]


def _adder(zero: Any, group: int, parameter: Tensor) -> Callable[[Tensor], None]:
    begin = zero.grad_partition_insertion_offset[group][0][zero.get_param_id(parameter)]
    end = begin + parameter.numel()

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        sums = zero._get_compact_grad_partition_buffer(group).flat_partition  # zeros after each step
        sums[begin:end].add_(parameter.grad.view(-1))
        parameter.grad = None

    return add
