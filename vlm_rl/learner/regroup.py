"""Cut DeepSpeed's masters and moments again, for a different number of ranks or a different ZeRO stage.

ZeRO 0 keeps them by parameter. ZeRO 1 and 2 keep, for each group of parameters, one flat row of all its numbers,
padded behind its end and cut into a part for each rank. ZeRO 3 cuts each parameter by itself and pads it; a rank's
parts of a group follow each other, in one tensor or several. So in every stage a group is the numbers of its
parameters, in their order. `saved_groups` finds them in the files, and `regrouped` cuts from them what this rank
holds. Nothing is computed: every number is copied, and only a rank's own numbers are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

FLAT_MASTERS, FLAT_MOMENTS = "single_partition_of_fp32_groups", "base_optimizer_state"  # of ZeRO 1 and 2
SHARDED_MASTERS, SHARDED_MOMENTS = "fp32_flat_groups", "optimizer_state_dict"  # of ZeRO 3

# Flat tensors that follow each other: the numbers of a group's parameters, without padding.
Numbers = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group of parameters, as any stage has saved it."""

    masters: Numbers
    moments: Mapping[str, Numbers]  # by the optimizer's names
    scalars: Mapping[str, Any]  # the rest of the state, the same for every parameter: the number of steps
    options: Mapping[str, Any]  # the optimizer's options of the group


def parameter_groups(optimizer: Any) -> list[list[Any]]:
    """Return the parameters of each group of an engine's optimizer, in the order of their numbers."""
    if hasattr(optimizer, "fp16_groups"):  # ZeRO 3
        groups: dict[int, list[Any]] = {}
        for number, sub_group in enumerate(optimizer.fp16_groups):
            groups.setdefault(optimizer.sub_group_to_group_id[number], []).extend(sub_group)
        return [groups[number] for number in sorted(groups)]
    for name in ("bit16_groups", "bf16_groups"):  # ZeRO 1 and 2, and ZeRO 1 in bfloat16
        if hasattr(optimizer, name):
            return [list(group) for group in getattr(optimizer, name)]
    return [list(group["params"]) for group in optimizer.param_groups]


def stage_of(shards: Sequence[Mapping[str, Any]]) -> int:
    """Return the ZeRO stage that wrote these states."""
    if not shards:
        return 0
    # The state of ZeRO 1 in bfloat16 does not name its stage.
    return 3 if SHARDED_MASTERS in shards[0] else int(shards[0].get("zero_stage", 1))


def saved_groups(shards: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Any]]) -> list[SavedGroup]:
    """Return the groups that ZeRO 1, 2 or 3 saved.

    Args:
        shards: the "optimizer_state_dict" of every rank that saved, in their order.
        groups: the parameters of each group, whole or sharded.

    Raises ValueError if the shards are not of these parameters.
    """
    is_sharded = stage_of(shards) == 3
    masters, moments = (SHARDED_MASTERS, SHARDED_MOMENTS) if is_sharded else (FLAT_MASTERS, FLAT_MOMENTS)
    options = shards[0][moments]["param_groups"]
    if len(groups) != len(options) or any(any(map(any, s.get("param_alignment_paddings", ()))) for s in shards):
        raise ValueError("the groups of parameters differ")
    found = []
    for parameters, group in zip(groups, options, strict=True):
        numbers: list[int] = group["params"]  # of the group's tensors; the same on every rank
        sizes = [_numel(parameter) for parameter in parameters]
        join = partial(_joined_parts if is_sharded else _joined_row, sizes=sizes)
        state = shards[0][moments]["state"].get(numbers[0], {})
        names = [key for key, value in state.items() if isinstance(value, Tensor) and value.ndim]
        found.append(
            SavedGroup(
                join([[shard[masters][n] for n in numbers] for shard in shards]),
                {
                    key: join([[shard[moments]["state"][n][key] for n in numbers] for shard in shards])
                    for key in names
                },
                {key: value for key, value in state.items() if key not in names},
                group,
            )
        )
    return found


