"""Shared-prefix packing: a prompt and its images once per row, its G responses after it.

    row = [prompt_1][y_11][y_12]...[y_1G][prompt_2][y_21]...

Each response attends to its own prompt and to itself, so the prompt and the vision tower are
computed once instead of G times. M-RoPE positions of every response start at
max(prompt positions) + 1, which with images is not the prompt's length. The first token of each
response is predicted by the prompt's last hidden state.

A group over the token budget splits into rows that repeat the prompt; a response is never split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vlm_rl.losses import LossInputs
from vlm_rl.types import Prompt, Rollout

PositionFunction = Callable[[Prompt], Tensor]  # -> int64 [3, prompt tokens]


def _move(value: Any, device: torch.device | str) -> Any:
    """The value with every tensor in it on the device, however deep it lies."""
    if isinstance(value, Tensor):
        if torch.device(device).type != "cuda" or value.is_cuda or not torch.cuda.is_available():
            return value.to(device)
        return value.pin_memory().to(device, non_blocking=True)  # the host goes on
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _move(getattr(value, f.name), device) for f in fields(value)})
    if isinstance(value, tuple):
        return tuple(_move(item, device) for item in value)
    if isinstance(value, Mapping):
        return {key: _move(item, device) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Prompts of one length, b of them, and their n responses: what attention computes in one go.

    Every index points into the row. Padding stands after the real tokens of a response, where the
    causal mask hides it from them, so no padding mask exists.
    """

    prompt_index_bp: Tensor  # int64 [b, prompt tokens]
    query_index_nr: Tensor  # int64 [n, longest response]
    key_index_nk: Tensor  # int64 [n, prompt tokens + longest response]
    mask_rk: Tensor  # bool, True where a response token may look


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which tokens of a row may see which, said three times: a parameter of vlm_rl.learner.shared_prefix_attention.

    ``blocks`` gather and pad, for any device; ``pieces_2T`` tells token by token, for FlexAttention;
    ``cuts`` slice the row, for the CPU.
    """

    blocks: tuple[Block, ...]
    pieces_2T: Tensor  # int64, the piece (a prompt or a response) of each token, and the piece of its prompt
    inverse_T: Tensor  # int64 [T], where each row token stands among the blocks' outputs
    cuts: tuple[tuple[int, ...], ...]  # of each prompt: where it starts, where each response starts, their end


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """One micro-batch: a row of tokens for the model and, for the loss, K of them that are responses."""

    ids_T: Tensor
    positions_3T: Tensor  # M-RoPE: temporal, height, width
    layout: Layout
    vision: Mapping[str, Tensor]  # of all images of the row: opaque model inputs, or image_features; {} for text
    predictor_K: Tensor  # int64, the row position whose hidden state predicts response token k
    target_K: Tensor  # int64, the response tokens themselves
    loss: LossInputs
    owners_n: tuple[tuple[int, int], ...]  # (group, response) of each response, as the plan numbers them
    is_padding: bool = False  # there only so that every rank does the same number of rows; no metric counts it

    def to(self, device: torch.device | str) -> Self:
        """The row with everything in it on the device."""
        return _move(self, device)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some responses of one group, by index."""

    group: int
    responses: tuple[int, ...]
    is_padding: bool = False  # computed with weight zero, so that every rank does the same number of rows


@dataclass(frozen=True, slots=True, eq=False)
class TrainGroup:
    """A prompt's responses with everything the loss needs, weights of the optimizer step included."""

    prompt: Prompt
    rollouts: Sequence[Rollout]
    advantages_G: np.ndarray
    weights_G: np.ndarray
    old_logps: Sequence[np.ndarray] | None = None  # per response float32 [R]; None: those of this forward pass
    use_correction: bool = field(default=True)  # False: the rollouts have no sampler's log-probs (supervised)


Groups = Sequence[TrainGroup] | Mapping[int, TrainGroup]  # those that the chunks name, by index


# --- planning ---------------------------------------------------------------------------------


