"""Sequence parallel: the tokens of one packed row over a group of neighbouring ranks (Ulysses, arXiv 2309.14509).

A row that no card holds is divided. Each rank of a group has a run of the row's tokens, for embeddings, norms, MLPs
and head. Only attention looks beyond a token: an all-to-all gives each rank all tokens of a part of the heads, our
attention over the whole row runs as it is, with its shared prompts and windows, and an all-to-all gives the tokens
back. Images are computed on each rank of the group. Which tokens a rank has changes nothing that a token computes.

Every rank of a group then holds the log-probs of all response tokens, since rules need those of whole responses, and
computes the same loss L. Let theta_r be the weights as rank r uses them. Each rank starts its backward pass from
dL/dlogp of only its tokens, and the backward pass of an exchange is the exchange the other way. So rank r gets
dL/dtheta_r, and the sum over a group is dL/dtheta: what one rank with the whole row gets. Summed over all ranks it is
the gradient of the mini-batch, as without groups, and the loss needs no other factor.

DeepSpeed's own (UlyssesSPAttentionHF, deepspeed.sequence.layer) needs as many tokens on every rank, and gathers
positions of one dimension. Rows have any length, positions three dimensions, and the attention reads a layout, not
positions. So its two exchanges are made here, for shares of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlm_rl.distributed import COLLECTIVE_TIMEOUT, rank, world_size
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import convolution_width
from vlm_rl.model_files.model_folder import layer_configs

KEY = "train.sequence_parallel"


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """The ranks that compute one row together; by default each rank is a group of its own."""

    size: int = 1
    place: int = 0  # of this rank in its group
    links: Any = None  # torch's process group; None if this rank is alone

    @property
    def number(self) -> int:
        """Return how many groups there are, that is, how many rows are computed at a time."""
        return world_size() // self.size

    @property
    def index(self) -> int:
        """Return the index of this rank's group."""
        return rank() // self.size

    @property
    def members(self) -> slice:
        """Return which of all ranks are in this rank's group."""
        return slice(self.index * self.size, (self.index + 1) * self.size)

    @property
    def is_first(self) -> bool:
        """Tell whether this rank is the one of its group whose sums over whole rows count."""
        return self.place == 0

    def share_of(self, num_tokens: int) -> RowShare | None:
        """Return this rank's share of a row; None if it has the whole row."""
        if self.size == 1:
            return None
        shortest, longer = divmod(num_tokens, self.size)
        return RowShare(self, [shortest + (place < longer) for place in range(self.size)])

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of the group, without a gradient."""
        total = x.clone()
        if self.size > 1:
            dist.all_reduce(total, group=self.links)
        return total


@cache
def group_of_ranks(size: int) -> RankGroup:
    """Return this rank's group of so many neighbouring ranks. The first call is collective.

    Raises UserError if the ranks are not a multiple of the size.
    """
    check_ranks(size, world_size())
    if size == 1:
        return RankGroup()
    firsts = range(0, world_size(), size)  # every rank must make every group
    members = [list(range(first, first + size)) for first in firsts]
    links = [dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT) for ranks in members]
    return RankGroup(size, rank() % size, links[rank() // size])


@dataclass(frozen=True, slots=True, eq=False)
class RowShare:
    """The part of a row that this rank of a group has. T counts the row's tokens and t those of the share."""

    group: RankGroup
    tokens: Sequence[int]  # that each rank of the group has, in the row's order

    @property
    def own(self) -> slice:
        """Return where this rank's tokens are in the row."""
        start = sum(self.tokens[: self.group.place])
        return slice(start, start + self.tokens[self.group.place])

    # --- around attention -----------------------------------------------------------------------

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens of this rank's heads, [1, heads / ranks, T, head_dim], from all heads [1, heads, t, ...].

        Where keys and values have fewer heads than there are ranks, each goes to the ranks that have its queries.
        """
        ranks = self.group.size
        copies = max(1, ranks // key.shape[1])
        key, value = (x if copies == 1 else x.repeat_interleave(copies, dim=1) for x in (key, value))
        # [ranks, t, heads / ranks, head_dim] each
        parts = [x[0].unflatten(0, (ranks, -1)).transpose(1, 2) for x in (query, key, value)]
        sizes = [part.shape[2] for part in parts]
        sent = torch.cat(parts, dim=2)
        own = sent.shape[1]
        received = self._exchange(sent.flatten(0, 1), [own] * ranks, self.tokens)  # [T, heads, head_dim]
        query, key, value = (x.transpose(0, 1)[None] for x in received.split(sizes, dim=1))
        return query, key, value

    def to_tokens(self, output: Tensor) -> Tensor:
        """Return this rank's tokens with all heads, [1, t, heads, head_dim], from [1, T, heads / ranks, head_dim]."""
        ranks, own = self.group.size, self.tokens[self.group.place]
        received = self._exchange(output[0], self.tokens, [own] * ranks)
        return received.unflatten(0, (ranks, own)).transpose(0, 1).flatten(1, 2)[None]

    def _exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return _Exchange.apply(x, list(sent), list(received), self.group.links)  # type: ignore[no-any-return]

    # --- around the head ------------------------------------------------------------------------

    def predictions(self, predictor_K: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the K response tokens this rank predicts, and the place in its share that predicts each."""
        own = self.own
        mine_k = ((predictor_K >= own.start) & (predictor_K < own.stop)).nonzero()[:, 0]
        return mine_k, predictor_K[mine_k] - own.start

    def gathered(self, values: Sequence[Any], mine_k: Tensor, num_predictions: int) -> list[Any]:
        """Return values [K, ...] of all response tokens from those [k, ...] of this rank's; None stays None."""
        links = self.group.links
        return [x if x is None else _Gathered.apply(x, mine_k, num_predictions, links) for x in values]


class _Exchange(torch.autograd.Function):
    """Send runs of dimension 0 to the ranks of a group, and put together what they send.

    torch.distributed.nn has the same, deprecated; what replaces it there returns a tensor that waits when it is read,
    which the functions of our attention would have to know.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], links: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.links = sent, received, links
        return _exchanged(x, sent, received, links)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _exchanged(grad, ctx.received, ctx.sent, ctx.links), None, None, None


def _exchanged(x: Tensor, sent: list[int], received: list[int], links: Any) -> Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(output, x.contiguous(), received, sent, group=links)
    return output


class _Gathered(torch.autograd.Function):
    """Put the values of all ranks of a group together; the gradient of a value goes to the rank that computed it.

    Zeros are added, which changes no bit: all ranks hold the same.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, mine_k: Tensor, num_predictions: int, links: Any) -> Tensor:
        ctx.save_for_backward(mine_k)
        whole = mine.new_zeros(num_predictions, *mine.shape[1:])
        whole[mine_k] = mine
        dist.all_reduce(whole, group=links)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (mine_k,) = ctx.saved_tensors
        return grad[mine_k], None, None, None


