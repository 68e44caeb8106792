"""What runs inside vLLM's worker: read back the weights that it multiplies with, and repair a reload on a CPU.

vLLM fuses, pads and packs the tensors of a checkpoint; they are read back under the learner's names, for the
fingerprint. Nothing here imports vllm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from vlm_rl.model_files.fp8 import values
from vlm_rl.samplers.fingerprint import Shard, WeightLayout, buffer_digests, shard_checksums

_FUSED_EXPERTS = {"gate_up_proj": "routed_experts.w13_weight", "down_proj": "routed_experts.w2_weight"}


def worker_checksums(worker: Any, *, layout: WeightLayout, dtype: torch.dtype) -> dict[str, int]:
    """Return the shard_checksums of the worker's weights under the learner's names, rounded to `dtype`."""
    # Some kernels keep a bias in float32 for weights in bfloat16; rounded to `dtype` it is the same value.
    return shard_checksums(_learner_shards(worker.get_model(), layout), dtype=dtype)


def worker_buffers(worker: Any) -> dict[str, str]:
    """Return the digest of every buffer of the worker's model."""
    return buffer_digests(worker.get_model())


def forget_expert_kernels(worker: Any) -> None:
    """Let the next reload prepare the experts of vLLM's CPU build as the first load did.

    While the kernel of a layer of experts exists, vLLM takes a reload for an update in place, and leaves out the
    padding and the packing that its CPU kernels need.
    """
    for module in worker.get_model().modules():
        if _expert_kernel(module) is not None:
            module.quant_method.moe_kernel = None


def repack_heads(worker: Any) -> None:
    """Rebuild the packed copies of weights that vLLM's CPU build multiplies with.

    With tied embeddings `reload_weights` replaces the embedding but not the output head's packed copy: without
    this the logits would always come from the old head.
    """
    for module in worker.get_model().modules():
        if hasattr(module, "cpu_linear") and module.weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)


def takes_adapters_in_towers(worker: Any) -> bool:
    """Tell whether vLLM applies adapters in the model's tower and merger, not only in its language model."""
    return bool(getattr(worker.get_model(), "supports_tower_connector_lora", False))


def wraps_experts(worker: Any) -> bool:
    """Tell whether layers of experts are computed by the kernel for adapters."""
    return any(hasattr(module, "w13_lora_a_stacked") for module in worker.get_model().modules())


def sleep_beside_others(worker: Any) -> None:
    """Let the worker fall asleep while another process takes memory of its card.

    vLLM compares the card's free memory before and after, and asserts that it grew. All is released by then.
    """
    sleep = worker.sleep

    def sleep_and_share(*args: Any, **kwargs: Any) -> None:
        try:
            sleep(*args, **kwargs)
        except AssertionError as error:
            if "Memory usage increased" not in str(error):
                raise

    worker.sleep = sleep_and_share


def _learner_shards(model: Any, layout: WeightLayout) -> Iterator[Shard]:
    """Yield the engine's weights under the learner's names, cut out of the tensors that the engine fuses.

    Under tensor parallelism they are this rank's. Rows of zeros behind the vocabulary are padding. Anything else that
    the learner does not name comes under the engine's own name.
    """
    fusions = _Fusions(model)
    # The engine's tensor -> what it holds, and in which rows.
    placed: dict[str, list[tuple[str, Sequence[slice]]]] = {}
    # The engine's layer and A or B -> the part's first row -> the learner's name.
    factors: dict[tuple[str, str], dict[int, str]] = {}
    for name, shape in layout.items():
        layer, is_factor, factor = name.partition(".lora_")
        place = _place(model, fusions, f"{layer}.weight" if is_factor else name, rows=shape[0])
        if place is not None and is_factor:
            target, (rows, *_) = place
            factors.setdefault((target.removesuffix(".weight"), factor[0]), {})[rows.start] = name
        elif place is not None:
            placed.setdefault(place[0], []).append((name, place[1]))
    for name, tensor in _adapter_tensors(model, factors, layout):
        yield Shard(name, tensor, tuple(tensor.shape))
    for name, tensor in _engine_tensors(model):
        covered = 0
        for source, (rows, *again) in placed.get(name, ()):
            yield from _cut(model, name, rows, source, tensor[rows], layout[source])
            for other in again:  # Gemma 4 has no values but its keys
                if not torch.equal(tensor[other], tensor[rows]):
                    yield Shard(f"{name} (the engine's copy)", tensor[other], tuple(tensor[other].shape))
            covered += sum(part.stop - part.start for part in (rows, *again))
        if not placed.get(name) or bool(tensor[covered:].any()):
            yield Shard(f"{name} (the engine's)", tensor, tuple(tensor.shape))


