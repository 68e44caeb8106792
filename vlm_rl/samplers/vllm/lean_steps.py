"""Spare a decode step what the host does for each token and no rollout needs; no token and no log-prob changes.

vLLM makes objects and lists of every token for whoever reads along, ranks it among all tokens, and joins the biases
of all requests whenever one begins or ends. It looks for new blocks of keys and values where none can be missing, and
on a CPU it calls a generator for each token. A rollout is read once, at its end. A server keeps vLLM's ways: its
readers are elsewhere, and each request brings biases of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from vlm_rl.types import KeptIds

_AHEAD = 64  # seeds of a response that are made at a time
_SEED_BOUND = 1 << 31  # vLLM's


@dataclass(slots=True)
class _KeptResponse:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    left: list[np.ndarray] = field(default_factory=list)  # what truncation left to sample each token from
    num_cached: int = 0  # tokens before it whose keys and values were there


class ResponseLog:
    """The tokens and log-probs of responses until they are taken.

    A step's log-probs are one array, which the scheduler would slice for each response. It does not get them: they
    are added to the tokens that it gives out, so a token that it drops has none. vLLM's output processor sees only
    the last step of a response, or every step if each brings the experts of its tokens.
    """

    def __init__(self, scheduler: Any) -> None:
        """Stand in front of the scheduler of an engine in this process."""
        self._update = scheduler.update_from_output
        self._kept: dict[str, _KeptResponse] = {}
        self.num_tokens = self.longest = 0  # of what was kept since `clear`
        scheduler.update_from_output = self._update_from_output

    def keep(self, name: str) -> None:
        """Keep what the request of this name samples. It must ask only for the log-probs of its own tokens."""
        self._kept[name] = _KeptResponse()

    def take(self, name: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Return a response's ids so far, their log-probs, and what else a Rollout takes of it; forget them."""
        kept = self._kept.pop(name)
        more = {"num_cached": kept.num_cached, "kept": KeptIds.of(kept.left) if kept.left else None}
        return np.array(kept.ids, dtype=np.int64), np.array(kept.logprobs, dtype=np.float64), more

    def clear(self) -> None:
        """Forget what was not taken."""
        self._kept.clear()
        self.num_tokens = self.longest = 0

    def _update_from_output(self, scheduled: Any, sampled: Any) -> Any:
        if not self._kept or sampled.logprobs is None:
            return self._update(scheduled, sampled)
        rows, sampled.logprobs = sampled.logprobs, None
        made = self._update(scheduled, sampled)
        logprobs, firsts = rows.logprobs[:, 0].tolist(), rows.cu_num_generated_tokens
        for outputs in made.values():
            passed = []
            for output in outputs.outputs:
                kept = self._kept.get(output.request_id)
                if kept is None:
                    passed.append(output)
                    continue
                if output.prefill_stats is not None:
                    kept.num_cached = output.prefill_stats.num_cached_tokens
                if ids := output.new_token_ids:
                    row = sampled.req_id_to_index[output.request_id]
                    first = row if firsts is None else firsts[row]
                    kept.ids.extend(ids)
                    kept.logprobs.extend(logprobs[first : first + len(ids)])
                    if output.new_sampling_mask is not None:
                        kept.left.extend(map(np.array, output.new_sampling_mask.to_nested_list()))
                    self.num_tokens += len(ids)
                    self.longest = max(self.longest, len(kept.ids))
                if output.finish_reason is not None or output.routed_experts is not None:
                    passed.append(output)
            outputs.outputs = passed
        return made


def spare_full_blocks(manager: Any) -> None:
    """Let vLLM's manager of keys and values look for a block only where a token may need one, or may fill one.

    Between these a response's next token has its place in the last block. Nothing is freed either, as long as every
    layer attends to all tokens; a model with other layers is left unchanged.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    allocate, kinds = manager.allocate_slots, manager.coordinator.single_type_managers
    if len(kinds) > 1 or type(kinds[0]) is not FullAttentionManager:
        return
    block = kinds[0].block_size
    if block != manager.block_pool.hash_block_size:  # it may keep a part of a block then
        return

    def allocate_slots(
        request: Any, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **more: Any
    ) -> Any:
        is_plain = num_new_tokens == 1 and not num_lookahead_tokens and not args and not more
        # A filled block is kept for others once its last token is known: up to two steps later.
        if is_plain and 2 < request.num_computed_tokens % block < block - 1:
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **more)

    manager.allocate_slots = allocate_slots


def ban(worker: Any, *, ids: Sequence[int]) -> None:
    """Let the worker's model give minus infinity for these ids in every row."""
    model = worker.get_model()
    compute_logits, banned = model.compute_logits, torch.tensor(ids, dtype=torch.int64, device=worker.device)

    def without_banned(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute_logits(*args, **kwargs)
        return None if logits is None else logits.index_fill_(-1, banned, -torch.inf)

    model.compute_logits = without_banned


def sample_leanly_on_cpu(worker: Any) -> None:
    """Let a CPU's sampler leave out the rank of each token, and make the seeds of many tokens at a time.

    The rank is a pass over all log-probs by a function that vLLM would compile at the first response.
    """
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    sampler, seeds = worker.model_runner.sampler, SeedsAhead()
    gather, sample = sampler.gather_logprobs, sampler.topk_topp_sampler.forward

    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        if num_logprobs:
            return gather(logprobs, num_logprobs, token_ids)
        ids = token_ids[:, None]
        return LogprobsTensors(ids.int(), logprobs.gather(-1, ids), torch.zeros_like(token_ids))

    def forward(
        logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if len(generators) < len(logits):
            return sample(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        return torch.ops._C.fused_gumbel_argmax(logits, seeds.next(generators)), logprobs

    sampler.gather_logprobs = gather_logprobs
    sampler.topk_topp_sampler.forward = forward


def repeat_settings_for_drafts(worker: Any) -> None:
    """Let a CPU's engine judge draft tokens at their request's temperature, top_k and top_p.

    vLLM 0.32 repeats these for each draft token in a kernel that, on a CPU, writes them into a copy of its output
    and drops the copy. The logits are then divided by what was in memory, and tokens of probability 0 are sampled.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(x: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
        counts = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
        each = x.repeat_interleave(counts, output_size=num_tokens)
        return each.masked_fill(each == replace_from, replace_to) if replace_from != replace_to else each

    rejection_sampler.expand_batch_to_tokens = expand


class SeedsAhead:
    """The numbers that vLLM's CPU sampler takes from a response's generator, one for each token, made in advance."""

    def __init__(self) -> None:
        self._left: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()

    def next(self, generators: Mapping[int, torch.Generator]) -> Tensor:
        """Return [B] the next number of each row's generator."""
        return torch.tensor([self._of(generators[row]) for row in range(len(generators))])

    def _of(self, generator: torch.Generator) -> int:
        left = self._left.get(generator)
        if not left:
            left = torch.randint(_SEED_BOUND, (_AHEAD,), generator=generator).tolist()[::-1]
            self._left[generator] = left
        return left.pop()
