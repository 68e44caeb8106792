"""Cut DeepSpeed's shards of masters and moments anew, for a different number of ranks.

ZeRO 1 and 2 keep, for each group of parameters, one flat row of all its numbers, padded behind its end and cut into
a part for each rank. ZeRO 3 cuts each parameter by itself and pads it. A rank's parts of a group lie behind each
other, in one tensor or several. Nothing is computed: every number is copied, and only a rank's own numbers are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
MOMENTS = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}

Cut = Callable[[Sequence[Sequence[Tensor]]], list[Tensor]]  # a group's tensors on each rank -> those of this rank


def regrouped(optimizer: Any, shards: Sequence[Mapping[str, Any]], *, zero_stage: int, rank: int) -> dict[str, Any]:
    """Return the state that this rank's ZeRO optimizer loads.

    Args:
        optimizer: DeepSpeed's, of ZeRO 1 to 3, as many ranks as there are now.
        shards: the "optimizer_state_dict" of every rank that saved, in their order.
        zero_stage: 1 to 3, the same as when they were saved.
        rank: this one.

    Raises ValueError where the shards are not of the same parameters.
    """
    masters, moments = MASTERS[zero_stage], MOMENTS[zero_stage]
    saved_groups = shards[0][moments]["param_groups"]
    cuts = _cuts_by_parameter(optimizer, len(shards), rank) if zero_stage == 3 else _cuts_of_rows(optimizer, rank)
    if len(cuts) != len(saved_groups) or any(any(map(any, s.get("param_alignment_paddings", ()))) for s in shards):
        raise ValueError("the groups of parameters differ")
    states: dict[int, dict[str, Any]] = {}
    new_masters: list[Tensor] = []
    groups: list[dict[str, Any]] = []
    for cut, group in zip(cuts, saved_groups, strict=True):
        numbers: list[int] = group["params"]  # of the group's tensors; the same on every rank
        whole = cut([[shard[masters][n] for n in numbers] for shard in shards])
        new_numbers = [len(new_masters) + n for n in range(len(whole))]
        for key, first in shards[0][moments]["state"].get(numbers[0], {}).items():
            parts: list[Any] = [first] * len(whole)
            if isinstance(first, Tensor) and first.ndim:
                parts = cut([[shard[moments]["state"][n][key] for n in numbers] for shard in shards])
            for number, part in zip(new_numbers, parts, strict=True):
                states.setdefault(number, {})[key] = part
        new_masters += whole
        groups.append({**group, "params": new_numbers})
    return {**shards[0], masters: new_masters, moments: {"state": states, "param_groups": groups}}


def _cuts_of_rows(optimizer: Any, rank: int) -> list[Cut]:
    """Return how each group of ZeRO 1 and 2 is cut: a row of as many numbers as its parameters have, then padding."""

    def cut_to(length: int, size: int) -> Cut:
        def cut(saved: Sequence[Sequence[Tensor]]) -> list[Tensor]:
            row = [tensor for tensors in saved for tensor in tensors]
            if (total := sum(map(len, row))) < length:
                raise ValueError(f"{total} numbers of a group are saved, and its parameters have {length}")
            return [_padded(_numbers(row, rank * size, min((rank + 1) * size, length)), size)]

        return cut

    if hasattr(optimizer, "bit16_groups"):
        groups, parts = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
    else:  # what DeepSpeed takes for ZeRO 1 in bfloat16 names them differently
        groups, parts = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    lengths = [sum(parameter.numel() for parameter in group) for group in groups]
    sizes = [len(part) for part in parts]
    return [cut_to(length, size) for length, size in zip(lengths, sizes, strict=True)]


def _cuts_by_parameter(optimizer: Any, saved_ranks: int, rank: int) -> list[Cut]:
    """Return how each group of ZeRO 3 is cut: parameter by parameter, into tensors of the optimizer's sub-groups."""

    def cut_to(sub_groups: Sequence[Sequence[Any]]) -> Cut:
        parameters = [parameter for sub_group in sub_groups for parameter in sub_group]
        ends = [0, *accumulate(-(-parameter.ds_numel // saved_ranks) for parameter in parameters)]

        def cut(saved: Sequence[Sequence[Tensor]]) -> list[Tensor]:
            if (total := sum(map(len, saved[0]))) != ends[-1]:
                raise ValueError(f"{total} numbers of a group are saved, and its parameters need {ends[-1]}")
            mine: dict[int, Tensor] = {}
            for parameter, (start, end) in zip(parameters, pairwise(ends), strict=True):
                size = parameter.partition_numel()
                whole = torch.cat([_numbers(tensors, start, end) for tensors in saved])[: parameter.ds_numel]
                mine[id(parameter)] = _padded(whole[rank * size : (rank + 1) * size], size)
            return [torch.cat([mine[id(parameter)] for parameter in sub_group]) for sub_group in sub_groups]

        return cut

    groups: dict[int, list[Sequence[Any]]] = {}
    for number, sub_group in enumerate(optimizer.fp16_groups):
        groups.setdefault(optimizer.sub_group_to_group_id[number], []).append(sub_group)
    return [cut_to(groups[number]) for number in sorted(groups)]


def _numbers(tensors: Sequence[Tensor], start: int, end: int) -> Tensor:
    """Return a copy of the numbers [start, end) of tensors that lie behind each other."""
    begins = accumulate((len(tensor) for tensor in tensors), initial=0)
    pieces = [tensor[max(start - at, 0) : max(end - at, 0)] for at, tensor in zip(begins, tensors, strict=False)]
    return torch.cat(pieces)


def _padded(numbers: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(numbers, (0, size - len(numbers)))
