"""A model's parameters under the names, and in the layout, that its published checkpoints have.

transformers keeps some parameters differently, such as the experts of a layer as one tensor. Engines load the layout
of the checkpoint. The conversion is transformers' own, which `save_pretrained` uses too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, Transpose, WeightConverter, revert_weight_conversion

from vlm_rl.types import NamedTensors

# In whose checkpoints, and in vLLM, the tower's weights are in vision_model.
_PREFIXED = ("gemma3", "llava_onevision")


def use_published_layout(model: Any) -> None:
    """Let a transformers model's `save_pretrained` write the published layout, transpositions included.

    Qwen3-VL's experts are published as [E, H, 2I] and held as [E, 2I, H]. transformers loads both, by their shape,
    and writes the second, which vLLM cannot load.
    """
    if getattr(model, "_weight_conversions", None) is None:
        # As transformers does for a model that it did not load: whether a checkpoint had the prefix is not known.
        known = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [item for item in known if not isinstance(item, PrefixChange)] or None
    for conversion in model._weight_conversions or ():
        for operation in getattr(conversion, "operations", ()):
            if isinstance(operation, Transpose):
                operation.check_dims = False


def as_published(model_path: str) -> Callable[[NamedTensors], Iterator[tuple[str, Tensor]]]:
    """Return a function that turns a model's named parameters, one at a time, into the tensors of its checkpoint.

    It passes them through where only names differ that engines know both ways.
    """
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = auto.from_config(config, trust_remote_code=False)
    is_prefixed = config.model_type in _PREFIXED
    if is_prefixed:
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    use_published_layout(model)
    if not is_prefixed and not any(isinstance(item, WeightConverter) for item in model._weight_conversions or ()):
        return iter

    def convert(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield from revert_weight_conversion(model, {name: tensor}).items()

    return convert
