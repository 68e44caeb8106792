"""What differs on a GPU: docs/gpu.md, "What runs where", as a table that is asked here and on a pretended GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Qwen3NextConfig

from tests.helpers.pretended_cuda import PretendedCuda
from vlm_rl import distributed
from vlm_rl.commands.real_quickstart import row_size
from vlm_rl.config import LoraConfig, ModelConfig, TrainConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import default_device, has_gpu, model_dtype
from vlm_rl.errors import UserError
from vlm_rl.learner.attention.shared_prefix import takes_flash
from vlm_rl.learner.checkpoint_size import checkpoint_bytes
from vlm_rl.learner.deepspeed import import_deepspeed, least_zero_stage
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.quantization import check_quantization
from vlm_rl.samplers.factory import _unsupported
from vlm_rl.samplers.vllm.options import engine_environment, shared_card, whole_card
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.quickstart import WarmStart, learning_rate

NORMS_AND_MLP = {"RMSNorm", "SiLU-gated MLP"}
HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None
TOWER = {"vision patch embedding", "vision attention"}


def dtype(_: Path) -> torch.dtype:
    return model_dtype(default_device())


def backends(_: Path) -> str:
    """Return the process group's backends, without joining one."""
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed.dist, "is_initialized", lambda: False)
        patch.setattr(distributed.dist, "init_process_group", lambda backend, **_: asked.append(backend))
        patch.setenv("RANK", "0")
        distributed.init_ranks()
    return asked[0]


def replaced_layers(model: Path) -> set[str]:
    return {*Policy(load_model(model, dtype=torch.float32), banned_ids=(1,), temperature=1.0).replaced_layers}


def flash_dtypes(_: Path) -> list[torch.dtype]:
    """Return the dtypes in which rows of whole heads take the GPU's flash kernel."""
    queries = [
        torch.zeros(1, 2, 8, 32, dtype=dtype, device=default_device())
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    return [query.dtype for query in queries if query.device.type != "cpu" and takes_flash(query, query, query)]


def four_bits(_: Path) -> str:
    try:
        check_quantization(ModelConfig(path="x", lora=LoraConfig(load_in_4bit=True)))
    except UserError as error:
        return str(error).partition(", ")[2].partition(":")[0]
    return "taken"


def frozen_copies(_: Path) -> float:
    """Return the copies of a frozen weight in a checkpoint of ZeRO 2: for the folder, the learner, DeepSpeed."""
    few, many = (
        checkpoint_bytes(TrainConfig(zero_stage=2), torch.bfloat16, total=total, trainable=4, on_gpu=has_gpu())
        for total in (4, 10)
    )
    return (many - few) / (10 - 4) / torch.bfloat16.itemsize


def kept_by_vllm(_: Path) -> set[str]:
    return engine_environment(on_cpu=not has_gpu()).keys() & {"TRITON_CACHE_DIR", "VLLM_CPU_KVCACHE_SPACE"}


def zero_stage(_: Path) -> int:
    """Return the least that the dtype allows: bfloat16 needs float32 masters."""
    return least_zero_stage(model_dtype(default_device()))


def engine(_: Path) -> dict[str, Any]:
    return shared_card(on_cpu=not has_gpu())


def engine_of_an_evaluation(_: Path) -> dict[str, Any]:
    return whole_card(on_cpu=not has_gpu())


def gemma_on_vllm(model: Path) -> str:
    builder = PromptBuilder(model, template=TEMPLATES["plain"])
    builder.config = Gemma3Config()
    return (_unsupported(builder) or "runs").partition(" among")[0]


def linear_attention_on_vllm(model: Path) -> str:
    builder = PromptBuilder(model, template=TEMPLATES["plain"])
    builder.config = Qwen3NextConfig()
    return (_unsupported(builder) or "runs").partition(",")[0]


def row_tokens_in_real_language(_: Path) -> dict[str, int]:
    return row_size()


def warm_batch(_: Path) -> int:
    return WarmStart.here().batch_size


def told_to_deepspeed(_: Path) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DS_ACCELERATOR", raising=False)
        import_deepspeed()
        return os.environ.pop("DS_ACCELERATOR", None)


def toy_rate(_: Path) -> float:
    return learning_rate()


TABLE: list[tuple[Callable[[Path], Any], Any, Any]] = [
    # what, on a CPU, on a GPU
    (dtype, torch.float32, torch.bfloat16),
    (zero_stage, 0, 2),
    (backends, "gloo", "cpu:gloo,cuda:nccl"),
    (replaced_layers, NORMS_AND_MLP | TOWER, {"vision attention"}),
    (flash_dtypes, [], [torch.float16, torch.bfloat16]),
    (
        four_bits,
        "and there is no GPU here",
        "taken" if find_spec("bitsandbytes") else "and bitsandbytes is not installed",
    ),
    (frozen_copies, 2, 3),
    (kept_by_vllm, {"VLLM_CPU_KVCACHE_SPACE"}, {"TRITON_CACHE_DIR"}),
    (engine, {"enable_sleep_mode": False}, {"enable_sleep_mode": True, "gpu_memory_utilization": 0.45}),
    (engine_of_an_evaluation, {}, {"gpu_memory_utilization": 0.85}),
    (gemma_on_vllm, "on a CPU vLLM's attention is causal", "runs"),
    (linear_attention_on_vllm, "on a CPU vLLM computes layers of linear attention only in bfloat16", "runs"),
    (row_tokens_in_real_language, {"micro_batch_tokens": 2048}, {}),
    (warm_batch, 8, 32),
    (toy_rate, 1e-4, 3e-5),
    (told_to_deepspeed, "cpu", None),
]


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def on_gpu(request: pytest.FixtureRequest) -> Iterator[bool]:
    with PretendedCuda() if request.param else nullcontext():
        yield request.param


@pytest.mark.parametrize(("what", "on_a_cpu", "on_a_gpu"), TABLE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_machine_gets_what_the_table_says(
    what: Callable[[Path], Any], on_a_cpu: Any, on_a_gpu: Any, on_gpu: bool, tiny_model: Path
) -> None:
    assert what(tiny_model) == (on_a_gpu if on_gpu else on_a_cpu)