def whole_groups(
    optimizer_state: Mapping[str, Any], weights: Mapping[str, Tensor], names: Sequence[Sequence[str]]
) -> list[SavedGroup]:
    """Return the groups that ZeRO 0 saved, whose masters are the weights.

    A parameter that never had a gradient has no state. Other stages give it moments of 0 and the steps of the others.

    Args:
        optimizer_state: of the optimizer.
        weights: by name.
        names: of the parameters of each group, in their order.

    Raises ValueError if the states are of other parameters, or the parameters took different numbers of steps.
    """
    options = optimizer_state["param_groups"]
    if [len(group["params"]) for group in options] != list(map(len, names)):
        raise ValueError("the groups of parameters differ")
    states: Mapping[int, Mapping[str, Any]] = optimizer_state["state"]
    found = []
    for group, of_group in zip(options, names, strict=True):
        masters = [weights[name].reshape(-1) for name in of_group]
        known = [states[number] for number in group["params"] if states.get(number)]
        first = known[0] if known else {}
        moments = [key for key, value in first.items() if isinstance(value, Tensor) and value.ndim]
        scalars = {key: value for key, value in first.items() if key not in moments}
        if any(state[key] != value for state in known for key, value in scalars.items()):
            raise ValueError("parameters of one group have taken different numbers of steps")
        empty: Mapping[str, Tensor] = {}
        by_number = [
            (states.get(number, empty), master) for number, master in zip(group["params"], masters, strict=True)
        ]
        numbers = {
            key: [state[key].reshape(-1) if state else torch.zeros_like(master) for state, master in by_number]
            for key in moments
        }
        found.append(SavedGroup(masters, numbers, scalars, group))
    return found


def regrouped(optimizer: Any, groups: Sequence[SavedGroup], *, zero_stage: int, rank: int) -> dict[str, Any]:
    """Return the state that this rank's optimizer loads, of any stage.

    Args:
        optimizer: the engine's, of as many ranks as there are now.
        groups: as they were saved.
        zero_stage: of the optimizer.
        rank: this one.
    """
    states: dict[int, dict[str, Any]] = {}
    masters: list[Tensor] = []
    options: list[dict[str, Any]] = []
    for cut, group in zip(_cuts(optimizer, zero_stage, rank), groups, strict=True):
        mine = cut(group.masters)
        numbers = [len(masters) + n for n in range(len(mine))]
        if group.moments or group.scalars:
            parts = {key: cut(moment) for key, moment in group.moments.items()}
            for n, number in enumerate(numbers):
                # The optimizer counts up in place: each state has a number of steps of its own.
                scalars = {
                    key: value.clone() if isinstance(value, Tensor) else value for key, value in group.scalars.items()
                }
                states[number] = {**scalars, **{key: tensors[n] for key, tensors in parts.items()}}
        masters += mine
        options.append({**group.options, "params": numbers})
    moments = {"state": states, "param_groups": options}
    if zero_stage == 0:
        return moments
    names = (SHARDED_MASTERS, SHARDED_MOMENTS) if zero_stage == 3 else (FLAT_MASTERS, FLAT_MOMENTS)
    return {**optimizer.state_dict(), **dict(zip(names, (masters, moments), strict=True))}


def write_weights(optimizer: Any, groups: Sequence[SavedGroup]) -> None:
    """Round the masters into the parameters of ZeRO 0, 1 or 2, which every rank holds whole."""
    for parameters, group in zip(parameter_groups(optimizer), groups, strict=True):
        ends = [0, *accumulate(parameter.numel() for parameter in parameters)]
        for parameter, (start, end) in zip(parameters, pairwise(ends), strict=True):
            parameter.data.copy_(_numbers(group.masters, start, end).view_as(parameter))


