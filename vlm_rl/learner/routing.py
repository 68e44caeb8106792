"""What the routers of a mixture of experts do in an update; nothing of it is trained.

The auxiliary loss that balances the load of experts is off: it would pull the policy away from what the reward asks
for. So the metrics show whether routing collapses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RouterWatch:
    """Adds up what the routers of a model do.

    Only passes with gradients count, so that an update counts once: gradient checkpointing runs every layer first
    without gradients and then with them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sums: dict[str, Tensor] = {}
        self.is_padding: Tensor | None = None  # bool [T], of the pass in progress: tokens that do not count
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._add)

    def take(self) -> dict[str, Tensor]:
        """Return the sums since the last call, {} for a model without routers.

        `router_tokens` counts tokens times layers. `router_entropy` adds up the entropy of each token's distribution
        over experts, `router_max_load` the tokens of the busiest expert over those of the average one, each layer and
        row weighted by its tokens.
        """
        sums, self._sums = self._sums, {}
        return sums

    def _add(self, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        logits_TE, _, chosen_TK = output
        if self.is_padding is not None:
            logits_TE, chosen_TK = logits_TE[~self.is_padding], chosen_TK[~self.is_padding]
        logp_TE = logits_TE.detach().float().log_softmax(-1)
        load_E = logp_TE.new_zeros(logp_TE.shape[1])
        load_E.scatter_add_(0, chosen_TK.flatten(), torch.ones_like(chosen_TK.flatten(), dtype=load_E.dtype))
        num_tokens = torch.tensor(float(len(logp_TE)), device=logp_TE.device)
        for key, value in {
            "router_tokens": num_tokens,
            "router_entropy": -(logp_TE.exp() * logp_TE).sum(),
            "router_max_load": load_E.max() / load_E.mean() * num_tokens,
        }.items():
            self._sums[key] = self._sums.get(key, torch.zeros_like(value)) + value
