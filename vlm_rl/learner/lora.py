"""Low-rank adapters (LoRA, arXiv 2106.09685) by PEFT: what gets one, what is trained, streamed and saved.

PEFT puts its layers into the transformers model, whose class and forward pass stay. A matrix W of the model becomes
W + scaling B A, computed as two products. Only A and B are trained. The sampler gets the sum, under the names that
the model has without adapters.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vlm_rl.config import LoraConfig
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import family_of
from vlm_rl.learner.quantization import dequantized, is_quantized
from vlm_rl.model_files.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_MODEL, PREFIX, BaseModel, merge
from vlm_rl.model_files.routers import routers_of
from vlm_rl.model_files.weights import sent_buffers

_ADAPTER = "default"  # PEFT's name for the only adapter


@dataclass(frozen=True, slots=True)
class WeightSource:
    """What a weight of the model without adapters is made of."""

    parameters: Sequence[Tensor]  # the weight, or W, A and B
    scaling: float = 0.0

    def base(self) -> Tensor:
        """Return the weight without its adapter; the parameter must be whole."""
        weight = self.parameters[0]
        return dequantized(weight) if is_quantized(weight) else weight.data

    def weight(self) -> Tensor:
        """Return the weight; the parameters must be whole."""
        if len(self.parameters) == 1:
            return self.base()
        a, b = (parameter.data for parameter in self.parameters[1:])
        return merge(self.base(), a, b, self.scaling)


def target_layers(model: Any, targets: Sequence[str]) -> list[str]:
    """Return the names of the model's linear layers that get an adapter, in the model's order.

    Args:
        model: a transformers model without adapters.
        targets: names of parts, and last names of linear layers in the language model.

    Raises UserError for a target that the model does not have.
    """
    family = family_of(model.config)
    head = model.get_output_embeddings()
    of_routers = {id(module) for router in routers_of(model).values() for module in router.modules()}
    part_of = {
        name: family.part_of(f"{name}.")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and id(module) not in of_routers
    }
    kind_of = {name: name.rpartition(".")[2] for name, part in part_of.items() if part == "language_model"}
    for target in targets:
        if target not in {*part_of.values(), *kind_of.values()}:
            raise UserError(
                f"model.lora.targets: {target!r} names no linear layer of this model: use a part "
                f"({', '.join(family.parts)}) or linear layers of the language model "
                f"({', '.join(sorted({*kind_of.values()}))})"
            )
    return [name for name, part in part_of.items() if part in targets or kind_of.get(name) in targets]


def adapter_ranks(model: Any, config: LoraConfig) -> dict[str, int]:
    """Return the rank of each linear layer's adapter, by the names that target_layers returns."""
    family = family_of(model.config)
    return {name: config.rank_of(family.part_of(f"{name}.")) for name in target_layers(model, config.targets)}


def num_adapter_parameters(model: nn.Module, config: LoraConfig) -> int:
    """Return how many parameters the adapters have: rank (in + out) for each linear layer."""
    ranks = adapter_ranks(model, config)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in ranks}
    return sum(ranks[name] * (layer.in_features + layer.out_features) for name, layer in layers.items())


def add_adapters(model: Any, config: LoraConfig, *, seed: int) -> None:
    """Freeze the model and add adapters to its linear layers, in place.

    A is random, B is zero: the model computes what it did before.

    Args:
        model: a transformers model.
        config: rank, scaling and targets.
        seed: of A.

    Raises UserError if PEFT would adapt something else as well.
    """
    with nullcontext() if config.load_in_4bit else _without_bitsandbytes():
        _inject(model, config, seed)
    for _, layer in _layers(model):  # with a weight in 4 bits PEFT makes them float32
        layer.lora_A.to(model.dtype)
        layer.lora_B.to(model.dtype)
    if any(".experts.base_layer." in name for name, _ in model.named_parameters()):
        raise UserError(
            "model.lora.targets: PEFT would also adapt the experts of this model, which are not linear layers: name "
            "layers outside of its MLPs, such as q_proj, k_proj, v_proj and o_proj"
        )


def _inject(model: Any, config: LoraConfig, seed: int) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    ranks = adapter_ranks(model, config)
    others = {re.escape(name): rank for name, rank in ranks.items() if rank != config.rank}
    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=[*ranks],
        rank_pattern=others,
        # All have the scaling alpha / rank.
        alpha_pattern={name: config.alpha * rank / config.rank for name, rank in others.items()},
        bias="none",
    )
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type != "cpu" else []):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    for _, layer in _layers(model):
        layer.scaling[_ADAPTER] = config.alpha / config.rank  # not rounded twice, as merges compute it


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """Let bitsandbytes count as not installed: PEFT imports it, if only to ask whether a layer is in 4 or 8 bits."""
    name = "bitsandbytes"
    known = sys.modules.get(name)
    sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of PEFT's layers."""
    yield from ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def describe(model: nn.Module, config: LoraConfig) -> str:
    """Return a line about which layers have an adapter, and that experts have none."""
    names = [name for name, _ in _layers(model)]
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
    left_out = any(name.endswith(".experts") for name, _ in model.named_modules())
    return f"adapters: rank {config.ranks} on {len(names)} layers: {kinds}" + (
        "; experts have none" if left_out else ""
    )


def weight_sources(model: nn.Module) -> Iterator[tuple[str, WeightSource]]:
    """Yield what a sync brings of the model without adapters: each tensor's name there, and what it is made of."""
    layers = dict(_layers(model))
    for name, parameter in chain(model.named_parameters(), sent_buffers(model)):
        owner, _, kind = name.partition(".base_layer.")
        if kind == "weight" and owner in layers:
            layer = layers[owner]
            factors = (layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight)
            yield f"{owner}.weight", WeightSource((parameter, *factors), layer.scaling[_ADAPTER])
        elif f".{_ADAPTER}." not in name or ".lora_" not in name:
            yield f"{owner}.{kind}" if kind else name, WeightSource((parameter,))


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, float]]:
    """Yield each A and B: the layer's name and the factor's, the parameter, and what an engine multiplies it with.

    That is 1 for A and alpha / rank for B: an engine whose scaling is 1 then computes the same.
    """
    for name, layer in _layers(model):
        yield f"{name}.lora_A.weight", layer.lora_A[_ADAPTER].weight, 1.0
        yield f"{name}.lora_B.weight", layer.lora_B[_ADAPTER].weight, layer.scaling[_ADAPTER]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let the model compute what it does without adapters, for the length of a `with` block without gradients."""
    for _, layer in _layers(model):
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for _, layer in _layers(model):
            layer.enable_adapters(True)


def save_adapters(model: Any, tensors: dict[str, Tensor], folder: Path, base: BaseModel) -> None:
    """Write what PEFT and vLLM open, and the configuration of the base model.

    Args:
        model: has the adapters.
        tensors: whole, by the names of its parameters.
        folder: exists.
        base: the model that the adapters belong to.
    """
    named = {f"{PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings = model.peft_config[_ADAPTER].to_dict() | {
        "base_model_name_or_path": base.path,
        "inference_mode": True,
        "target_modules": [name for name, _ in _layers(model)],  # PEFT shortens them, in an order of its own
        "target_parameters": None,  # PEFT makes an empty set of it where it knows the model's experts
    }
    for file, tree in ((ADAPTER_CONFIG, settings), (BASE_MODEL, asdict(base))):
        (folder / file).write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for file in ("config.json", "generation_config.json"):
        if (Path(base.path) / file).is_file():
            shutil.copyfile(Path(base.path) / file, folder / file)
