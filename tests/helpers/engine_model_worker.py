"""One rank of test_engine_models.py: vLLM's model of a family takes the learner's weights, and is read back.

Its engine computes these families on a GPU alone. Their modules, loaders and names are the same here, where nothing
packs what was loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.groups import load_reference
from vlm_rl.distributed import all_gather, init_ranks, rank, world_size
from vlm_rl.model_files.checkpoint_layout import as_published
from vlm_rl.model_files.weights import sent_tensors
from vlm_rl.samplers.fingerprint import Fingerprint, fingerprint, join_shards
from vlm_rl.samplers.vllm.worker import worker_checksums

DTYPE = torch.bfloat16


def main(_: str, out: str, *folders: str) -> int:
    """Write what is found of each folder's model, by the name of the folder, as JSON."""
    init_ranks()
    found = {Path(folder).name: checks(Path(folder)) for folder in folders}
    if rank() == 0:
        Path(out).write_text(json.dumps(found))
    return 0


def checks(folder: Path) -> dict[str, Any]:
    """Return which of the engine's weights were not loaded, and whether the proof holds: of both sorts of engine."""
    tensors = [(name, tensor.detach().to(DTYPE)) for name, tensor in sent_tensors(load_reference(folder))]
    expected, published = fingerprint(tensors, dtype=DTYPE), as_published(str(folder))
    result: dict[str, Any] = {}
    for tensor_parallel in (1, world_size()):
        with engine_model(folder, tensor_parallel) as model:
            loaded = model.load_weights(published(iter(tensors)))
            missing = sorted({name for name, _ in model.named_parameters()} - loaded)
            proof = holds(model, expected, tensor_parallel)
            unseen = [name for name, weight in model.named_parameters() if is_unseen(model, weight, expected)]
        result[str(tensor_parallel)] = {"missing": missing, "proof": proof, "unseen": unseen}
    return result


def holds(model: nn.Module, expected: Fingerprint, tensor_parallel: int) -> bool:
    """Tell whether the ranks of an engine hold the learner's weights together."""
    shards = checksums(model, expected)
    return join_shards([shards] if tensor_parallel == 1 else all_gather(shards), expected.layout) == expected


def checksums(model: nn.Module, expected: Fingerprint) -> dict[str, int]:
    worker = SimpleNamespace(get_model=lambda: model)
    return worker_checksums(worker, layout=expected.layout, dtype=DTYPE)


@torch.no_grad()
def is_unseen(model: nn.Module, weight: Tensor, expected: Fingerprint) -> bool:
    """Tell whether the proof stays as it is where the last element of a weight changes."""
    before, last = checksums(model, expected), weight.view(-1)[-1:]
    kept = last.clone()
    last.add_(1)
    after = checksums(model, expected)
    last.copy_(kept)
    return before == after


@contextmanager
def engine_model(folder: Path, tensor_parallel: int) -> Iterator[Any]:
    """Yield vLLM's model of a folder on this rank, its weights empty."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    options: dict[str, Any] = {"distributed_executor_backend": "external_launcher"} if tensor_parallel > 1 else {}
    config = EngineArgs(
        model=str(folder), dtype="bfloat16", max_model_len=256, tensor_parallel_size=tensor_parallel, **options
    ).create_engine_config()
    shared = f"{os.environ['MASTER_PORT']}-{folder.name}"
    os.environ["VLLM_DIST_IDENT"] = shared  # names the memory in which ranks reduce; vLLM leaves it behind
    with set_current_vllm_config(config):
        init_distributed_environment(world_size(), rank(), "env://", 0, backend="gloo")
        ensure_model_parallel_initialized(tensor_parallel, 1)
        with set_default_torch_dtype(DTYPE):
            yield initialize_model(vllm_config=config)
        destroy_model_parallel()
    for path in Path("/dev/shm").glob(f"{shared}-tp:*"):
        path.unlink(missing_ok=True)
