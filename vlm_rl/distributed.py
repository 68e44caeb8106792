"""Ranks: how a process joins its group, the few collectives on plain values that training needs, signs of life."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from vlm_rl.devices import has_gpu
from vlm_rl.errors import UserError

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(hours=2)  # for one wait, however large the save; a rank that died is noticed at once


def init_ranks() -> torch.device:
    """Join the process group that torchrun describes, or make one of a single rank, and return this rank's device.

    Raises UserError if the ranks cannot meet, such as at a port that is taken.
    """
    use_gpu = has_gpu()
    alone = "RANK" not in os.environ
    if alone:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # A single rank meets nobody, so nothing of it listens on a port.
        group: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if alone else {}
        if use_gpu:
            group["device_id"] = device  # NCCL connects here and now, and a barrier need not guess the card
        # Gloo beside NCCL: plain values are gathered from host memory, without a copy to the card and back.
        backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
        try:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, **group)
        except (dist.DistNetworkError, dist.DistStoreError) as error:  # a port that is taken, nobody who answers
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise UserError(
                f"the ranks cannot meet at {place} ({str(error).partition(chr(10))[0]}): give another MASTER_PORT "
                "(torchrun --master-port), or the address of rank 0's machine as MASTER_ADDR (--master-addr)"
            ) from error
    return device


def leave_ranks() -> None:
    """Leave the process group, if there is one, all ranks together. NCCL warns of a process that ends inside it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def from_main(make: Callable[[], T]) -> T:
    """Call ``make`` on rank 0 and return its result on every rank. A UserError raised there is raised on all."""
    result: tuple[T | None, UserError | None] = (None, None)
    if rank() == 0:
        try:
            result = (make(), None)
        except UserError as error:
            result = (None, error)
    value, error = all_gather(result)[0]
    if error is not None:
        raise error
    return value


_last: list[str] = ["none yet"]


def _note_collective(name: str) -> None:
    """Keep which collective this rank enters, and from where: the caller of our caller."""
    frame = sys._getframe(2)
    _last[0] = f"{name} of {frame.f_globals['__name__']}:{frame.f_lineno}"


def last_collective() -> str:
    """Say which collective of ours this rank entered last, and how many it has entered in all.

    A rank with a smaller number is the one that the others wait for.
    """
    if world_size() == 1:
        return "it has no other ranks"
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        number = group._get_sequence_number_for_group()
    except RuntimeError:  # a backend that does not count
        return f"its last collective of ours: {_last[0]}"
    return f"its last collective of ours: {_last[0]}; all of its collectives so far: {number}"


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() > 1:
        _note_collective("barrier")
        dist.barrier()


def all_gather(value: Any) -> list[Any]:
    """Return every rank's (picklable) value, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    _note_collective("all_gather")
    dist.all_gather_object(values, value)
    return values


def share(whole: Sequence[T]) -> Sequence[T]:
    """Return this rank's part of a list that all ranks hold: every world_size-th item."""
    return whole[rank() :: world_size()]


def gather_shares(mine: Sequence[T]) -> list[T]:
    """Gather all ranks' results for their ``share`` on every rank, in the order of the whole list."""
    return merge_shares(all_gather(list(mine)))


def merge_shares(per_rank: Sequence[Sequence[T]]) -> list[T]:
    """Join the shares whole[rank::world_size] of all ranks into the whole list."""
    total = sum(map(len, per_rank))
    return [per_rank[index % len(per_rank)][index // len(per_rank)] for index in range(total)]


def all_reduce_sums(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return float64 sums over ranks; an array of n elements becomes n sums, NAME/1 to NAME/n.

    Keys may differ: a rank that computed only padding has none.
    """
    mine: dict[str, float] = {}
    for name, value in values.items():
        if value.ndim:
            mine |= {f"{name}/{place}": float(one) for place, one in enumerate(value.flatten().tolist(), 1)}
        else:
            mine[name] = float(value)
    total: dict[str, float] = {}
    for part in all_gather(mine):
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


# -- signs of life -----------------------------------------------------------------------------------

_signs: dict[str, Any] = {"number": 0, "doing": "the start"}


def alive(doing: str = "") -> None:
    """Note that this rank goes on: a phase begins, a token is sampled, a row is computed. Any thread may.

    With no words, it is still doing what the last ones said.
    """
    _signs["number"] += 1
    if doing:
        _signs["doing"] = doing


def signs_of_life() -> tuple[int, str]:
    """Return how many signs there were, and what the rank was last doing."""
    return _signs["number"], _signs["doing"]