def _cut(model: Any, place: str, rows: slice, name: str, tensor: Tensor, whole: tuple[int, ...]) -> Iterator[Shard]:
    """Yield what this rank holds of the learner's tensor `name`.

    Args:
        model: the engine's.
        place: the engine's name of the tensor that has it.
        rows: of that tensor, which are the learner's.
        name: the learner's.
        tensor: these rows, of all ranks or of this one.
        whole: the shape of the learner's tensor.
    """
    module = _module(model, place)
    if tensor.numel() == math.prod(whole):  # in some towers the engine's is a matrix, and the learner's a convolution
        yield Shard(name, tensor.reshape(whole), whole)
        return
    if hasattr(module, "shard_indices"):  # the vocabulary, whose last rank may have less
        yield Shard(name, tensor, whole, 0, module.shard_indices.org_vocab_start_index)
        return
    dim = next((dim for dim, size in enumerate(whole) if tensor.shape[dim] < size), None)
    if dim is None:  # larger than the learner's: with this shape the fingerprints cannot agree
        yield Shard(name, tensor, tuple(tensor.shape))
        return
    held = tensor.shape[dim]
    ranks = module.moe_config if hasattr(module, "moe_config") else module
    fused = [held // 2] * 2 if ranks is not module and dim == 1 else _partitions(model, place, rows)
    sizes = fused if sum(fused) == held else [held]  # a tensor that the learner fuses too is divided part by part
    num_shards = whole[dim] // held  # fewer than ranks where some hold the same heads of keys and values
    number = ranks.tp_rank * num_shards // ranks.tp_size
    for part, before in zip(tensor.split(sizes, dim), accumulate(sizes, initial=0), strict=False):
        yield Shard(name, part, whole, dim, before * num_shards + number * part.shape[dim])


def _partitions(model: Any, place: str, rows: slice) -> list[int]:
    """Return the rows of each part of a tensor that is divided part by part, of those parts that are in `rows`."""
    module = _module(model, place)
    sizes: Sequence[int] = getattr(module, "output_partition_sizes", [])
    path, _, name = place.removesuffix(".weight").rpartition(".")
    if name == "conv1d":  # of linear attention: over queries, keys and values, which are divided each
        layer = model.get_submodule(path)
        sizes = [size // layer.tp_size for size in (layer.key_dim, layer.key_dim, layer.value_dim)]
    starts = accumulate(sizes, initial=0)
    return [size for start, size in zip(starts, sizes, strict=False) if rows.start <= start < rows.stop]


def _module(model: Any, name: str) -> Any:
    """Return the engine's module that has the tensor, without the layer that vLLM puts around it for adapters."""
    module = model.get_submodule(name.rpartition(".")[0])
    return getattr(module, "base_layer", module)


def _adapter_tensors(
    model: Any, factors: Mapping[tuple[str, str], Mapping[int, str]], layout: WeightLayout
) -> Iterator[tuple[str, Tensor]]:
    """Yield the only adapter that the engine holds under the learner's names.

    A layer has a slot for it. Each part of a fused layer has its own A and B, filled up with zeros to the engine's
    rank. What the learner does not name must be zero; otherwise it comes under the engine's own name.

    Args:
        model: the engine's.
        factors: of the engine's layer and A or B, the learner's name by the part's first row.
        layout: the learner's shapes.
    """
    for prefix, module in model.named_modules():
        if not hasattr(module, "lora_a_stacked"):
            continue
        if isinstance(module.lora_b_stacked, Tensor) or module.lora_b_stacked[0].dim() != 4:
            # An embedding, an output head or experts: none of them gets an adapter of the learner's.
            for factor in ("a", "b"):
                stacked = getattr(module, f"lora_{factor}_stacked")
                for part, slots in enumerate([stacked] if isinstance(stacked, Tensor) else stacked):
                    if bool(slots.any()):
                        yield f"{prefix}.lora_{factor.upper()}.{part} (the engine's)", slots
            continue
        sizes = [len(b[0, 0]) for b in module.lora_b_stacked]
        for factor, stacked in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked)):
            names = factors.get((prefix, factor), {})
            for part, slots in enumerate(stacked):
                name = names.get(sum(sizes[:part]))
                rows, columns = layout[name] if name else (0, 0)
                if name:
                    yield name, slots[0, 0, :rows, :columns]
                if bool(slots[0, 0, rows:].any() or slots[0, 0, :, columns:].any()):
                    yield f"{prefix}.lora_{factor}.{part} (the engine's)", slots


