"""The routers of a mixture of experts: what they do in an update, and the sampler's choices in place of their own.

The auxiliary loss that balances the load of experts is off: it would pull the policy away from what the reward asks
for. So the metrics show whether routing collapses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vlm_rl.learner.sequence_parallel import RankGroup
from vlm_rl.model_files.routers import (
    RouterOutput,
    is_known_output,
    log_shares,
    logits_of,
    routers_of,
    scores_of,
)


class RouterWatch:
    """Adds up what the routers of a model do, and replays the sampler's choices where a row brings them.

    Sampler and learner round differently, so that a router may choose a different expert in each, and the log-probs
    of that token then differ by far more than rounding. With replay the learner takes the sampler's experts, weighted
    by its own scores, through which the router is trained (arXiv 2510.11370, rollout routing replay).

    Only passes with gradients count, and none while it is `paused`, so that an update counts once: gradient
    checkpointing runs every layer twice, the first time without gradients where it is reentrant.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sums: dict[str, Tensor] = {}
        self.ranks = RankGroup()  # that have a share of each row
        self.counted: Tensor | None = None  # int64, the tokens of the pass in progress that count; None: all
        self._is_paused = False
        self.replayed: Tensor | None = None  # [T, layers, K] of the pass in progress; -1 where the router chooses
        for layer, router in routers_of(model).items():
            router.register_forward_hook(partial(self._route, layer=layer))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in a `with` block; the choices are replayed all the same."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def take(self) -> dict[str, Tensor]:
        """Return the sums since the last call, {} for a model without routers.

        `router_tokens` counts tokens times layers. `router_entropy` adds up the entropy of each token's distribution
        over experts, `router_max_load` the tokens of the busiest expert over those of the average one, each layer and
        row weighted by its tokens. `router_replaced`, where there is replay, adds up the share of each token's
        experts that the router would not have chosen.
        """
        sums, self._sums = self._sums, {}
        return sums

    def _route(self, router: Any, _: Any, output: RouterOutput, *, layer: int) -> RouterOutput:
        if not is_known_output(output):  # of a type that no test knows: it is neither counted nor replayed
            return output
        first_TE, scores_TK, own_TK = output
        logits_TE = logits_of(router, output)
        if self.replayed is None:
            self._add(router, logits_TE, own_TK)
            return output
        given_TK = self.replayed[:, layer].long()
        chosen_TK = torch.where(given_TK < 0, own_TK, given_TK)
        replaced_T = (chosen_TK[:, :, None] != own_TK[:, None]).all(-1).float().mean(-1)
        self._add(router, logits_TE, chosen_TK, replaced_T)
        return first_TE, scores_of(router, logits_TE, chosen_TK).to(scores_TK.dtype), chosen_TK

    def _add(self, router: Any, logits_TE: Tensor, chosen_TK: Tensor, replaced_T: Tensor | None = None) -> None:
        if not self._is_paused and torch.is_grad_enabled():
            self._count(log_shares(router, logits_TE.detach()), chosen_TK, replaced_T)

    @torch.no_grad()
    def _count(self, logp_TE: Tensor, chosen_TK: Tensor, replaced_T: Tensor | None) -> None:
        if self.counted is not None:
            logp_TE, chosen_TK = logp_TE[self.counted], chosen_TK[self.counted]
            replaced_T = None if replaced_T is None else replaced_T[self.counted]
        load_E = logp_TE.new_zeros(logp_TE.shape[1])
        load_E.scatter_add_(0, chosen_TK.flatten(), torch.ones_like(chosen_TK.flatten(), dtype=load_E.dtype))
        load_E = self.ranks.sum(load_E)  # a row's load is that of all its tokens
        num_tokens = torch.full((), float(len(logp_TE)), device=logp_TE.device)  # for torch.tensor the host waits
        for key, value in {
            "router_tokens": num_tokens,
            "router_entropy": -(logp_TE.exp() * logp_TE).sum(),
            "router_max_load": load_E.max() / load_E.mean() * num_tokens,
            **({} if replaced_T is None else {"router_replaced": replaced_T.sum()}),
        }.items():
            self._sums[key] = self._sums.get(key, torch.zeros_like(value)) + value
