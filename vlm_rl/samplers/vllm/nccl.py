"""The learner's end of a group of vLLM's own NCCL engine. It has not been run, for want of two GPUs.

NCCL knows no time limit: `join` and `send` may block for ever where the server is gone or hangs. They belong in a
thread of their own; `abort`, called from another one, ends what they wait for.
"""

from __future__ import annotations

import math
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from vlm_rl.devices import default_device
from vlm_rl.samplers.vllm.engine import import_vllm


class NcclGroup:
    """One server's workers and the learner, on a stream that nothing else waits for."""

    def __init__(self, address: str, *, workers: int, seconds: float) -> None:
        """Listen on a free port of this address, where the server's workers join in so many seconds."""
        import_vllm()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._door = socket.create_server((address, 0), family=family)
        self._size, self._seconds = 1 + workers, seconds
        self._communicator: Any = None
        self._calling, self._is_aborted = threading.Lock(), False
        self._stream = torch.cuda.Stream(default_device())
        self.init_info = {
            "master_address": address,
            "master_port": self._door.getsockname()[1],
            "world_size": self._size,
            "rank_offset": 1,
            "packed": False,
        }

    def join(self) -> None:
        """Wait for the server. Raises RuntimeError if it does not come, or NCCL cannot be loaded."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        # Not by StatelessProcessGroup.create: where nobody comes it closes the door a second time, when its number
        # may be that of a file which another thread has opened.
        store = TCPStore(
            self.init_info["master_address"],
            self.init_info["master_port"],
            world_size=self._size,
            is_master=True,
            timeout=timedelta(seconds=math.ceil(self._seconds)),
            use_libuv=False,
            master_listen_fd=self._door.detach(),
        )
        meeting = StatelessProcessGroup(rank=0, world_size=self._size, store=store)
        # Known before it is complete, since the first sum that completes it may have to be aborted too.
        self._communicator = PyNcclCommunicator.__new__(PyNcclCommunicator)
        with torch.cuda.stream(self._stream):
            self._communicator.__init__(meeting, device=self._stream.device)
        if self._communicator.disabled:
            raise RuntimeError("NCCL cannot be loaded")

    def send(self, tensor: Tensor) -> None:
        """Send one tensor. Raises RuntimeError once the group is aborted."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))  # which makes the tensors
            data = tensor.detach().to(self._stream.device).contiguous()  # NCCL reads on from the first element
            with self._calling:
                if self._is_aborted:
                    raise RuntimeError("its NCCL group was aborted")
                self._communicator.broadcast(data, src=0, stream=self._stream)
            self._stream.synchronize()

    def abort(self) -> None:
        """Leave the group without the server, and end what another thread waits for in it. Takes seconds at most."""
        is_between_calls = self._calling.acquire(timeout=1.0)  # otherwise one blocks, and nothing else ends it
        try:
            if not self._is_aborted and hasattr(self._communicator, "comm"):
                self._communicator.destroy()
            self._is_aborted = True
        finally:
            if is_between_calls:
                self._calling.release()
