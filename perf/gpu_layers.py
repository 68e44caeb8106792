"""Small parts of a step on one GPU: RMS norm, gated MLP and the checksum of a sync, ours against others'.

    python perf/gpu_layers.py
    OMP_NUM_THREADS=1 python perf/gpu_layers.py --device cpu --tokens 256 --parameters 1e6      # does the script run?

Norm and MLP are those of Qwen2.5-VL-7B, forward and backward on one row of --tokens in bfloat16 (on a CPU: in float32
and a 14th as wide). *kept* is what the forward pass holds for the backward pass. Liger's are measured where
liger-kernel is installed. The checksum reads --parameters bfloat16 weights in matrices as large as the MLP's. Times
are medians of --rounds after two that warm up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from vlm_rl.learner.attention import lean_layers
from vlm_rl.samplers.fingerprint import fingerprint

HIDDEN, MLP, EPSILON = 3584, 18944, 1e-6
Make = Callable[[nn.Module], Callable[[Tensor], Tensor]]  # a module of transformers -> a way to compute it


def fused_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: nn.functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(module)


def ours(module: nn.Module) -> Callable[[Tensor], Tensor]:
    lean_layers.install(module)
    return module


def liger_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    function = import_module("liger_kernel.transformers.functional").liger_rms_norm
    return lambda x: function(x, norm.weight, norm.variance_epsilon)


def liger_mlp(mlp: Any) -> Callable[[Tensor], Tensor]:
    function = import_module("liger_kernel.transformers.functional").liger_swiglu
    return lambda x: mlp.down_proj(function(mlp.gate_proj(x), mlp.up_proj(x)))


def ways(device: torch.device) -> dict[str, dict[str, Make]]:
    norms: dict[str, Make] = {"transformers": lambda norm: norm, "ours": ours, "torch": fused_norm}
    mlps: dict[str, Make] = {"transformers": lambda mlp: mlp, "ours": ours}
    if device.type == "cuda":
        norms["torch.compile"] = mlps["torch.compile"] = compiled
        if find_spec("liger_kernel"):
            norms["Liger"], mlps["Liger"] = liger_norm, liger_mlp
    return {"RMS norm": norms, "gated MLP": mlps}


def make_module(kind: str, *, scale: int) -> nn.Module:
    """Return the layer of transformers with random weights, the same each time."""
    torch.manual_seed(0)
    hidden = HIDDEN // scale
    if kind == "RMS norm":
        norm = Qwen2RMSNorm(hidden, eps=EPSILON)
        nn.init.normal_(norm.weight, mean=1.0, std=0.1)
        return norm
    config: Any = SimpleNamespace(hidden_size=hidden, intermediate_size=MLP // scale, hidden_act="silu")
    return Qwen2MLP(config)


def median_seconds(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 2):
        synchronize(device)
        begun = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def kept_bytes(run: Callable[[Tensor], Tensor], x: Tensor, weights: list[nn.Parameter]) -> int:
    """Return the bytes that a forward pass saves, weights aside, each storage once."""
    mine = {p.untyped_storage().data_ptr() for p in weights}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(x)
    del output
    return sum(storages.values())


def print_layers(options: argparse.Namespace, device: torch.device) -> None:
    dtype, scale = (torch.bfloat16, 1) if device.type == "cuda" else (torch.float32, 14)
    print("| layer | way | ms, forward and backward | kept, MiB | largest difference from transformers' output |")
    print("|---|---|---|---|---|")
    for kind, makers in ways(device).items():
        expected = None
        for name, make in makers.items():
            module = make_module(kind, scale=scale).to(device, dtype)
            run = make(module)
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(1, options.tokens, HIDDEN // scale, generator=generator).to(device, dtype)
            x.requires_grad_()
            try:
                output = run(x)
                expected = output.detach() if expected is None else expected
                gap = float((output.detach() - expected).abs().max())
                seconds = median_seconds(lambda run=run, x=x: run(x).sum().backward(), device, options.rounds)
                kept = kept_bytes(run, x, list(module.parameters())) / 2**20
            except Exception as error:  # whatever a missing compiler or kernel leads to: the other ways still run
                print(f"| {kind} | {name} | failed: {type(error).__name__}: {str(error).splitlines()[0]:.80} | | |")
                continue
            print(f"| {kind} | {name} | {1e3 * seconds:.3g} | {kept:.4g} | {gap:.1e} |", flush=True)


def print_checksum(options: argparse.Namespace, device: torch.device) -> None:
    """Measure the checksum over as many weights as an 8B model has; one matrix is in memory and is read again."""
    size = int(min(options.parameters, HIDDEN * MLP))
    matrix = torch.randn(size, device=device).bfloat16()
    count = max(1, round(options.parameters / size))
    tensors = [(f"layer.{index}", matrix) for index in range(count)]
    seconds = median_seconds(lambda: fingerprint(tensors), device, 1)
    rate = count * size / seconds
    print(
        f"\nchecksum of {count * size / 1e9:.3g} B bfloat16 parameters: {seconds:.2f} s, {rate / 1e9:.3g} B a second"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--parameters", type=float, default=8e9, help="weights that the checksum reads")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}\n"
    )
    print_layers(options, device)
    print_checksum(options, device)


if __name__ == "__main__":
    main()
