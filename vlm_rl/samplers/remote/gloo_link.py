"""A gloo group of the learner and a server's workers: weights over TCP, one tensor at a time. Imports no vllm.

Each server has a group of its own, so that one that dies or stops breaks no other.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroupGloo


def address_towards(host: str) -> str:
    """Return this machine's address on the way to a host; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def open_store(address: str, *, timeout: timedelta) -> TCPStore:
    """Open the store of a group on one address of this machine; torch would listen on all of them.

    Whoever reaches the address can write into the store: it asks for no token (SECURITY.md).
    """
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as door:
        door.bind((address, 0))
        door.listen()
        port = door.getsockname()[1]
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=door.detach()
        )


def join(host: str, port: int, *, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Join the learner's group, from a server's worker.

    Args:
        host: of the learner's store.
        port: of the learner's store.
        rank: of this worker, from 1 on; the learner has 0.
        size: of the group, the learner included.
        timeout: of the store, and of every tensor.

    Raises RuntimeError after the timeout.
    """
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    return join_store(store, host, rank=rank, size=size, timeout=timeout)


def join_store(store: TCPStore, peer: str, *, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Join the group with this store.

    Args:
        store: of the group.
        peer: host of the other side, which decides from which address of this machine to connect.
        rank: of this process in the group; the learner has 0.
        size: of the group, the learner included.
        timeout: of joining, and of every tensor.

    Raises RuntimeError after the timeout.
    """
    gloo: Any = ProcessGroupGloo  # the stubs lack what follows
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(peer))]
    return gloo(store, rank, size, options)


def send(group: Any, tensor: Tensor) -> None:
    """Send a tensor's bytes. Raises RuntimeError if the other side is gone, or takes longer than the timeout."""
    data = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    if data.numel():
        group.broadcast(data, 0).wait()


def receive(group: Any, *, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the tensor that the other side sends."""
    data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    if data.numel():
        group.broadcast(data, 0).wait()
    return data.view(dtype).view(*shape)
