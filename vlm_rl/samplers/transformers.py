"""The portable engine: a batched decode loop of our own on transformers' model classes.

Each prompt and its images are encoded once; the key-value cache is then repeated for the responses of the
group. Positions are explicit in all three M-RoPE rows. Nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from vlm_rl.config import Quantization
from vlm_rl.data.prompts import rope_positions
from vlm_rl.data.vision.family import join_vision
from vlm_rl.devices import default_device, free_gpu_memory
from vlm_rl.distributed import alive
from vlm_rl.errors import UserError
from vlm_rl.model_files.model_folder import own_attention
from vlm_rl.model_files.routers import RoutingRecord
from vlm_rl.model_files.weights import sent_buffers, sent_tensors
from vlm_rl.samplers.base import OnGroup, SampleRequest, SamplingParams, make_rollout
from vlm_rl.samplers.distribution import log_probs, process_logits, sample, uniforms
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.episodes import EpisodeBatch
from vlm_rl.samplers.fingerprint import (
    Fingerprint,
    WeightLayout,
    buffer_digests,
    check_buffers,
    fingerprint,
)
from vlm_rl.samplers.partial_batch import PartialBatch, with_prefix
from vlm_rl.samplers.watch import SamplingWatch
from vlm_rl.types import KeptIds, NamedTensors, Prompt, Rollout

_KEYS_AND_VALUES = ("full_attention", "sliding_attention", "chunked_attention")  # types of layers that keep no state
_PREFILL_TOKENS = 32_768  # padded prompt tokens encoded at a time: bounds the activations


class TransformersSampler:
    """A vlm_rl.samplers.base.Sampler on a private copy of the model. Greedy ties go to the lowest id."""

    name = "transformers"

    def __init__(self, settings: EngineSettings) -> None:
        """Load the model. What only vLLM has among the settings is left unread.

        Raises UserError for layers that keep something else than keys and values, or the state of linear attention.
        """
        builder = settings.builder
        self._layer_types: Sequence[str] = getattr(builder.config.get_text_config(), "layer_types", None) or ()
        if others := {*self._layer_types} - {*_KEYS_AND_VALUES, "linear_attention"}:
            raise UserError(
                f"{settings.model_path}: the transformers sampler does not support layers of type {min(others)!r}; "
                "use rollout.sampler=vllm (vlm-rl eval: --sampler vllm), or a model without such layers"
            )
        self.policy_version = 0
        self.dtype = settings.dtype
        self.quantization: Quantization | None = None
        self._builder = builder
        self._max_model_len = settings.max_model_len
        self._batch_size = settings.batch_size
        self._device = default_device()
        auto = AutoModelForImageTextToText if builder.is_vision else AutoModelForCausalLM
        model: Any = auto.from_pretrained(
            settings.model_path,
            dtype=settings.dtype,
            attn_implementation=own_attention(builder.config),
            trust_remote_code=False,
            use_safetensors=True,
        )
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._buffers = buffer_digests(self._model)
        num_layers = builder.config.get_text_config().num_hidden_layers
        self._returns_kept = settings.returns_kept
        self._routing = RoutingRecord(self._model, num_layers=num_layers) if settings.returns_routing else None
        self._banned = torch.tensor(builder.banned_ids, device=self._device)
        self._eos = torch.tensor(builder.eos_ids, device=self._device)

    @torch.inference_mode()
    def generate(self, request: SampleRequest, *, on_group: OnGroup | None = None) -> list[list[Rollout]]:
        """See Sampler.generate."""
        request.check_lengths(self._max_model_len)
        if request.episodes is not None:
            return self._episodes(request, on_group)
        prompts, params = request.prompts, request.params
        groups: list[list[Rollout]] = [[] for _ in prompts]
        # Prompts of similar length side by side waste little on padding.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
        for batch in self._batches(order, prompts, params):
            encoded = self._prefill([prompts[index] for index in batch])
            rows = [(row, index, g) for row, index in enumerate(batch) for g in range(params.responses)]
            for start in range(0, len(rows), self._batch_size):
                part = rows[start : start + self._batch_size]
                seeds = [request.seed_of(index, g) for _, index, g in part]
                selected = encoded.select(torch.tensor([row for row, _, _ in part], device=self._device))
                decoded = self._decode(selected, params, seeds, watch=request.watch)
                for (row, index, g), (ids, logprobs, experts, kept) in zip(part, decoded, strict=True):
                    groups[index].append(
                        make_rollout(
                            prompts[index],
                            g,
                            ids,
                            logprobs,
                            builder=self._builder,
                            version=self.policy_version,
                            experts=np.stack([*encoded.experts[row], *experts]) if encoded.experts else None,
                            kept=kept,
                        )
                    )
            if on_group is not None:
                for index in batch:
                    on_group(index, groups[index])
        return groups

    def _episodes(self, request: SampleRequest, on_group: OnGroup | None) -> list[list[Rollout]]:
        """Sample episodes a round of turns at a time. All wait for the slowest answer of a round."""
        batch = EpisodeBatch(request, self._builder, version=self.policy_version, on_group=on_group)
        params = replace(request.params, responses=1)
        while turns := batch.ready(wait=True):
            prompts = [turn.seen(self._builder) for turn in turns]
            order = sorted(range(len(turns)), key=lambda row: len(prompts[row].ids))
            for rows in self._batches(order, prompts, params):
                sampled = self._decode(
                    self._prefill([prompts[row] for row in rows]),
                    params,
                    [batch.seed_of(turns[row]) for row in rows],
                    watch=request.watch,
                    limits=[turns[row].max_tokens for row in rows],
                )
                for row, (ids, logprobs, *_) in zip(rows, sampled, strict=True):
                    batch.sampled(turns[row], ids, logprobs)
            batch.settle()
        return batch.groups

    @torch.inference_mode()
    def generate_until(self, request: SampleRequest, *, enough: int, on_group: OnGroup) -> list[list[Rollout]]:
        """See InProcessSampler.generate_until. A response's earlier tokens are the end of its prompt."""
        request.check_lengths(self._max_model_len)
        prompts, params = request.prompts, request.params
        progress = PartialBatch(request, self._builder, enough=enough, on_group=on_group)
        rows = progress.unfinished()
        prefixes = [request.begun[index][g].ids for index, g in rows]
        read = [with_prefix(prompts[index], ids) for (index, _), ids in zip(rows, prefixes, strict=True)]
        for batch in self._batches(range(len(rows)), read, replace(params, responses=1)):
            if progress.is_enough:
                break
            # Responses that have no token yet share their prompt: it is the same object.
            distinct = {id(read[row]): read[row] for row in batch}
            place = {key: number for number, key in enumerate(distinct)}
            encoded = self._prefill(list(distinct.values()))
            selected = encoded.select(torch.tensor([place[id(read[row])] for row in batch], device=self._device))
            seeds = [request.seed_of(*rows[row], sampled=len(prefixes[row])) for row in batch]
            sampled = self._decode(
                selected,
                params,
                seeds,
                watch=request.watch,
                limits=[params.max_tokens - len(prefixes[row]) for row in batch],
                is_enough=progress.would_be_enough([rows[row] for row in batch]),
            )
            request.watch.add(ended=len(batch))
            for row, (ids, logprobs, *_) in zip(batch, sampled, strict=True):
                progress.extend(*rows[row], ids, logprobs, version=self.policy_version)
        return progress.groups

    @torch.inference_mode()
    def stream(self, request: SampleRequest) -> Iterator[int]:
        """See Sampler.stream."""
        params, (prompt,) = request.params, request.prompts
        assert params.responses == 1, params
        request.check_lengths(self._max_model_len)
        encoded = self._prefill([prompt])
        noise = uniforms(request.seeds(0), params.max_tokens).to(self._device) if params.temperature > 0 else None
        for t in range(params.max_tokens):
            alive()
            scaled = self._scaled(encoded.logits, params)
            tokens = scaled.argmax(1) if noise is None else sample(scaled, noise[:, t])
            yield int(tokens)
            if t + 1 == params.max_tokens or bool(torch.isin(tokens, self._eos)):
                return
            encoded = self._extend(encoded, tokens, t)

    def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        """See Sampler.load_weights. Tensors that are not given keep their old values, which check_fresh detects."""
        self._model.to(self._device)
        own: dict[str, torch.Tensor] = {**dict(self._model.named_parameters()), **dict(sent_buffers(self._model))}
        for name, tensor in tensors:
            if name not in own:
                raise ValueError(f"the sampler's model has no parameter {name!r}; is its architecture different?")
            assert own[name].shape == tensor.shape, (name, own[name].shape, tensor.shape)
            own[name].data.copy_(tensor)
        check_buffers(self.name, buffer_digests(self._model), self._buffers)
        self.policy_version = version

    def fingerprint(self, layout: WeightLayout) -> Fingerprint:
        """See Sampler.fingerprint. This model has the learner's names by itself."""
        return fingerprint(sent_tensors(self._model), dtype=self.dtype)  # a bias may stay in float32

    def sleep(self) -> None:
        """See Sampler.sleep. The weights move to the host."""
        if self._device.type != "cpu":
            self._model.to("cpu")
            free_gpu_memory()

    def close(self) -> None:
        del self._model

    def _batches(self, order: Sequence[int], prompts: Sequence[Prompt], params: SamplingParams) -> list[list[int]]:
        """Cut the ordered prompts into batches, bounded by responses and by padded prompt tokens."""
        most = max(1, self._batch_size // params.responses)
        batches: list[list[int]] = []
        longest = 0  # prompt of the batch: the order need not be one of lengths
        for index in order:
            length = len(prompts[index].ids)
            longest = max(longest, length)
            if not batches or len(batches[-1]) == most or longest * (len(batches[-1]) + 1) > _PREFILL_TOKENS:
                batches.append([])
                longest = length
            batches[-1].append(index)
        return batches

    def _prefill(self, prompts: Sequence[Prompt]) -> _Encoded:
        """Return the prompts, padded on the left, read up to their last token."""
        longest = max(len(prompt.ids) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._builder.pad_id)
        mask = torch.zeros_like(ids)
        positions = torch.zeros(3, len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            start = longest - len(prompt.ids)
            ids[row, start:] = torch.from_numpy(prompt.ids.astype(np.int64))
            mask[row, start:] = 1
            positions[:, row, start:] = rope_positions(self._model, prompt)
        joined = join_vision([prompt.vision for prompt in prompts])
        vision = {key: self._for_model(tensor) for key, tensor in joined.items()}
        if vision and self._builder.family is not None:
            vision = self._builder.family.vision_inputs(vision) | self._token_types(ids)
        cache = RoomyCache(self._layer_types)
        padded = bool((mask == 0).any())
        logits = self._forward(ids, mask if padded else None, positions, cache, vision)
        experts = []
        if self._routing is not None:
            experts_BTLK = self._routing.take().unflatten(0, ids.shape)
            experts = [experts_BTLK[row, mask[row] == 1].numpy() for row in range(len(prompts))]
        next_position = positions.amax((0, 2)) + 1
        return _Encoded(cache, logits, mask.to(self._device) if padded else None, next_position, experts)

    def _token_types(self, ids_BT: Tensor) -> dict[str, Tensor]:
        """Return the further inputs by which a model without positions of its own knows the tokens of images."""
        family = self._builder.family
        if family is None or family.has_mrope:
            return {}
        rows = [family.token_types(self._builder.config, ids_T) for ids_T in ids_BT]
        return {key: torch.cat([row[key] for row in rows]).to(self._device) for key in rows[0]}

    def _forward(
        self, ids_BT: Tensor, mask: Tensor | None, positions_3BT: Tensor, cache: Cache, vision: dict[str, Tensor]
    ) -> Tensor:
        """Return the logits [B, V] after the last token of each row."""
        family = self._builder.family
        positions = positions_3BT if family is not None and family.has_mrope else positions_3BT[0]
        output = self._model(
            input_ids=ids_BT.to(self._device),
            attention_mask=None if mask is None else mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **vision,
        )
        return output.logits[:, -1]

    def _for_model(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self.dtype if tensor.is_floating_point() else None)

    def _scaled(self, logits: Tensor, params: SamplingParams) -> Tensor:
        """Return the logits [B, V] of the distribution that is sampled from."""
        return process_logits(
            logits,
            banned=self._banned,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
        )

    def _decode(
        self,
        encoded: _Encoded,
        params: SamplingParams,
        seeds: list[int],
        *,
        watch: SamplingWatch,
        limits: Sequence[int] | None = None,
        is_enough: Callable[[list[int]], bool] = lambda _: False,
    ) -> list[tuple[np.ndarray, np.ndarray, list[np.ndarray], KeptIds | None]]:
        """Return (ids, log-probs, experts of each token that was read, kept ids) of a response for each row.

        Args:
            encoded: the rows, read up to their last token.
            params: of the sampling.
            seeds: of each row.
            watch: is told of each token.
            limits: most tokens of each row; None: params.max_tokens of all.
            is_enough: is given the rows that end, after each token; where it is true, the others stay as they are.
        """
        num_rows = len(seeds)
        ids = torch.zeros(num_rows, params.max_tokens, dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(num_rows, params.max_tokens, device=self._device)
        lengths = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        noise = uniforms(seeds, params.max_tokens).to(self._device) if params.temperature > 0 else None
        rows = torch.arange(num_rows, device=self._device)  # the responses that still grow
        grows = torch.ones_like(rows, dtype=torch.bool)
        left = num_rows
        most = torch.tensor(limits or [params.max_tokens] * num_rows, device=self._device)
        left_ids: list[tuple[Tensor, Tensor, Tensor]] = []  # of each token: (rows, place in them, id) of what is left
        experts: list[tuple[Tensor, Tensor]] = []  # (rows, their experts [rows, layers, K]) of each pass
        for t in range(params.max_tokens):
            alive()
            scaled = self._scaled(encoded.logits, params)
            tokens = scaled.argmax(1) if noise is None else sample(scaled, noise[rows, t])
            ids[rows, t] = tokens
            logprobs[rows, t] = log_probs(scaled, tokens)
            if self._returns_kept and params.top_k and params.temperature > 0:  # top_p alone would keep nearly all
                place, index = scaled.isfinite().nonzero().unbind(1)
                left_ids.append((rows, place, index))
            lengths[rows] += grows
            ends = grows & (torch.isin(tokens, self._eos) | (most[rows] == t + 1))
            grows &= ~ends
            growing, left = left, int(grows.sum())
            watch.add(tokens=growing, longest=t + 1, ended=growing - left if limits is None else 0)
            if left == 0 or (limits and is_enough(rows[ends].tolist())):
                break
            # Copying the cache costs about one step: drop finished rows only when an eighth is done.
            if left <= len(rows) * 7 // 8:
                kept = grows.nonzero()[:, 0]
                encoded, tokens = encoded.select(kept), tokens[kept]
                rows, grows = rows[kept], grows[kept]
            encoded = self._extend(encoded, tokens, t)
            if self._routing is not None:
                experts.append((rows, self._routing.take()))
        counts = lengths.tolist()
        all_ids, all_logprobs = ids.cpu().numpy().astype(np.int32), logprobs.cpu().numpy()
        read: list[list[np.ndarray]] = [[] for _ in counts]  # a row that ended early may have more than it needs
        for of_rows, experts_BLK in experts:
            for row, experts_LK in zip(of_rows.tolist(), experts_BLK.numpy(), strict=True):
                read[row].append(experts_LK)
        return [
            (all_ids[row, :count], all_logprobs[row, :count], read[row][: count - 1], of_row)
            for (row, count), of_row in zip(enumerate(counts), _kept_of_rows(left_ids, counts), strict=True)
        ]

    def _extend(self, encoded: _Encoded, tokens_B: Tensor, t: int) -> _Encoded:
        """Append a token to each row: the t-th of the response, counted from 0."""
        positions = (encoded.next_position + t).expand(3, -1)[..., None]
        mask = encoded.mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = self._forward(tokens_B[:, None], mask, positions, encoded.cache, {})
        return _Encoded(encoded.cache, logits, mask, encoded.next_position)


def _kept_of_rows(kept: Sequence[tuple[Tensor, Tensor, Tensor]], counts: Sequence[int]) -> Sequence[KeptIds | None]:
    """Return the kept ids of each row's tokens. A row that ended early may have more tokens than its count."""
    if not kept:
        return [None] * len(counts)
    by_token: list[list[np.ndarray]] = [[] for _ in counts]
    for rows, places, ids in kept:
        parts = np.split(ids.cpu().numpy(), places.bincount(minlength=len(rows)).cumsum(0)[:-1].cpu().numpy())
        for row, part in zip(rows.tolist(), parts, strict=True):
            by_token[row].append(part)
    return [KeptIds.of(parts[:count]) for parts, count in zip(by_token, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Rows that have been read up to their last token."""

    cache: RoomyCache
    logits: Tensor  # [B, V] after the last token
    mask: Tensor | None  # [B, T], 0 where padded; None if no row is
    next_position: Tensor  # [B] on the CPU or the device: position of the first response token
    experts: Sequence[np.ndarray] = ()  # [P, layers, K] of each prompt that was read, where routing is recorded

    def select(self, rows: Tensor) -> _Encoded:
        """Return the given rows; a row may be given several times."""
        mask = None if self.mask is None else self.mask[rows]
        position = self.next_position.to(rows.device)[rows]
        return _Encoded(self.cache.select(rows), self.logits[rows], mask, position)


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, with spare room at their end: a step writes one token and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.room: tuple[Tensor, Tensor] | None = None  # [B, heads, capacity, width] each

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, new, width]. Returns everything so far, as views."""
        start, end = self.length, self.length + key_states.shape[-2]
        self.length = end
        if self.room is None:
            self.room, self.is_initialized = (key_states, value_states), True
            return self.room
        if end > self.room[0].shape[-2]:
            self.room = _with_room(self.room[0], start, end), _with_room(self.room[1], start, end)
        keys, values = self.room
        keys[..., start:end, :] = key_states
        values[..., start:end, :] = value_states
        return keys[..., :end, :], values[..., :end, :]

    def get_seq_length(self) -> int:
        return self.length

    def select(self, rows: Tensor) -> RoomyLayer:
        """Return a new layer of the given rows."""
        chosen = RoomyLayer()
        assert self.room is not None
        chosen.room = self.room[0][rows], self.room[1][rows]
        chosen.length, chosen.is_initialized = self.length, True
        return chosen


class StateLayer(LinearAttentionLayer):
    """The states of one layer of linear attention, whose size does not grow."""

    def select(self, rows: Tensor) -> StateLayer:
        """Return a new layer of the given rows."""
        chosen: Any = copy(self)
        for name in ("conv_states", "recurrent_states"):
            setattr(chosen, name, {index: state[rows] for index, state in getattr(self, name).items()})
        return chosen


class RoomyCache(Cache):
    """A cache of RoomyLayers, with StateLayers where a model has linear attention."""

    def __init__(self, layer_types: Sequence[str] = ()) -> None:
        if "linear_attention" in layer_types:
            states: list[Any] = [StateLayer() if kind == "linear_attention" else RoomyLayer() for kind in layer_types]
            super().__init__(layers=states)
        else:
            super().__init__(layer_class_to_replicate=RoomyLayer)

    def select(self, rows: Tensor) -> RoomyCache:
        """Return a new cache of the given rows; a row may be given several times."""
        chosen = copy(self)
        chosen.layers = []
        for layer in self.layers:
            assert isinstance(layer, RoomyLayer | StateLayer)
            chosen.layers.append(layer.select(rows))
        return chosen


def _with_room(tensor: Tensor, used: int, needed: int) -> Tensor:
    """Return a copy of the used part with a quarter more room than needed, at least 64 tokens more."""
    batch, heads, _, width = tensor.shape
    grown = tensor.new_empty(batch, heads, needed + max(64, needed // 4), width)
    grown[..., :used, :] = tensor[..., :used, :]
    return grown
