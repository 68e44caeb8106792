"""Shared-prefix packing: a prompt and its images once per row, its G responses after it.

    row = [prompt_1][y_11][y_12]...[y_1G][prompt_2][y_21]...

Each response attends to its own prompt and to itself, so the prompt and the vision tower are computed once
instead of G times. The M-RoPE positions of every response start at max(prompt positions) + 1, which with
images is not the prompt's length. The prompt's last hidden state predicts the first token of each response.

In an episode, the environment's answers are between the sampled tokens:

    y = [turn 1][observed][turn 2][observed][turn 3]

Observed tokens are context: they are in the row, but the loss does not get them. An observation's positions are
numbered as if it stood alone, and then moved after what precedes it.

A group may be split into rows that repeat the prompt (vlm_rl.learner.row_plan); a response is never split.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vlm_rl.data.vision.family import Pictures, join_vision
from vlm_rl.devices import has_gpu
from vlm_rl.types import Group, KeptIds, LossInputs, ObservedTokens, Prompt, Rollout

PositionFunction = Callable[[Prompt], Tensor]  # -> int64 [3, prompt tokens]
ObservedFunction = Callable[[ObservedTokens], Prompt]  # an observation's tokens with their `vision`

TokenSpan = tuple[int, int]  # where a prompt or a response starts in the row, and its length
RowSpans = Sequence[tuple[TokenSpan, Sequence[TokenSpan]]]  # of each prompt of a row and its responses


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Pairs of runs of tokens, end to end: the i-th run of queries attends to the i-th run of keys. None is empty."""

    queries: Tensor  # int32 [runs + 1]: where each run of queries starts, then where the last one ends
    keys: Tensor  # int32 [runs + 1], the same of the keys
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True, eq=False)
class RowLayout:
    """Which tokens of a row attend to which; vlm_rl.learner.attention.shared_prefix reads it."""

    own: Runs  # every prompt and every response, to itself, causally
    shared: Runs  # all responses of a prompt, to all of the prompt
    responses: Tensor | slice  # where the queries of `shared` are in the row; a slice takes a view, not a copy
    prompts: Tensor | slice  # where its keys are
    windowed: WindowedRuns | None = None  # the same for layers with a window; None if no sequence is longer

    def to(self, device: torch.device | str) -> Self:
        """Return the layout with every tensor of it on the device."""
        return move(self, device)


@dataclass(frozen=True, slots=True, eq=False)
class WindowedRuns:
    """What the tokens of a row attend to in layers with a window.

    A run of queries is a prompt or a response. A response's keys are the end of its prompt that its first token sees,
    and itself. The last query and the last key of a run are the same token, which aligns them.
    """

    runs: Runs
    keys: Tensor  # int64: the row's token that each key is; an end of a prompt is there once for each response
    window: int  # tokens that a query attends to, itself included

    def to(self, device: torch.device | str) -> Self:
        """Return the runs with every tensor on the device."""
        return move(self, device)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """One micro-batch: a row of tokens for the model and, for the loss, K of them that are responses."""

    ids_T: Tensor
    positions_3T: Tensor  # M-RoPE: temporal, height, width
    layout: RowLayout
    spans: RowSpans  # from which other layouts follow: windows, and padded rows
    vision: Mapping[str, Tensor]  # of all images of the row: opaque model inputs, or image_features; {} for text
    predictor_K: Tensor  # int64, the row position whose hidden state predicts response token k
    target_K: Tensor  # int64, the response tokens themselves
    loss: LossInputs
    members: Sequence[tuple[int, int]]  # the group in the mini-batch, and the response in it, of each of lengths_n
    sampled: Sequence[np.ndarray]  # of each response, which of its tokens were sampled: offsets from its start
    kept_Kk: Tensor | None = None  # int64, the ids that each token was sampled from, filled up with -1; None: all
    experts_TLK: Tensor | None = None  # int16, the sampler's; -1 where it chose none: a response's last token
    pictures: Pictures = ()  # of each prompt and observation: its seed, and the sizes of its `vision`
    is_padding: bool = False  # fills up, since every rank does the same number of rows; no metric counts it

    def to(self, device: torch.device | str) -> Self:
        """Return the row with every tensor of it on the device."""
        return move(self, device)


