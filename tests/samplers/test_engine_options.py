"""What vLLM is given on each device: a table, which needs neither vLLM nor a GPU."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.vllm import options as options_module
from vlm_rl.samplers.vllm.options import batch_invariance, check_media_limits, engine_options
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}


@pytest.fixture(scope="module")
def builder(tiny_model: Path) -> PromptBuilder:
    return PromptBuilder(tiny_model, template=TEMPLATES["plain"])


def options(builder: PromptBuilder, *, layers: int, on_cpu: bool, user: dict[str, Any], **changes: Any) -> Any:
    """Return the options for the tiny model with so many layers, for 32 responses of 1,024 tokens."""
    builder = copy(builder)
    builder.config = deepcopy(builder.config)
    builder.config.get_text_config().num_hidden_layers = layers
    shared = {"model_path": "model", "max_model_len": 1024, "batch_size": 32, "dtype": torch.bfloat16, "seed": 0}
    settings = EngineSettings(builder=builder, vllm_options=user, **(shared | changes))
    return engine_options(settings, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("on_cpu", "layers", "user", "eager"),
    [
        (True, 3, {}, True),
        (True, 36, {}, True),
        (True, 3, {"enforce_eager": False}, False),
        (False, 3, {}, True),  # as in the quickstart
        (False, 8, {}, True),
        (False, 9, {}, False),
        (False, 36, {}, False),  # Qwen2.5-VL-3B
        (False, 3, {"enforce_eager": False}, False),
        (False, 36, {"enforce_eager": True}, True),
        (False, 3, GRAPHS, False),  # who names graphs wants them
        (False, 3, {"optimization_level": 2}, False),
        (False, 3, {"gpu_memory_utilization": 0.3}, True),
    ],
)
def test_what_is_compiled(
    builder: PromptBuilder, on_cpu: bool, layers: int, user: dict[str, Any], eager: bool
) -> None:
    given = options(builder, layers=layers, on_cpu=on_cpu, user=user)
    assert given["enforce_eager"] is eager
    assert {key: given[key] for key in user} == user


@pytest.mark.parametrize(
    ("on_cpu", "layers", "user", "context", "cache"),
    [
        # 2 key-value heads of 32, 3 layers, keys and values of 2 bytes: 768 bytes a token, twice that is reserved
        (False, 3, {}, 1024, 2 * 768 * 32 * (1024 + 256)),
        (False, 3, {"enforce_eager": False}, 1024, 2 * 768 * 32 * (1024 + 256)),
        (False, 3, {"kv_cache_memory_bytes": 123}, 1024, 123),
        (False, 3, {}, 100_000, None),  # more than 4 GiB: the engine's share of the card decides
        (False, 36, {}, 1024, None),
        (True, 3, {}, 1024, None),  # VLLM_CPU_KVCACHE_SPACE decides
    ],
)
def test_the_cache_of_a_small_model_is_what_its_batch_can_fill(
    builder: PromptBuilder, on_cpu: bool, layers: int, user: dict[str, Any], context: int, cache: int | None
) -> None:
    given = options(builder, layers=layers, on_cpu=on_cpu, user=user, max_model_len=context)
    assert given.get("kv_cache_memory_bytes") == cache


def test_states_of_linear_attention_are_not_counted_as_keys_and_values(builder: PromptBuilder) -> None:
    builder = copy(builder)
    builder.config = deepcopy(builder.config)
    builder.config.get_text_config().layer_types = ["linear_attention", "linear_attention", "full_attention"]
    assert "kv_cache_memory_bytes" not in options(builder, layers=3, on_cpu=False, user={})


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        ({"image": 1}, "1 images, and problem 'b' has 2"),
        ({"image": {"count": 1, "width": 64}}, "1 images, and problem 'b' has 2"),
        ({"image": 0}, "0 images, and problem 'a' has 1"),
        ({"image": 2, "video": 0}, "0 videos, and problem 'c' has 1"),
        ({"image": 2, "video": 1, "audio": 0}, None),
        ({"image": {"width": 64}}, None),
        ({}, None),
    ],
)
def test_a_limit_below_what_a_problem_has_is_refused_before_the_engine_starts(
    limits: dict[str, Any], refused: str | None
) -> None:
    """The frames of a video are among a problem's images, and are none of an engine's."""
    problems = [
        Problem("text", "", (), "1", "integer"),
        Problem("a", "", (b"",), "1", "integer"),
        Problem("b", "", (b"", b""), "1", "integer"),
        Problem("c", "", (b"", b"", b""), "1", "integer", meta={"videos": [[0, 0.5, 1]]}),
    ]
    if refused is None:
        check_media_limits({"limit_mm_per_prompt": limits}, problems)
        return
    with pytest.raises(UserError, match=f"rollout.vllm.limit_mm_per_prompt lets a prompt have {refused}"):
        check_media_limits({"limit_mm_per_prompt": limits}, problems)


@pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])
def test_fp8_is_asked_of_cards_that_have_it(
    builder: PromptBuilder, capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is a CPU, which is not asked. vLLM gets one pattern of layers, and a scale for each row."""
    settings: dict[str, Any] = {"layers": 36, "on_cpu": capability is None, "user": {}}
    assert not {"quantization", "quantization_config"} & options(builder, **settings).keys()
    if capability is not None:
        monkeypatch.setattr(options_module, "gpu_capability", lambda: capability)
    if capability is not None and capability < (8, 9):
        with pytest.raises(UserError, match=rf"compute capability {capability[0]}\.{capability[1]}: .* from 8\.9 on"):
            options(builder, **settings, quantization="fp8")
        return
    given = options(builder, **settings, quantization="fp8")
    assert given["quantization"] == "online" and given["dtype"] == "bfloat16"
    ((pattern, rounding),) = given["quantization_config"]["targets"].items()
    assert rounding == "fp8_per_channel" and pattern.startswith("re:")
    layers = {
        "model.layers.1.self_attn.qkv_proj": True,
        "language_model.model.layers.27.mlp.gate_up_proj": True,
        "language_model.model.layers.27.mlp.down_proj": True,
        "model.text_model.layers.0.self_attn.o_proj": True,
        "language_model.model.layers.0.self_attn.attn": False,
        "language_model.model.layers.0.mlp.gate": False,
        "language_model.model.layers.0.linear_attn.out_proj": False,
        "language_model.lm_head": False,
        "visual.blocks.0.attn.qkv": False,
        "visual.blocks.0.mlp.gate_up_proj": False,
        "vision_tower.encoder.layers.0.self_attn.qkv_proj": False,
        "multi_modal_projector.linear_1": False,
    }
    assert {name: bool(re.match(pattern[3:], name)) for name in layers} == layers


@pytest.mark.parametrize(
    ("capability", "beside_learner", "is_refused"),
    [((8, 0), True, True), ((8, 9), True, True), ((9, 0), True, False), ((8, 0), False, False)],
)
def test_batch_invariance_leaves_the_learner_its_gradients(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], beside_learner: bool, is_refused: bool
) -> None:
    """On cards of 8.x vLLM replaces aten::linear and aten::matmul, whose backward CUDA does not have."""
    monkeypatch.setattr(options_module, "gpu_capability", lambda: capability)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(UserError, match=r"compute capability 8\.") if is_refused else nullcontext():
        assert batch_invariance(on_cpu=False, beside_learner=beside_learner)


def test_batch_invariance_is_set_before_vllm_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads the variable while it is imported. A CPU has no such kernels."""
    with pytest.raises(UserError, match="are a GPU's; set it to false"):
        batch_invariance(on_cpu=True)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert batch_invariance(on_cpu=False) == {"VLLM_BATCH_INVARIANT": "1"}
    monkeypatch.setitem(sys.modules, "vllm", sys)
    with pytest.raises(UserError, match="start a new process, with VLLM_BATCH_INVARIANT=1"):
        batch_invariance(on_cpu=False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert batch_invariance(on_cpu=False)