def _without_wrapper(name: str) -> str:
    """Return the name of a weight without the layer that vLLM puts around it for adapters."""
    return name.replace(".base_layer.", ".")


class _Fusions:
    """Where an engine's tensors hold those of a checkpoint, as its models say it.

    Some say the parts of each fused module (`packed_modules_mapping`), some which parts a name is loaded into
    (`orig_to_new_stacked` of a mapper), and of models inside of others each may say its own.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.own = {_without_wrapper(name) for name, _ in model.named_parameters()}
        self._packed: dict[str, Sequence[str]] = {}  # a fused module's name -> its parts'
        self._stacked: dict[str, tuple[str, Any]] = {}  # part of a name -> what is there instead, and the parts
        for module in model.modules():
            self._packed |= getattr(module, "packed_modules_mapping", {})
            self._stacked |= getattr(getattr(module, "hf_to_vllm_mapper", None), "orig_to_new_stacked", {})

    def find(self, name: str, mapped: str) -> tuple[str, list[slice]] | None:
        """Return the fused tensor that holds a weight, and its rows there; several where it is there several times.

        Args:
            name: the learner's.
            mapped: what the engine's mapper makes of it: some mappers name the fused module, others do not.
        """
        for old, (new, parts) in self._stacked.items():
            target = mapped.replace(old, new, 1)
            if old in name and new in target and target in self.own:
                return target, [self._rows(target, part) for part in (parts if isinstance(parts, list) else [parts])]
        *path, module, kind = mapped.split(".")
        part = name.split(".")[-2]
        for fused, parts in self._packed.items():
            target = ".".join([*path, fused, kind])
            if part != fused and part in parts and module in (part, fused) and target in self.own:
                return target, [self._rows(target, parts.index(part))]
        return None

    def _rows(self, target: str, part: str | int | tuple[int, ...]) -> slice:
        """Return the rows of a part of a fused tensor, or of neighbouring parts."""
        ends = [0, *accumulate(_module(self._model, target).output_partition_sizes)]
        numbers = part if isinstance(part, tuple) else ("qkv".index(part) if isinstance(part, str) else part,)
        return slice(ends[numbers[0]], ends[numbers[-1] + 1])


def _place(model: Any, fusions: _Fusions, name: str, *, rows: int) -> tuple[str, list[slice]] | None:
    """Return the engine's tensor that holds a tensor of the learner, and its rows there; None if none does."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapped = mapper.map_name(name) if mapper else name
    if mapped is None:
        return None
    tower, _, rest = mapped.partition(".")
    if not rest:  # of the model itself, as LLaVA's image_newline
        return (mapped, [slice(0, rows)]) if mapped in fusions.own else None
    if tower == "vision_tower" and hasattr(model.vision_tower, "vision_model"):  # which transformers has no more
        mapped = f"{tower}.vision_model.{rest.removeprefix('vision_model.')}"
    *path, module, kind = mapped.split(".")
    if name.split(".")[-2] == "experts":  # [E, ...] in both
        target = ".".join([*path, module, _FUSED_EXPERTS.get(kind, kind)])
        return (target, [slice(0, rows)]) if target in fusions.own else None
    if (fused := fusions.find(name, mapped)) is not None:
        return fused
    if mapped not in fusions.own:
        return None
    vocabulary = getattr(_module(model, mapped), "shard_indices", None)
    return mapped, [slice(0, vocabulary.num_org_elements if vocabulary else rows)]


