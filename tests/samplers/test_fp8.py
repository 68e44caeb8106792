"""Weights in FP8: how they are rounded, and the proof that an engine holds the learner's, so rounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vlm_rl.config import RolloutConfig, parse_config
from vlm_rl.errors import UserError
from vlm_rl.model_files import fp8
from vlm_rl.model_files.fp8 import as_held, check_fp8, is_in_fp8, rounded, values
from vlm_rl.samplers.fingerprint import fingerprint, join_shards
from vlm_rl.samplers.remote.serve import server_options
from vlm_rl.samplers.vllm.worker import worker_checksums

BFLOAT16 = torch.bfloat16
LAYER = "model.layers.0.self_attn."
LEARNER = {f"{LAYER}{part}_proj.weight": rows for part, rows in (("q", 32), ("k", 16), ("v", 16))}
LAYOUT = {name: (rows, 48) for name, rows in LEARNER.items()}


def draw(seed: int) -> dict[str, Tensor]:
    """Return the learner's weights, whose rows have maxima of their own."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(rows, 48, generator=rng) * torch.rand(rows, 1, generator=rng)).to(BFLOAT16)
        for name, rows in LEARNER.items()
    }


# -- how ---------------------------------------------------------------------------------------------


def test_each_element_becomes_the_nearest_of_the_values_that_fp8_has() -> None:
    """By a search through all of them in float64, without a cast of torch's. Ties go to even codes."""
    weight = torch.cat([draw(0)[f"{LAYER}q_proj.weight"], torch.zeros(1, 48, dtype=BFLOAT16)])
    weight[0] = 0
    weight[0, :4] = torch.tensor([448, -448, 2**-6, 2**-9])
    weight[0, 4:8] = torch.tensor([17, 19, 2**-10, 3 * 2**-10])  # each in the middle between two values
    codes = np.arange(127)  # sign 0, 4 bits of exponent with bias 7, 3 of mantissa; the last code is NaN
    exponents, mantissas = np.divmod(codes, 8)
    table = np.where(exponents == 0, mantissas * 2.0**-9, (1 + mantissas / 8) * 2.0 ** (exponents - 7))
    assert table.max() == 448
    whole, scale = rounded(weight)
    exact = weight.double().numpy()
    wanted = np.abs(exact).max(1) / 448
    wanted[-1] = 1 / (512 * 448)
    np.testing.assert_allclose(scale[:, 0].numpy(), wanted, rtol=2**-23)
    sought = np.abs(exact / scale.double().numpy())
    distances = np.abs(sought[..., None] - table)
    nearest = distances.argmin(-1)
    tied = distances == distances.min(-1, keepdims=True)
    even = np.where(tied.sum(-1) == 2, (tied & (codes % 2 == 0)).argmax(-1), nearest)
    expected = np.sign(exact) * table[even]
    # Where float32 rounds a quotient onto the middle between two values, either is the nearest.
    off = np.abs(whole.double().numpy()) != np.abs(expected)
    assert np.diff(np.sort(distances, -1)[off][:, :2]).max(initial=0) < 1e-4 and off.mean() < 0.01
    assert not off[0].any() and (tied.sum(-1) == 2)[0].sum() >= 4


def test_rounding_in_chunks_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(0)[f"{LAYER}q_proj.weight"]
    at_once = as_held(f"{LAYER}q_proj.weight", weight, dtype=BFLOAT16)
    monkeypatch.setattr(fp8, "_CHUNK", 5 * 48)
    assert torch.equal(as_held(f"{LAYER}q_proj.weight", weight.float(), dtype=BFLOAT16), at_once)
    # Four bits of mantissa, the hidden one included, so an error of 2^-4 at most beside the smallest values.
    error = (at_once.double() - weight.double()).abs()
    smallest = weight.double().abs().amax(1, keepdim=True) / 448 * 2**-10
    assert bool((error <= weight.double().abs() * (2**-4 + 2**-8) + smallest).all())
    assert float((error / weight.double().abs()).max()) > 0.05


