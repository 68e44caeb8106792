"""The fast engine: vLLM inside this process. What runs inside a server imports vllm too, nothing else does.

Weights are streamed into the running engine. Its three caches (prefix blocks, image inputs, image embeddings)
are then reset, since they belong to the old weights. They are reset before every `generate` too, so that a
response never depends on what was generated earlier.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from safetensors.torch import save_file

from vlm_rl.config import LoraConfig, Quantization
from vlm_rl.devices import has_gpu
from vlm_rl.distributed import alive, rank
from vlm_rl.errors import UserError
from vlm_rl.model_files.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX
from vlm_rl.model_files.checkpoint_layout import as_published
from vlm_rl.samplers.base import OnGroup, SampleRequest, SamplingParams, make_rollout
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.episodes import EpisodeBatch, TurnToSample
from vlm_rl.samplers.fingerprint import (
    Fingerprint,
    StaleWeightsError,
    WeightLayout,
    check_buffers,
    join_shards,
)
from vlm_rl.samplers.partial_batch import PartialBatch, with_prefix
from vlm_rl.samplers.vllm.lean_steps import (
    ResponseLog,
    ban,
    repeat_settings_for_drafts,
    sample_leanly_on_cpu,
    spare_full_blocks,
)
from vlm_rl.samplers.vllm.options import (
    engine_environment,
    engine_options,
    prompt_request,
    sampling_options,
    shared_card,
    start_note,
)
from vlm_rl.samplers.vllm.start import check_known, compiler_kept, refusals_in_words, start_numba, starting
from vlm_rl.samplers.vllm.worker import (
    forget_expert_kernels,
    repack_heads,
    sleep_beside_others,
    takes_adapters_in_towers,
    worker_buffers,
    worker_checksums,
    wraps_experts,
)
from vlm_rl.samplers.watch import SamplingWatch
from vlm_rl.types import NamedTensors, Prompt, Rollout

if TYPE_CHECKING:
    import vllm

_ANSWER_LAG = 8  # engine steps until it takes up a quick answer; in that time many crops of photographs are made


class VllmSampler:
    """A vlm_rl.samplers.base.Sampler on an in-process vllm.LLM.

    Log-probs are vLLM's `processed_logprobs`: log_softmax((logits + bias) / temperature) in float32, with a bias
    of minus infinity on `builder.banned_ids` and of 0 elsewhere (greedy: temperature 1). The learner computes the
    same. Penalties, min_p and the model's generation_config are off.
    """

    name = "vllm"

    def __init__(self, settings: EngineSettings, *, phase: Callable[[str], Any] = lambda text: None) -> None:
        """Start the engine.

        Args:
            settings: the model, and how it samples.
            phase: called with what the start is doing.

        Raises UserError for one of `settings.vllm_options` that vLLM does not know or that it refuses.
        """
        adapter = settings.adapter
        self.policy_version = 0
        self.dtype = settings.dtype
        self.quantization: Quantization | None = settings.quantization
        self._builder = settings.builder
        self._max_model_len = settings.max_model_len
        self._vllm = import_vllm()
        check_known(settings.vllm_options, self._vllm.EngineArgs)
        self._on_cpu = not has_gpu()
        options = shared_card(on_cpu=self._on_cpu) | engine_options(settings, on_cpu=self._on_cpu)
        if adapter is not None:
            options |= _adapter_settings(adapter)
        self._returns_kept = settings.returns_kept
        if settings.returns_kept:
            if self._on_cpu:
                raise UserError(
                    "rollout.top_k with rollout.sampler=vllm: vLLM tells which ids it kept only from its second "
                    "model runner, which CPUs do not have; use rollout.sampler=transformers, or a GPU"
                )
            options["return_sampling_mask"] = True
        if settings.returns_routing:
            options["enable_return_routed_experts"] = True
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            options.setdefault("distributed_executor_backend", "external_launcher")
        is_eager = options["enforce_eager"]
        note = "" if is_eager and self._on_cpu else start_note(is_eager=is_eager, on_cpu=self._on_cpu)
        if note and rank() == 0 and os.environ.get("VLM_RL_OUTPUT") != "quiet":
            print(note, flush=True)
        phase("vLLM starts")
        instead = "use the transformers sampler" if adapter is None else "set model.lora.sync=merged"
        refusals = refusals_in_words(settings.model_path, instead=instead, options=settings.vllm_options)
        with _global_random_state_kept(), refusals, starting(phase):
            self._llm = self._vllm.LLM(**options)
            if options.get("speculative_config") is not None:
                start_numba()
        # The finalizer would destroy torch.distributed's default group, which may be the learner's by then.
        self._llm.llm_engine.engine_core._finalizer.detach()
        self._asleep = False
        self._adapter, self._loaded = adapter, None
        if adapter is not None and (problem := self._problem_of_adapters(adapter)):
            self.close()
            raise UserError(f"model.lora.sync is adapter, and {problem}; set model.lora.sync=merged")
        self._as_published = as_published(settings.model_path)
        self._group, self._rank = _own_ranks() if settings.tensor_parallel > 1 else (None, 0)
        self._is_speculative = options.get("speculative_config") is not None
        self._log = self._lean_steps()
        self._buffers = self._on_each_rank(worker_buffers)

    def _lean_steps(self) -> ResponseLog:
        """Install our parts in the engine's steps; with drafts, those that handle several tokens a step."""
        scheduler: Any = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._llm.collective_rpc(ban, kwargs={"ids": list(self._builder.banned_ids)})
        self._llm.collective_rpc(sleep_beside_others)
        if self._on_cpu:
            self._llm.collective_rpc(repeat_settings_for_drafts if self._is_speculative else sample_leanly_on_cpu)
        if not self._is_speculative:
            spare_full_blocks(scheduler.kv_cache_manager)
        return ResponseLog(scheduler)

    def generate(self, request: SampleRequest, *, on_group: OnGroup | None = None) -> list[list[Rollout]]:
        """See Sampler.generate. Each response is one of vLLM's requests: `n` would share noise between prompts."""
        request.check_lengths(self._max_model_len)
        self._reset_caches()
        if request.episodes is not None:
            return self._episodes(request, on_group)
        prompts, params = request.prompts, request.params
        # The ranks of an engine must submit the same requests in the same order; each keeps what it asked for.
        per_rank = self._gathered([(request.seeds(index), _request(prompt)) for index, prompt in enumerate(prompts)])
        asked = [
            (rank, index, g, of_prompt, self._sampling(params, own_seed))
            for rank, of_rank in enumerate(per_rank)
            for index, (seeds, of_prompt) in enumerate(of_rank)
            for g, own_seed in enumerate(seeds)
        ]
        groups: list[dict[int, Rollout]] = [{} for _ in prompts]
        with _global_random_state_kept():
            requests = [(of_prompt, setting) for *_, of_prompt, setting in asked]
            for number, ids, logprobs, more in self._finished(requests, watch=request.watch):
                rank, index, g, *_ = asked[number]
                if rank != self._rank:
                    continue
                request.watch.add(ended=1)
                groups[index][g] = make_rollout(
                    prompts[index], g, ids, logprobs, builder=self._builder, version=self.policy_version, **more
                )
                if on_group is not None and len(groups[index]) == params.responses:
                    on_group(index, _in_order(groups[index]))
        return [_in_order(group) for group in groups]

    def _episodes(self, request: SampleRequest, on_group: OnGroup | None) -> list[list[Rollout]]:
        """Sample episodes. An episode that waits for its environment does not hold up the others."""
        assert self._group is None, "an environment answers the ranks of an engine at different times"
        version = self.policy_version
        batch = EpisodeBatch(request, self._builder, version=version, on_group=on_group, lag=_ANSWER_LAG)
        turns: dict[int, TurnToSample] = {}
        numbers = count()

        def more(is_idle: bool) -> list[tuple[dict[str, Any], vllm.SamplingParams]]:
            ready = batch.ready(wait=is_idle)
            turns.update({number: turn for turn, number in zip(ready, numbers, strict=False)})
            return [
                (
                    _request(turn.prompt),
                    self._sampling(replace(request.params, max_tokens=turn.max_tokens), batch.seed_of(turn)),
                )
                for turn in ready
            ]

        with _global_random_state_kept():
            for number, ids, logprobs, of_turn in self._finished((), more=more, watch=request.watch):
                batch.sampled(turns.pop(number), ids, logprobs, num_cached=of_turn["num_cached"])
        return batch.groups

    def generate_until(self, request: SampleRequest, *, enough: int, on_group: OnGroup) -> list[list[Rollout]]:
        """See InProcessSampler.generate_until. A response's earlier tokens are the end of its prompt."""
        request.check_lengths(self._max_model_len)
        self._reset_caches()
        prompts, params = request.prompts, request.params
        batch = PartialBatch(request, self._builder, enough=enough, on_group=on_group)
        numbers = batch.unfinished()
        shared = {index: _request(prompts[index]) for index in {index for index, _ in numbers}}
        asked: list[tuple[dict[str, Any], vllm.SamplingParams]] = []
        for index, g in numbers:
            ids = request.begun[index][g].ids
            whole = with_prefix(prompts[index], ids).sampler_ids.tolist()
            left = replace(params, max_tokens=params.max_tokens - len(ids))
            own_seed = request.seed_of(index, g, sampled=len(ids))
            asked.append(({**shared[index], "prompt_token_ids": whole}, self._sampling(left, own_seed)))
        with _global_random_state_kept():
            finished = self._finished(asked, is_enough=lambda: batch.is_enough, watch=request.watch)
            for number, ids, logprobs, _ in finished:
                request.watch.add(ended=1)
                index, g = numbers[number]
                batch.extend(index, g, ids, logprobs, version=self.policy_version)
        return batch.groups

    def _gathered(self, value: Any) -> list[Any]:
        """Return the value of each rank of this engine, in rank order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def _on_each_rank(self, call: Any, **kwargs: Any) -> list[Any]:
        """Run `call` in the worker of each rank of this engine and return the results."""
        return self._gathered(self._llm.collective_rpc(call, kwargs=kwargs)[0])

    def _finished(
        self,
        requests: Sequence[tuple[dict[str, Any], vllm.SamplingParams]],
        *,
        watch: SamplingWatch,
        is_enough: Callable[[], bool] = lambda: False,
        more: Callable[[bool], Sequence[tuple[dict[str, Any], vllm.SamplingParams]]] = lambda _: (),
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, dict[str, Any]]]:
        """Yield the number, ids and log-probs of each request when it ends, and further arguments of `make_rollout`.

        Once is_enough(), the unfinished ones come too, with the tokens so far. Closing the iterator aborts them.

        Args:
            requests: in the order of their numbers.
            watch: counts the tokens.
            is_enough: whether to stop before all have ended.
            more: returns further requests; it is told whether the engine is idle, and may wait then.
        """
        engine: Any = self._llm.llm_engine
        names: list[str] = []

        def add(added: Sequence[tuple[dict[str, Any], vllm.SamplingParams]]) -> None:
            for request, setting in added:
                names.append(engine.add_request(str(len(names)), request, setting, lora_request=self._loaded))
                self._log.keep(names[-1])

        try:
            add(requests)
            while not is_enough():
                add(more(not engine.has_unfinished_requests()))
                if not engine.has_unfinished_requests():
                    break
                alive()
                before = self._log.num_tokens
                outputs = engine.step()
                watch.add(tokens=self._log.num_tokens - before, longest=self._log.longest)
                for output in outputs:
                    if output.finished:
                        number = int(output.request_id)
                        (whole,) = output.outputs
                        yield self._taken(number, names[number], experts=whole.routed_experts)
            for number, name in enumerate(names):
                if name in engine.output_processor.request_states:
                    yield self._taken(number, name)
        finally:
            engine.abort_request(names, internal=True)  # by the names that the engine gave
            self._log.clear()

    def _taken(self, number: int, name: str, **more: Any) -> tuple[int, np.ndarray, np.ndarray, dict[str, Any]]:
        ids, logprobs, also = self._log.take(name)
        return number, ids, logprobs, more | also

    def stream(self, request: SampleRequest) -> Iterator[int]:
        """See Sampler.stream. Closing the iterator aborts the request."""
        (prompt,), (seed,) = request.prompts, request.seeds(0)
        request.check_lengths(self._max_model_len)
        self._reset_caches()
        engine: Any = self._llm.llm_engine
        settings = self._sampling(request.params, seed, whole=False)
        with _global_random_state_kept():
            name = engine.add_request("stream", _request(prompt), settings, lora_request=self._loaded)
        given = 0
        try:
            while engine.has_unfinished_requests():
                with _global_random_state_kept():
                    outputs = engine.step()
                for output in outputs:
                    yield from output.outputs[0].token_ids[given:]
                    given = len(output.outputs[0].token_ids)
        finally:
            engine.abort_request([name], internal=True)

    def load_weights(self, tensors: NamedTensors, *, version: int) -> None:
        """See Sampler.load_weights. The key-value cache wakes last: learner and engine weights come first.

        With an adapter, the tensors are the adapter's, and replace the last one's.
        """
        if self._asleep:
            self._llm.wake_up(tags=["weights"])  # brings the buffers back too
        if self._adapter is not None:
            self._load_adapter(tensors, _largest_rank(self._adapter))
        else:
            if self._on_cpu:
                self._llm.collective_rpc(forget_expert_kernels)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._as_published(tensors)})
            self._llm.collective_rpc(repack_heads)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._reset_caches()
        for now, at_start in zip(self._on_each_rank(worker_buffers), self._buffers, strict=True):
            check_buffers(self.name, now, at_start)
        self.policy_version = version

    def _problem_of_adapters(self, adapter: LoraConfig) -> str:
        """Say why vLLM would leave out a part of the adapter, or could not compute it; "" if it can."""
        if self._on_cpu and any(self._llm.collective_rpc(wraps_experts)):
            return "with adapters vLLM computes experts by Triton, which CPUs do not have"
        parts = sorted(adapter.parts - {"language_model"})
        if not parts or all(self._llm.collective_rpc(takes_adapters_in_towers)):
            return ""
        return (
            f"targets names {' and '.join(parts)}, where vLLM {self._vllm.__version__} applies no adapters in models "
            f"of type {self._builder.config.model_type}"
        )

    def _load_adapter(self, tensors: NamedTensors, rank: int) -> None:
        """Replace the engine's adapter. The new one has a new id: nothing that belongs to the old one is reused.

        vLLM reads an adapter from a folder. The scaling is in B already.
        """
        from vllm.lora.request import LoRARequest

        named = {f"{PREFIX}{name}": tensor.detach().to("cpu", self.dtype, copy=True) for name, tensor in tensors}
        layers = sorted({name.split(".")[-3] for name in named})
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers, "bias": "none"}
        number = 1 if self._loaded is None else self._loaded.lora_int_id + 1
        with TemporaryDirectory(prefix="adapter-") as folder:
            save_file(named, Path(folder) / ADAPTER_WEIGHTS)
            (Path(folder) / ADAPTER_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
            if self._loaded is not None:
                self._llm.llm_engine.remove_lora(self._loaded.lora_int_id)
            self._loaded = LoRARequest(f"adapter-{number}", number, folder)
            try:
                self._llm.llm_engine.add_lora(self._loaded)
            except ValueError as error:  # it names layers of the model that take no adapter
                reason = " ".join(str(error).split())
                raise UserError(
                    f"vLLM takes no adapter in some of the layers that model.lora.targets names: {reason:.200}...; "
                    "name others, or set model.lora.sync=merged"
                ) from error
        assert self._llm.llm_engine.list_loras() == {number}

    def fingerprint(self, layout: WeightLayout) -> Fingerprint:
        """See Sampler.fingerprint. The weights are read back inside the worker."""
        return join_shards(self._on_each_rank(worker_checksums, layout=layout, dtype=self.dtype), layout)

    def sleep(self) -> None:
        """See Sampler.sleep. Weights and key-value cache are dropped; on a CPU only the engine's states change.

        With an adapter the weights go to host memory, since no sync sends them.
        """
        if not self._asleep:
            self._llm.sleep(level=2 if self._adapter is None else 1)
            self._asleep = True

    def close(self) -> None:
        """Shut the engine down: its parts and subgroups, never the default process group."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        core = self._llm.llm_engine.engine_core.engine_core
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        destroy_model_parallel()
        del self._llm, core
        gc.unfreeze()  # the engine froze what it allocated at its start
        gc.collect()

    def _reset_caches(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise StaleWeightsError(
                f"sampler {self.name!r}: a request is still open, so the engine keeps keys and values of earlier "
                "weights; close the stream that was opened before, or wait for its end"
            )
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def _sampling(self, params: SamplingParams, seed: int, *, whole: bool = True) -> vllm.SamplingParams:
        if self._returns_kept:  # vLLM then needs a temperature and a top_k in every request
            everything = self._builder.config.get_text_config().vocab_size
            greedy = {"temperature": 1.0, "top_k": 1} if params.temperature == 0 else {}
            params = replace(params, **{"top_k": params.top_k or everything, **greedy})
        return sampling_options(
            self._vllm,
            params,
            seed=seed,
            eos_ids=list(self._builder.eos_ids),
            banned_ids=[],  # the worker's model knows them
            whole=whole,
        )


def import_vllm() -> Any:
    """Return the vllm module, imported with the environment that it needs."""
    # In this process: weights are handed over as tensors, and callables run in the worker.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if os.environ.get("VLM_RL_OUTPUT") == "verbose":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    for key, value in (engine_environment(on_cpu=True) | engine_environment(on_cpu=False)).items():
        os.environ.setdefault(key, value)
    # vLLM looks for Triton before it has set up its logging, and triggers torch's deprecation warnings.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.|torch\.distributed\.c10d_logger")
    with compiler_kept():
        import vllm

    return vllm


def _own_ranks() -> tuple[Any, int]:
    """Return the process group of the ranks that form this engine, and this rank's place in it."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group.cpu_group, group.rank_in_group


def _adapter_settings(adapter: LoraConfig) -> dict[str, Any]:
    """Return vLLM's options for one adapter. Raises UserError for a rank that it does not take."""
    from vllm.config.lora import MaxLoRARanks

    needed = _largest_rank(adapter)
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= needed]
    if not ranks:
        raise UserError(f"model.lora.rank is {needed}, above what vLLM takes: set model.lora.sync=merged")
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(ranks)}
    if adapter.parts - {"language_model"}:
        settings["enable_tower_connector_lora"] = True
    return settings


def _largest_rank(adapter: LoraConfig) -> int:
    return max(adapter.rank_of(part) for part in adapter.parts)


def _in_order(group: Mapping[int, Rollout]) -> list[Rollout]:
    return [group[g] for g in sorted(group)]


def _request(prompt: Prompt) -> dict[str, Any]:
    return prompt_request(prompt.sampler_ids.tolist(), prompt.images, prompt.videos)


@contextmanager
def _global_random_state_kept() -> Iterator[None]:
    """Restore this process's global random state at the end: vLLM seeds these generators and uses them."""
    state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if has_gpu() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