def _engine_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that the engine multiplies with under its own names, tied ones once.

    vLLM's CPU build packs linear weights away and leaves an empty parameter. The packed weights are read back by
    multiplying with the identity, which is exact. Where parameter and packed copy both exist and differ, both are
    given, so that the fingerprint cannot agree.
    """
    seen: set[int] = set()
    for wrapped, module in model.named_modules():
        prefix = wrapped.removesuffix(".base_layer")
        parameters = dict(module.named_parameters(recurse=False))
        if (kernel := _expert_kernel(module)) is not None and parameters["w13_weight"].device.type == "cpu":
            yield from ((f"{prefix}.{name}", tensor) for name, tensor in _unpack_experts(parameters, kernel))
            continue
        if "weight_scale" in parameters:  # rounded to FP8: of both, what the engine multiplies with
            yield f"{prefix}.weight", _from_fp8(module, parameters.pop("weight"), parameters.pop("weight_scale"))
        for name, parameter in parameters.items():
            packed = _unpack(module) if name == "weight" and hasattr(module, "cpu_linear") else None
            if parameter.numel() == 0 and packed is not None:
                yield f"{prefix}.{name}", packed
                continue
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{name}".removeprefix("."), parameter  # the model itself has no prefix
            if packed is not None and not bool((packed == parameter).all()):
                yield f"{prefix}.{name} (packed)", packed


def _from_fp8(module: Any, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the weight [out, in] of a layer in FP8, which keeps it as [in, out]; some kernels pad both sides."""
    rows, columns = module.output_size_per_partition, module.input_size_per_partition
    return values(weight.t()[:rows, :columns], scale[:rows], dtype=module.orig_dtype)


def _unpack(module: Any) -> Tensor:
    """Return the weight [out, in] of a packed CPU linear layer."""
    width = getattr(module, "input_size_per_partition", None) or module.input_size
    identity = torch.eye(width, dtype=module.weight.dtype)
    return module.cpu_linear(identity, module.weight, None).t()


def _expert_kernel(module: Any) -> Any:
    """Return the kernel that multiplies with a layer's experts, None for a module that is not such a layer."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return getattr(kernel, "fused_experts", None)


def _unpack_experts(packed: Mapping[str, Tensor], kernel: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the experts of a CPU layer in the layout of the checkpoint: w13_weight [E, 2I, H], w2_weight [E, H, I].

    vLLM pads and packs them, which moves elements and changes none. So it is given the elements' numbers to prepare
    in the same way, byte by byte because bfloat16 counts only to 256, and padding has the number 0.
    """
    if kernel._use_zentorch:  # AMD's kernel takes them as they are
        yield from packed.items()
        return
    kernel = copy(kernel)  # preparing the numbers writes on it
    config = kernel.moe_config
    inner, hidden = config.intermediate_size_per_partition, config.hidden_dim
    shapes = {"w13_weight": (2 * inner, hidden), "w2_weight": (hidden, inner)}
    numbers = {name: torch.zeros_like(packed[name][0], dtype=torch.int64) for name in shapes}
    for shift in range(0, 32, 8):
        layer = nn.Module()
        for name, shape in shapes.items():
            number = torch.arange(1, math.prod(shape) + 1).view(1, *shape)
            digit = (number >> shift & 255).to(packed[name].dtype)
            layer.register_parameter(name, nn.Parameter(digit, requires_grad=False))
        kernel.process_weights_after_loading(layer)
        for name in shapes:
            numbers[name] += layer.get_parameter(name)[0].long() << shift
    for name, shape in shapes.items():
        number, flat = numbers[name].flatten(), packed[name].flatten(1)
        whole = flat.new_empty(len(flat), math.prod(shape))
        whole[:, number[number > 0] - 1] = flat[:, number > 0]
        yield name, whole.view(len(flat), *shape)
        if bool(flat[:, number == 0].any()):
            yield f"{name} (padding)", flat[:, number == 0]