@pytest.mark.parametrize(
    ("name", "is_rounded"),
    [
        ("model.language_model.layers.11.self_attn.q_proj.weight", True),
        ("model.layers.0.mlp.down_proj.weight", True),
        ("model.text_model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.0.linear_attn.out_proj.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj.weight", False),
        ("model.visual.blocks.0.mlp.down_proj.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_what_is_rounded(name: str, is_rounded: bool) -> None:
    assert is_in_fp8(name) is is_rounded


# -- the proof ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """vLLM's fused layer in FP8, or one rank's part of it; as its kernel for Hopper pads it, with `padding`."""

    def __init__(self, whole: Tensor, scale: Tensor, *, parts: list[int], padding: int = 0) -> None:
        super().__init__()
        self.output_partition_sizes = parts
        self.output_size_per_partition, self.input_size_per_partition = whole.shape
        self.orig_dtype, self.tp_rank, self.tp_size = BFLOAT16, 0, 1
        whole = nn.functional.pad(whole.float(), (0, padding, 0, padding)).to(whole.dtype).t()
        scale = nn.functional.pad(scale, (0, 0, 0, padding), value=1.0)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)


class Engine(nn.Module):
    """As much of vLLM's model as the proof reads."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Module()])
        self.model.layers[0].self_attn = nn.Module()
        self.model.layers[0].self_attn.qkv_proj = layer


def held(*ranks: nn.Module) -> int:
    """Return the checksum of an engine whose ranks have these layers."""
    workers: list[Any] = [SimpleNamespace(get_model=lambda layer=layer: Engine(layer)) for layer in ranks]
    return join_shards(
        [worker_checksums(worker, layout=LAYOUT, dtype=BFLOAT16) for worker in workers], LAYOUT
    ).checksum


def expected(weights: dict[str, Tensor]) -> int:
    return fingerprint(weights.items(), dtype=BFLOAT16, quantization="fp8").checksum


def fused(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return rounded(torch.cat([*weights.values()]))


def test_an_engine_with_the_learners_rounded_weights_is_proved() -> None:
    weights = draw(0)
    whole, scale = fused(weights)
    assert held(Layer(whole, scale, parts=[32, 16, 16])) == expected(weights)
    assert held(Layer(whole, scale, parts=[32, 16, 16], padding=16)) == expected(weights)


def one_bit(tensor: Tensor, bit: int) -> Tensor:
    changed = tensor.clone()
    bits = changed.view(torch.uint8 if tensor.element_size() == 1 else torch.int32)
    bits[7, 0] ^= 1 << bit
    return changed


FAULTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "stale": lambda whole, scale: fused(draw(1)),
    "rows swapped": lambda whole, scale: (whole.roll(1, 0), scale.roll(1, 0)),
    "keys for values": lambda whole, scale: (
        torch.cat([whole[:32], whole[48:], whole[32:48]]),
        torch.cat([scale[:32], scale[48:], scale[32:48]]),
    ),
    "scales of other rows": lambda whole, scale: (whole, scale.roll(1, 0)),
    "scales of before": lambda whole, scale: (whole, scale * (1 + 2**-7)),
    "a weight scaled": lambda whole, scale: ((whole.float() * 0.5).to(whole.dtype), scale),
    "one scale for all": lambda whole, scale: (
        (values(whole, scale, dtype=torch.float32) / scale.max()).to(whole.dtype),
        scale.max().expand_as(scale),
    ),
    "the last bit of an element": lambda whole, scale: (one_bit(whole, 0), scale),
    "a sign": lambda whole, scale: (one_bit(whole, 7), scale),
    "a bit of a scale": lambda whole, scale: (whole, one_bit(scale, 17)),
    "zeros": lambda whole, scale: (torch.zeros_like(whole), scale),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_with_other_weights_is_found(fault: str) -> None:
    weights = draw(0)
    assert held(Layer(*FAULTS[fault](*fused(weights)), parts=[32, 16, 16])) != expected(weights)


def test_an_engine_that_rounded_nothing_is_found() -> None:
    weights = draw(0)
    layer = Layer(*fused(weights), parts=[32, 16, 16])
    layer.weight = nn.Parameter(torch.cat([*weights.values()]), requires_grad=False)
    del layer.weight_scale
    assert held(layer) != expected(weights)


def test_ranks_need_the_scales_of_whole_rows() -> None:
    """A layer that is divided by columns: each rank's largest element is not the row's."""
    name, whole_shape = f"{LAYER}qkv_proj.weight", (64, 48)
    weight = torch.cat([*draw(0).values()])
    codes, scale = rounded(weight)

    def checksum(*parts: tuple[Tensor, Tensor]) -> int:
        layers = [Layer(*part, parts=[64]) for part in parts]
        for number, layer in enumerate(layers):
            layer.tp_rank, layer.tp_size = number, 2
        workers: list[Any] = [SimpleNamespace(get_model=lambda layer=layer: Engine(layer)) for layer in layers]
        layout = {name: whole_shape}
        return join_shards([worker_checksums(w, layout=layout, dtype=BFLOAT16) for w in workers], layout).checksum

    right = fingerprint([(name, weight)], dtype=BFLOAT16, quantization="fp8").checksum
    halves = codes.view(torch.uint8).chunk(2, 1)
    assert checksum(*((half.contiguous().view(codes.dtype), scale) for half in halves)) == right
    assert checksum(*(rounded(half.contiguous()) for half in weight.chunk(2, 1))) != right


def test_models_that_cannot_be_rounded_are_refused() -> None:
    config: Any = SimpleNamespace(model_type="qwen3_moe", get_text_config=lambda: SimpleNamespace(num_experts=8))
    rollout = RolloutConfig(quantization="fp8", sampler="vllm", max_gap=0.3)
    with pytest.raises(UserError, match="qwen3_moe is a mixture of experts"):
        check_fp8(config, rollout, dtype=BFLOAT16)
    with pytest.raises(UserError, match=r"is in float32, which vLLM does not round: set model\.dtype=bfloat16"):
        check_fp8(config, rollout, dtype=torch.float32)
    check_fp8(config, RolloutConfig(), dtype=torch.float32)


def test_a_server_rounds_too(tiny_model: Path, tmp_path: Path) -> None:
    """`vlm-rl serve` refuses what a run would; on a CPU that is the default dtype."""
    tree: dict[str, Any] = {"out": str(tmp_path), "model": {"path": str(tiny_model)}, "data": {"train": ["x"]}}
    tree["data"]["max_prompt_tokens"], tree["reward"] = 160, {"overlong_buffer": 8}
    tree["rollout"] = {"sampler": "server", "servers": ["http://127.0.0.1:1"], "quantization": "fp8", "max_gap": 0.3}
    tree["rollout"]["max_tokens"], tree["train"] = 14, {"micro_batch_tokens": 300}
    with pytest.raises(UserError, match="is in float32"):
        server_options(parse_config(tree), host="127.0.0.1", port=1)
    tree["model"]["dtype"] = "bfloat16"
    _, flags, _ = server_options(parse_config(tree), host="127.0.0.1", port=1)
    values = dict(flag.split("=", 1) for flag in flags if "=" in flag)
    assert values["--quantization"] == "online"
    settings = json.loads(values["--quantization-config"])
    assert settings == {"targets": {f"re:{fp8.FP8_LAYERS}": "fp8_per_channel"}}