def _cuts(optimizer: Any, zero_stage: int, rank: int) -> list[Callable[[Numbers], list[Tensor]]]:
    """Return, for each group, a function that cuts its numbers into the tensors of this rank's optimizer."""
    groups = parameter_groups(optimizer)
    if zero_stage == 0:
        return [_cut_whole(group) for group in groups]
    if zero_stage == 3:
        sub_groups: list[list[Sequence[Any]]] = [[] for _ in groups]
        for number, sub_group in enumerate(optimizer.fp16_groups):
            sub_groups[optimizer.sub_group_to_group_id[number]].append(sub_group)
        return [_cut_parameters(each, rank) for each in sub_groups]
    is_usual = hasattr(optimizer, "bit16_groups")
    parts = optimizer.single_partition_of_fp32_groups if is_usual else optimizer.fp32_groups_flat_partition
    return [_cut_row(len(part), rank) for part in parts]


def _cut_whole(parameters: Sequence[Any]) -> Callable[[Numbers], list[Tensor]]:
    """Cut into whole parameters, as ZeRO 0 keeps them."""
    ends = [0, *accumulate(parameter.numel() for parameter in parameters)]

    def cut(row: Numbers) -> list[Tensor]:
        return [
            _numbers(row, start, end).view_as(parameter)
            for parameter, (start, end) in zip(parameters, pairwise(ends), strict=True)
        ]

    return cut


def _cut_row(size: int, rank: int) -> Callable[[Numbers], list[Tensor]]:
    """Cut a row into one part of `size` numbers for each rank, as ZeRO 1 and 2 do."""
    return lambda row: [_padded(_numbers(row, rank * size, (rank + 1) * size), size)]


def _cut_parameters(sub_groups: Sequence[Sequence[Any]], rank: int) -> Callable[[Numbers], list[Tensor]]:
    """Cut parameter by parameter, into tensors of the optimizer's sub-groups, as ZeRO 3 does."""

    def cut(row: Numbers) -> list[Tensor]:
        tensors, begin = [], 0
        for sub_group in sub_groups:
            parts = []
            for parameter in sub_group:
                size, end = parameter.partition_numel(), begin + parameter.ds_numel
                start = min(begin + rank * size, end)
                parts.append(_padded(_numbers(row, start, min(start + size, end)), size))
                begin = end
            tensors.append(torch.cat(parts))
        return tensors

    return cut


def _joined_row(saved: Sequence[Sequence[Tensor]], *, sizes: Sequence[int]) -> Numbers:
    """Return the numbers of a group of ZeRO 1 or 2, whose parameters have these sizes, from each rank's tensors."""
    length = sum(sizes)
    row = [tensor for tensors in saved for tensor in tensors]
    if (total := sum(map(len, row))) < length:
        raise ValueError(f"{total} numbers of a group are saved, and its parameters have {length}")
    return _views(row, 0, length)


def _joined_parts(saved: Sequence[Sequence[Tensor]], *, sizes: Sequence[int]) -> Numbers:
    """Return the numbers of a group of ZeRO 3, whose parameters have these sizes, from each rank's tensors."""
    parts = [-(-size // len(saved)) for size in sizes]
    if (total := sum(map(len, saved[0]))) != sum(parts):
        raise ValueError(f"{total} numbers of a group are saved, and its parameters need {sum(parts)}")
    row: list[Tensor] = []
    for size, part, start in zip(sizes, parts, accumulate(parts, initial=0), strict=False):
        for number, tensors in enumerate(saved):
            row += _views(tensors, start, start + max(0, min(part, size - number * part)))
    return row


def _numel(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def _views(tensors: Sequence[Tensor], start: int, end: int) -> list[Tensor]:
    """Return the numbers [start, end) of tensors that follow each other, as views."""
    begins = accumulate((len(tensor) for tensor in tensors), initial=0)
    pieces = (tensor[max(start - at, 0) : max(end - at, 0)] for at, tensor in zip(begins, tensors, strict=False))
    return [piece for piece in pieces if len(piece)]


def _numbers(tensors: Sequence[Tensor], start: int, end: int) -> Tensor:
    """Return a copy of the numbers [start, end) of tensors that follow each other."""
    return torch.cat(_views(tensors, start, end) or [tensors[0][:0]])


def _padded(numbers: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(numbers, (0, size - len(numbers)))