def move(value: Any, device: torch.device | str) -> Any:
    """Return the value with every tensor in its fields and mappings on the device, however deeply nested."""
    if isinstance(value, Tensor):
        if torch.device(device).type != "cuda" or value.is_cuda or not has_gpu():
            return value.to(device)
        return value.pin_memory().to(device, non_blocking=True)  # the host does not wait for the copy
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: move(getattr(value, f.name), device) for f in fields(value)})
    if isinstance(value, Mapping):
        return {key: move(item, device) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some responses of one group, by index."""

    group: int
    responses: tuple[int, ...]
    is_padding: bool = False  # fills up with weight zero, since every rank does the same number of rows


def pack_row(
    chunks: Sequence[Chunk],
    *,
    groups: Sequence[Group],
    prompts: Mapping[int, Prompt],
    weights_PG: np.ndarray,
    positions: PositionFunction,
    observed: ObservedFunction | None = None,
    mean_weight: float = 0.0,
    version: int | None = None,
    tenths_PG: np.ndarray | None = None,
) -> PackedRow:
    """Lay the chunks' prompts and responses out as one row.

    Args:
        chunks: the responses of the row; a chunk names its group by index into the mini-batch.
        groups: the groups of the mini-batch.
        prompts: the prompts of the groups that the chunks name, by the same index.
        weights_PG: the weight of each token of each response, for the whole optimizer step.
        positions: returns a prompt's M-RoPE positions.
        observed: turns an observation into a prompt; None if no response is an episode.
        mean_weight: 1 / (response tokens of the optimizer step, all ranks), for KL and entropy.
        version: the policy version of the step's sampler, if other versions sampled some of the tokens.
        tenths_PG: the tenth of each response by length, 0 to 9, if clipping is counted by it.
    """
    ids: list[np.ndarray] = []
    position_parts: list[Tensor] = []
    predictors: list[np.ndarray] = []
    spans: list[tuple[TokenSpan, list[TokenSpan]]] = []  # of each prompt and its responses
    experts: list[np.ndarray] = []
    vision: list[Mapping[str, Tensor]] = []  # in the order of the row's images
    pictures: list[tuple[int, Mapping[str, int]]] = []
    sampled: list[np.ndarray] = []
    start = 0
    for chunk in chunks:
        prompt = prompts[chunk.group]
        vision.append(prompt.vision)
        seed = zlib.crc32(groups[chunk.group].problem.id.encode())
        pictures.append((seed, _sizes(prompt.vision)))
        prompt_positions = positions(prompt)
        next_position = int(prompt_positions.max()) + 1
        ids.append(prompt.ids)
        position_parts.append(prompt_positions)
        responses: list[TokenSpan] = []
        spans.append(((start, len(prompt.ids)), responses))
        start += len(prompt.ids)
        last_of_prompt = start - 1
        experts += _experts(groups[chunk.group], chunk.responses)
        for index in chunk.responses:
            laid = _laid_out(groups[chunk.group].rollouts[index], next_position, positions, observed)
            ids += laid.ids
            position_parts += laid.positions
            vision += laid.vision
            pictures += [(seed + place, _sizes(seen)) for place, seen in enumerate(laid.vision, 1)]
            sampled.append(laid.sampled)
            # A token is predicted by the one before it, the first by the prompt's last, which its responses share.
            predictors.append(np.where(laid.sampled == 0, last_of_prompt, start + laid.sampled - 1))
            responses.append((start, laid.size))
            start += laid.size
    return PackedRow(
        ids_T=_int64(ids),
        positions_3T=torch.cat(position_parts, dim=1),
        layout=row_layout(spans),
        spans=spans,
        vision=join_vision(vision),
        predictor_K=_int64(predictors),
        target_K=_int64([groups[chunk.group].rollouts[i].ids for chunk in chunks for i in chunk.responses]),
        loss=_loss_inputs(chunks, groups, weights_PG, mean_weight, version, tenths_PG),
        members=[(chunk.group, index) for chunk in chunks for index in chunk.responses],
        sampled=sampled,
        kept_Kk=_kept([groups[chunk.group].rollouts[i].kept for chunk in chunks for i in chunk.responses]),
        experts_TLK=torch.from_numpy(np.concatenate(experts)) if experts else None,
        pictures=pictures,
        is_padding=all(chunk.is_padding for chunk in chunks),
    )


def _sizes(vision: Mapping[str, Tensor]) -> dict[str, int]:
    return {key: len(tensor) for key, tensor in vision.items()}


def _kept(of_responses: Sequence[KeptIds | None]) -> Tensor | None:
    """Return the kept ids of all tokens, filled up with -1; None if nothing was truncated."""
    there = [kept for kept in of_responses if kept is not None]
    if not there:
        return None
    assert len(there) == len(of_responses), "some responses of a row are truncated"
    width = max(int(kept.counts.max()) for kept in there)
    return torch.from_numpy(np.concatenate([kept.table(width) for kept in there]))


@dataclass(frozen=True, slots=True, eq=False)
class _Response:
    """A response in a row: runs of sampled tokens and observations, in order."""

    ids: Sequence[np.ndarray]
    positions: Sequence[Tensor]  # int64 [3, tokens] of each
    vision: Sequence[Mapping[str, Tensor]]
    sampled: np.ndarray  # int64 [R]: the offset of each sampled token
    size: int


def _laid_out(
    rollout: Rollout, next_position: int, positions: PositionFunction, observed: ObservedFunction | None
) -> _Response:
    """Return a response whose first token has the position `next_position`."""
    ids: list[np.ndarray] = []
    parts: list[Tensor] = []
    vision: list[Mapping[str, Tensor]] = []
    offsets: list[np.ndarray] = []
    begun = size = 0
    for end, observation in [*rollout.observed, (len(rollout.ids), None)]:
        ids.append(rollout.ids[begun:end])
        parts.append(torch.arange(next_position, next_position + end - begun).expand(3, -1))
        offsets.append(np.arange(size, size + end - begun))
        size, next_position, begun = size + end - begun, next_position + end - begun, end
        if observation is not None:
            assert observed is not None, rollout.problem_id
            prompt = observed(observation)
            moved = positions(prompt) + next_position
            ids.append(prompt.ids)
            parts.append(moved)
            vision.append(prompt.vision)
            size, next_position = size + len(prompt.ids), int(moved.max()) + 1
    return _Response(ids, parts, vision, np.concatenate(offsets), size)


KEPT_LOG_PROBS = (
    "old_logp_K",
    "reference_logp_K",
    "blind_logp_K",
    "teacher_logp_K",
    "teacher_ids_Kk",
    "teacher_top_Kk",
)


def with_log_probs_of(rows: Sequence[PackedRow], earlier: Sequence[PackedRow]) -> list[PackedRow]:
    """Return the rows with the log-probs that the same responses have in earlier rows, before the first step."""
    filled = list(rows)
    for name in KEPT_LOG_PROBS:
        parts: dict[tuple[int, int], Tensor] = {}
        for row in earlier:
            if (logp_K := getattr(row.loss, name)) is not None:
                parts |= zip(row.members, logp_K.split(row.loss.lengths_n.tolist()), strict=True)
        if parts:
            joined = [torch.cat([parts[member] for member in row.members]) for row in filled]
            filled = [
                replace(row, loss=replace(row.loss, **{name: logp_K}))
                for row, logp_K in zip(filled, joined, strict=True)
            ]
    return filled


def with_sampler_log_probs(mini_batches: Sequence[list[PackedRow]]) -> list[list[PackedRow]]:
    """Return the rows with the sampler's log-probs as the old ones; only the first mini-batch measures the gap.

    Its forward pass is at the weights that sampled. In a later one the gap would include the policy's change.
    """
    return [
        [
            replace(
                row,
                loss=replace(
                    row.loss,
                    old_logp_K=row.loss.sampler_logp_K,
                    old_is_sampler=True,
                    fresh_K=torch.full_like(row.target_K, number == 0, dtype=torch.bool),
                ),
            )
            for row in rows
        ]
        for number, rows in enumerate(mini_batches)
    ]


def _experts(group: Group, responses: Sequence[int]) -> list[np.ndarray]:
    """Return the sampler's experts of prompt and responses, int16 [tokens, layers, K] each; [] without replay."""
    prompt_experts = group.rollouts[0].prompt_experts
    if prompt_experts is None:
        return []
    unread = np.full((1, *prompt_experts.shape[1:]), -1, dtype=np.int16)
    parts = [prompt_experts]
    for index in responses:
        experts = group.rollouts[index].experts
        assert experts is not None and len(experts) == len(group.rollouts[index].ids) - 1, (group.problem.id, index)
        parts += [experts, unread]
    return [part.astype(np.int16) for part in parts]


def row_layout(spans: RowSpans) -> RowLayout:
    """Return the layout of a row from the spans of each prompt and its responses, in the row's order."""
    pieces = [span for prompt, responses in spans for span in (prompt, *responses) if span[1]]
    shared = []  # a prompt's span, and that of its responses together
    for prompt, responses in spans:
        if size := sum(size for _, size in responses):
            shared.append((prompt, (responses[0][0], size)))
    return RowLayout(
        own=_runs(pieces, pieces),
        shared=_runs([together for _, together in shared], [prompt for prompt, _ in shared]),
        responses=_where([together for _, together in shared]),
        prompts=_where([prompt for prompt, _ in shared]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PaddedRows:
    """A row's responses, each after a copy of its prompt and filled up to the longest."""

    tokens_NL: Tensor  # int64, which token of the packed row each one is; what fills up repeats the row's first
    real_R: Tensor  # int64, which of the flattened rows' tokens fill nothing up
    predictor_K: Tensor  # int64, like PackedRow's, into the flattened rows

    def to(self, device: torch.device | str) -> Self:
        """Return the rows with every tensor on the device."""
        return move(self, device)


def padded_rows(spans: RowSpans, sampled: Sequence[np.ndarray]) -> PaddedRows:
    """Return the rows of the responses, in the order of the packed row. The arguments are those of the packed row."""
    parts = [(prompt, response) for prompt, responses in spans for response in responses]
    longest = max(prompt[1] + response[1] for prompt, response in parts)
    tokens_NL = np.zeros((len(parts), longest), dtype=np.int64)
    is_padding_NL = np.ones(tokens_NL.shape, dtype=bool)
    predictors = []
    for row, ((prompt, length), (response, size)) in enumerate(parts):
        tokens_NL[row, :length] = np.arange(prompt, prompt + length)
        tokens_NL[row, length : length + size] = np.arange(response, response + size)
        is_padding_NL[row, : length + size] = False
        predictors.append(row * longest + length - 1 + sampled[row])
    real_R = torch.from_numpy(np.flatnonzero(~is_padding_NL))
    return PaddedRows(torch.from_numpy(tokens_NL), real_R, _int64(predictors))


def windowed_runs(spans: RowSpans, window: int) -> WindowedRuns | None:
    """Return the runs of layers with this window, or None if it holds the longest sequence of the row."""
    if all(prompt[1] + size <= window for prompt, responses in spans for _, size in (*responses, (0, 0))):
        return None
    queries: list[TokenSpan] = []
    keys: list[list[TokenSpan]] = []
    for (start, length), responses in spans:
        seen = min(length, window - 1)
        tail = (start + length - seen, seen)
        some = [response for response in responses if response[1]]
        queries += [(start, length), *some]
        keys += [[(start, length)], *([tail, response] for response in some)]
    lengths = [(0, sum(size for _, size in parts)) for parts in keys]
    return WindowedRuns(_runs(queries, lengths), _tokens([span for parts in keys for span in parts]), window)


def _runs(queries: Sequence[TokenSpan], keys: Sequence[TokenSpan]) -> Runs:
    lengths = [[size for _, size in spans] for spans in (queries, keys)]
    cuts = [torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)) for sizes in lengths]
    longest = [max(sizes, default=0) for sizes in lengths]
    return Runs(queries=cuts[0], keys=cuts[1], longest_query=longest[0], longest_key=longest[1])


def _where(spans: Sequence[TokenSpan]) -> Tensor | slice:
    """Return the index of all tokens of the spans."""
    if len(spans) == 1:
        return slice(spans[0][0], sum(spans[0]))
    return _tokens(spans)


def _tokens(spans: Sequence[TokenSpan]) -> Tensor:
    return torch.cat([torch.arange(start, start + size) for start, size in spans] or [torch.arange(0)])


def _loss_inputs(
    chunks: Sequence[Chunk],
    groups: Sequence[Group],
    weights_PG: np.ndarray,
    mean_weight: float,
    version: int | None,
    tenths_PG: np.ndarray | None,
) -> LossInputs:
    """Return the loss's inputs for the row's responses, end to end."""
    members = [(chunk, index) for chunk in chunks for index in chunk.responses]
    rollouts = [groups[chunk.group].rollouts[index] for chunk, index in members]
    lengths = [len(rollout.ids) for rollout in rollouts]
    fresh = None if version is None else np.concatenate([rollout.versions_R == version for rollout in rollouts])
    return LossInputs(
        old_logp_K=None,
        sampler_logp_K=torch.from_numpy(np.concatenate([r.logprobs for r in rollouts]).astype(np.float32)),
        response_K=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        lengths_n=torch.tensor(lengths),
        advantages_n=torch.tensor([float(groups[c.group].advantages_G[i]) for c, i in members]),
        weights_n=torch.tensor([0.0 if c.is_padding else float(weights_PG[c.group, i]) for c, i in members]),
        mean_weight=torch.tensor(0.0 if all(chunk.is_padding for chunk in chunks) else mean_weight),
        tenth_n=None if tenths_PG is None else torch.tensor([int(tenths_PG[c.group, i]) for c, i in members]),
        fresh_K=None if fresh is None else torch.from_numpy(fresh),
    )


def _int64(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
