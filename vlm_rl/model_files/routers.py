"""The routers of a mixture of experts, in transformers' classes, and a record of what they choose."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

RouterOutput = tuple[Tensor, Tensor, Tensor]  # logits [T, E], scores [T, K], experts [T, K]


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the routers of a model by the number of their layer; {} for a model without experts."""
    routers: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter") and (match := re.search(r"layers\.(\d+)\.", name)):
            routers[int(match[1])] = module
    return routers


def is_known_output(output: Any) -> bool:
    """Tell whether a router returned what RouterOutput says; classes of other families have outputs of their own."""
    return isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point()


class RoutingRecord:
    """Which experts the routers of a model chose in its last forward pass."""

    def __init__(self, model: nn.Module, *, num_layers: int) -> None:
        self._num_layers = num_layers
        self._chosen: dict[int, Tensor] = {}
        for layer, router in routers_of(model).items():
            router.register_forward_hook(partial(self._keep, layer=layer))

    def take(self) -> Tensor:
        """Return the experts, int16 [tokens, layers, K] on the CPU; a layer without a router has zeros."""
        first = next(iter(self._chosen.values()))
        experts_TLK = torch.zeros(len(first), self._num_layers, first.shape[1], dtype=torch.int16)
        for layer, chosen_TK in self._chosen.items():
            experts_TLK[:, layer] = chosen_TK.cpu().short()
        return experts_TLK

    def _keep(self, _router: Any, _inputs: Any, output: RouterOutput, *, layer: int) -> None:
        self._chosen[layer] = output[2]