# --- what is refused --------------------------------------------------------------------------------


def check_ranks(size: int, ranks: int) -> None:
    """Raise UserError if the ranks of a run do not form groups of this size."""
    if ranks % size:
        raise UserError(
            f"{KEY} is {size}, and there {'are' if ranks > 1 else 'is'} {ranks} rank{'s' * (ranks > 1)}: so many "
            "neighbouring ranks compute one row together, so start a multiple of them (torchrun --nproc-per-node; "
            "--ranks of a dry run), or set it to 1"
        )


def check_heads(config: Any, size: int, *, is_padded: bool) -> None:
    """Raise UserError for a model whose rows cannot be divided.

    Args:
        config: the model's, of transformers.
        size: train.sequence_parallel.
        is_padded: whether its rows are padded.
    """
    if size == 1:
        return
    if is_padded:
        raise UserError(
            f"{KEY} is {size}, and the rows of this {config.model_type} model are padded: only packed rows, whose "
            "attention is ours, are divided; set it to 1"
        )
    if convolution_width(config) is not None:
        raise UserError(
            f"{KEY} is {size}, and this {config.model_type} model has layers of linear attention, whose state no "
            "ranks share; set it to 1"
        )
    for layer in layer_configs(config.get_text_config()):
        heads = layer.num_attention_heads
        shared = getattr(layer, "num_key_value_heads", None) or heads
        if heads % size or (shared % size and size % shared):
            raise UserError(
                f"{KEY} is {size}, and the model has {heads} heads of queries and {shared} of keys and values: each "
                f"rank takes as many whole heads; use one of {', '.join(map(str, _divisors(heads, shared)))}"
            )


def _divisors(heads: int, shared: int) -> list[int]:
    """Return the sizes of groups among which the heads can be divided."""
    return [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
