"""The routers of a mixture of experts, in transformers' classes, and a record of what they choose."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

RouterOutput = tuple[Tensor, Tensor, Tensor]  # logits [T, E], scores [T, K], experts [T, K]; see logits_of

_GEMMA = "gemma4textrouter"
_CLASSES = ("topkrouter", _GEMMA)  # what names of routers' classes end in, in lower case


def num_experts(text: Any) -> int:
    """Return how many experts a layer has, by the configuration of a language model; 0 for a dense model."""
    return getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0


def chosen_experts(text: Any) -> int:
    """Return how many of its experts a layer gives a token to; 0 for a dense model."""
    return getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 0


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the routers of a model by the number of their layer; {} for a model without experts."""
    routers: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith(_CLASSES) and (match := re.search(r"layers\.(\d+)\.", name)):
            routers[int(match[1])] = module
    return routers


def is_known_output(output: Any) -> bool:
    """Tell whether a router returned what RouterOutput says; classes of other families have outputs of their own."""
    return isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point()


def logits_of(router: Any, output: RouterOutput) -> Tensor:
    """Return the logits [T, E] of a router's output: of Gemma 4's, which holds probabilities, their logarithms."""
    if type(router).__name__.lower() != _GEMMA:
        return output[0]
    return output[0].clamp_min(torch.finfo(torch.float32).tiny).log()


def log_shares(router: Any, logits_TE: Tensor) -> Tensor:
    """Return the logarithms [T, E] of each expert's share of a token before the router chooses. Shares sum to 1."""
    logits_TE = logits_TE.float()
    return (torch.nn.functional.logsigmoid(logits_TE) if _weighs_by_sigmoid(router) else logits_TE).log_softmax(-1)


def scores_of(router: Any, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """Return a router's weights of these experts, float32 [T, K]."""
    logits_TE = logits_TE.float()
    scores_TE = logits_TE.sigmoid() if _weighs_by_sigmoid(router) else logits_TE.softmax(-1)
    scores_TK = scores_TE.gather(-1, chosen_TK)
    if getattr(router, "norm_topk_prob", True):  # routers without that setting always do
        scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
    if (scale_E := getattr(router, "per_expert_scale", None)) is not None:  # Gemma 4's
        scores_TK = scores_TK * scale_E[chosen_TK]
    return scores_TK * getattr(router, "routed_scaling_factor", 1.0)


def _weighs_by_sigmoid(router: Any) -> bool:
    """Tell whether a router is DeepSeek's or GLM's: it adds a bias to sigmoids, and weighs without the bias."""
    return hasattr(router, "e_score_correction_bias")


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
