"""What runs inside the worker of a vLLM server: weights from the learner over gloo, and the proof of what it holds.

`vlm-rl serve` names WorkerExtension as vLLM's worker_extension_cls. vLLM imports this module in each worker, and that
registers the gloo engine. On GPUs vLLM's own NCCL engine receives the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vlm_rl.samplers.remote.gloo_link import join, receive
from vlm_rl.samplers.vllm.start import leave_refusals
from vlm_rl.samplers.vllm.worker import forget_expert_kernels, repack_heads, worker_buffers, worker_checksums


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the learner, rank 0 of a group, waits for the workers of this server."""

    master_address: str
    master_port: int
    world_size: int  # of the group
    seconds: float  # for joining, and for each tensor


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of one part of an update, in the order in which they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives weights over TCP, for servers without a GPU."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the learner's group; an earlier group, of a learner that has gone, is dropped."""
        self.group = None
        timeout = timedelta(seconds=init_info.seconds)
        self.group = join(
            init_info.master_address,
            init_info.master_port,
            rank=1 + self.parallel_config.rank,
            size=init_info.world_size,
            timeout=timeout,
        )

    def start_weight_update(self) -> None:
        """Prepare the model for weights in the layout of a checkpoint."""
        forget_expert_kernels(self)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive one tensor after the other and load it."""
        assert self.group is not None, "init_transfer_engine comes first"
        model: Any = self.model
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = receive(self.group, dtype=getattr(torch, dtype), shape=shape)
            model.load_weights([(name, tensor.to(self.device))])

    def finish_weight_update(self) -> None:
        """Finish the reload, packed copies included."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self)

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None

    def get_model(self) -> torch.nn.Module:
        """Return the model, as a worker does."""
        return self.model


if "gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("gloo", GlooTransferEngine)


leave_refusals()


class WorkerExtension:
    """Methods that vLLM adds to its worker; the learner calls them through /collective_rpc."""

    def vlm_rl_proof(self, layout: str, dtype: str) -> dict[str, Any]:
        """Return the checksums of this worker's shards, and the digest of each of its buffers.

        Args:
            layout: JSON of the learner's names and shapes; "" leaves the checksums out.
            dtype: to which the elements are rounded.
        """
        self.vlm_rl_end_update()
        proof: dict[str, Any] = {"buffers": worker_buffers(self)}
        if layout:
            shapes = {name: tuple(shape) for name, shape in json.loads(layout).items()}
            held = worker_checksums(self, layout=shapes, dtype=getattr(torch, dtype))
            proof["shards"] = {place: f"{checksum:x}" for place, checksum in held.items()}
        return proof

    def vlm_rl_end_update(self) -> dict[str, Any]:
        """End an update that its learner left unfinished: tensors without values get the earlier ones.

        The model is a mixture then; the next update replaces every weight.
        """
        worker: Any = self
        if any(get_layerwise_info(layer).can_load() for layer in worker.get_model().modules()):
            with set_current_vllm_config(worker.vllm_config):
                worker.weight_transfer_engine.finish_weight_update()
        worker._weight_update_active = False
        return {}