def plan_rows(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[Sequence[int]],
    *,
    budget: int,
    num_ranks: int = 1,
    pair_cost: float = 0.0,
) -> list[list[list[Chunk]]]:
    """Rows of chunks per rank: every response once, each row within ``budget`` tokens, ranks balanced by cost.

    A token costs 1 and a pair of tokens of which one attends to the other ``pair_cost``; 1 / (6 hidden size)
    is about right for a transformer. Returns ``plan[rank][row] -> chunks``; all ranks have the same number of
    rows, the dearest first, so that rows computed at the same time cost about the same, and the missing ones
    filled with zero-weight padding. A single response over the budget still gets a row of its own.
    """
    chunks = [
        chunk
        for group, (prompt, responses) in enumerate(zip(prompt_lengths, response_lengths, strict=True))
        for chunk in _split_group(group, prompt, responses, budget)
    ]
    assert chunks, "a mini-batch needs at least one group"

    def tokens(chunk: Chunk) -> int:
        return prompt_lengths[chunk.group] + sum(response_lengths[chunk.group][i] for i in chunk.responses)

    def cost(chunk: Chunk) -> float:
        prompt, responses = prompt_lengths[chunk.group], [response_lengths[chunk.group][i] for i in chunk.responses]
        pairs = prompt**2 / 2 + sum(prompt * size + size**2 / 2 for size in responses)
        return tokens(chunk) + pair_cost * pairs

    by_size = sorted(chunks, key=lambda chunk: (-cost(chunk), chunk.group, chunk.responses))
    ranks: list[list[Chunk]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for chunk in by_size:  # dearest first to the least loaded rank
        rank = loads.index(min(loads))
        ranks[rank].append(chunk)
        loads[rank] += cost(chunk)
    plan = [_fill_rows(chunks_of_rank, tokens, budget) for chunks_of_rank in ranks]
    plan = [sorted(rows, key=lambda row: -sum(map(cost, row))) for rows in plan]
    padding = Chunk(group=by_size[-1].group, responses=by_size[-1].responses[:1], is_padding=True)
    num_rows = max(len(rows) for rows in plan)
    return [rows + [[padding]] * (num_rows - len(rows)) for rows in plan]


def _split_group(group: int, prompt: int, responses: Sequence[int], budget: int) -> list[Chunk]:
    parts: list[list[int]] = [[]]
    used = prompt
    for index, length in enumerate(responses):
        if parts[-1] and used + length > budget:
            parts.append([])
            used = prompt
        parts[-1].append(index)
        used += length
    return [Chunk(group, tuple(part)) for part in parts]


def _fill_rows(chunks: Sequence[Chunk], tokens: Callable[[Chunk], int], budget: int) -> list[list[Chunk]]:
    """First fit, decreasing."""
    rows: list[list[Chunk]] = []
    room: list[int] = []
    for chunk in chunks:
        size = tokens(chunk)
        slot = next((i for i, free in enumerate(room) if size <= free), None)
        if slot is None:
            rows.append([chunk])
            room.append(budget - size)
        else:
            rows[slot].append(chunk)
            room[slot] -= size
    return [sorted(row, key=lambda chunk: (chunk.group, chunk.responses)) for row in rows]


# --- packing ----------------------------------------------------------------------------------


def pack_row(
    groups: Groups, chunks: Sequence[Chunk], positions: PositionFunction, *, mean_weight: float = 0.0
) -> PackedRow:
    """Lay the chunks' prompts and responses out as one row.

    ``mean_weight`` is 1 / (response tokens of the optimizer step, all ranks), for KL and entropy.
    """
    ids: list[np.ndarray] = []
    position_parts: list[Tensor] = []
    predictors: list[np.ndarray] = []
    spans: list[tuple[int, int, list[tuple[int, int]]]] = []  # prompt start, length, (start, length) of responses
    start = 0
    for chunk in chunks:
        prompt = groups[chunk.group].prompt
        prompt_positions = positions(prompt)
        next_position = int(prompt_positions.max()) + 1
        ids.append(prompt.ids)
        position_parts.append(prompt_positions)
        prompt_start, last = start, start + len(prompt.ids) - 1
        start += len(prompt.ids)
        responses: list[tuple[int, int]] = []
        for index in chunk.responses:
            response = groups[chunk.group].rollouts[index].ids
            ids.append(response)
            position_parts.append(torch.arange(next_position, next_position + len(response)).expand(3, -1))
            predictors.append(np.r_[last, np.arange(start, start + len(response) - 1)][: len(response)])
            responses.append((start, len(response)))
            start += len(response)
        spans.append((prompt_start, len(prompt.ids), responses))
    return PackedRow(
        ids_T=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        positions_3T=torch.cat(position_parts, dim=1),
        layout=row_layout(spans, start),
        vision=_join_vision([groups[chunk.group].prompt.vision for chunk in chunks]),
        predictor_K=torch.from_numpy(np.concatenate(predictors).astype(np.int64)),
        target_K=torch.from_numpy(_concatenate(groups, chunks, lambda g, i: g.rollouts[i].ids).astype(np.int64)),
        loss=_loss_inputs(groups, chunks, mean_weight),
        owners_n=tuple((chunk.group, index) for chunk in chunks for index in chunk.responses),
        is_padding=all(chunk.is_padding for chunk in chunks),
    )


def row_layout(spans: Sequence[tuple[int, int, list[tuple[int, int]]]], num_tokens: int) -> Layout:
    """Group prompts of one length into blocks and index their tokens."""
    blocks: list[Block] = []
    order: list[np.ndarray] = []  # the row token at each place of the concatenated block outputs, -1 for padding
    for length in sorted({prompt_length for _, prompt_length, _ in spans}):
        members = [(start, responses) for start, prompt_length, responses in spans if prompt_length == length]
        prompt_index = np.stack([np.arange(start, start + length) for start, _ in members])
        longest = max(size for _, responses in members for _, size in responses)
        queries = np.stack(
            [np.minimum(np.arange(longest), size - 1) + at for _, responses in members for at, size in responses]
        )
        is_real = np.stack([np.arange(longest) < size for _, responses in members for _, size in responses])
        prompts = np.repeat(prompt_index, [len(responses) for _, responses in members], axis=0)
        blocks.append(
            Block(
                prompt_index_bp=torch.from_numpy(prompt_index),
                query_index_nr=torch.from_numpy(queries),
                key_index_nk=torch.from_numpy(np.concatenate([prompts, queries], axis=1)),
                mask_rk=torch.ones(longest, length + longest, dtype=torch.bool).tril(diagonal=length),
            )
        )
        order += [prompt_index.ravel(), np.where(is_real, queries, -1).ravel()]
    places = np.concatenate(order)
    inverse = np.empty(num_tokens, dtype=np.int64)
    inverse[places[places >= 0]] = np.flatnonzero(places >= 0)
    return Layout(
        blocks=tuple(blocks),
        pieces_2T=_pieces(spans),
        inverse_T=torch.from_numpy(inverse),
        cuts=tuple(
            (start, *(at for at, _ in responses), responses[-1][0] + responses[-1][1])
            for start, _, responses in spans
        ),
    )


def _pieces(spans: Sequence[tuple[int, int, list[tuple[int, int]]]]) -> Tensor:
    """Pieces are numbered along the row; a prompt's prompt is itself."""
    sizes = [[length, *(size for _, size in responses)] for _, length, responses in spans]
    firsts = np.cumsum([0, *map(len, sizes)])[:-1]
    own = np.repeat(np.arange(sum(map(len, sizes))), np.concatenate(sizes))
    prompts = np.repeat(firsts, [sum(pieces) for pieces in sizes])
    return torch.from_numpy(np.stack([own, prompts]))


def _loss_inputs(groups: Groups, chunks: Sequence[Chunk], mean_weight: float) -> LossInputs:
    lengths = [len(groups[chunk.group].rollouts[i].ids) for chunk in chunks for i in chunk.responses]
    has_old = all(groups[chunk.group].old_logps is not None for chunk in chunks)
    has_sampler = all(groups[chunk.group].use_correction for chunk in chunks)
    return LossInputs(
        old_logp_K=_floats(groups, chunks, lambda g, i: g.old_logps[i]) if has_old else None,  # type: ignore
        sampler_logp_K=_floats(groups, chunks, lambda g, i: g.rollouts[i].logprobs) if has_sampler else None,
        response_K=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        lengths_n=torch.tensor(lengths),
        advantages_n=torch.tensor([float(groups[c.group].advantages_G[i]) for c in chunks for i in c.responses]),
        weights_n=torch.tensor(
            [0.0 if c.is_padding else float(groups[c.group].weights_G[i]) for c in chunks for i in c.responses]
        ),
        mean_weight=torch.tensor(0.0 if all(chunk.is_padding for chunk in chunks) else mean_weight),
    )


def _concatenate(groups: Groups, chunks: Sequence[Chunk], get: Callable[[TrainGroup, int], np.ndarray]) -> np.ndarray:
    return np.concatenate([get(groups[chunk.group], index) for chunk in chunks for index in chunk.responses])


def _floats(groups: Groups, chunks: Sequence[Chunk], get: Callable[[TrainGroup, int], np.ndarray]) -> Tensor:
    return torch.from_numpy(_concatenate(groups, chunks, get).astype(np.float32))


def _join_vision(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the opaque image tensors along their first dimension (patches, images)."""
    parts = [part for part in parts if part]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else {}
