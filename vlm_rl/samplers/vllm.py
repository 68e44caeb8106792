"""The fast engine: vLLM inside this process. The only file that imports vllm.

Weights are streamed into the running engine. Its three caches (prefix blocks, image inputs, image embeddings)
are then reset, since they belong to the old weights. They are reset before every `generate` too, so that a
response never depends on what was generated earlier.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from vlm_rl.data.checkpoint_layout import as_published
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.samplers.base import OnGroup, SamplingParams, check_lengths, make_rollout, response_seed
from vlm_rl.samplers.fingerprint import Fingerprint, Layout, NamedTensors, StaleWeightsError, check_buffers
from vlm_rl.samplers.vllm_worker import (
    forget_expert_kernels,
    repack_heads,
    worker_buffers,
    worker_fingerprint,
)
from vlm_rl.types import Prompt, Rollout

if TYPE_CHECKING:
    import vllm

_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner shares these cores
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, where the device is a CPU
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # nothing leaves the machine
}

_OURS = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "data.max_prompt_tokens and rollout.max_tokens",
    "max_num_seqs": "rollout.batch_size",
    "seed": "seed",
    **dict.fromkeys(("generation_config", "logprobs_mode", "override_generation_config"), "the learner's needs"),
    **dict.fromkeys(("logits_processors", "speculative_config", "quantization"), "the learner's needs"),
    **dict.fromkeys(("trust_remote_code", "mm_processor_kwargs"), "safety and data.max_pixels"),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), "torchrun, which starts one engine a rank"),
    "data_parallel_size": "torchrun, which starts one engine a rank",
}
"""Options of vllm.LLM that rollout.vllm may not set, and what decides them instead."""


class VllmSampler:
    """A vlm_rl.samplers.base.Sampler on an in-process vllm.LLM.

    Log-probs are vLLM's `processed_logprobs`: log_softmax((logits + bias) / temperature) in float32, with a bias
    of minus infinity on `builder.banned_ids` and of 0 elsewhere (greedy: temperature 1). The learner computes the
    same. Penalties, min_p and the model's generation_config are off.
    """

    name = "vllm"

    def __init__(
        self,
        *,
        model_path: str,
        builder: PromptBuilder,
        max_model_len: int,
        batch_size: int,
        dtype: torch.dtype,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        """Start the engine. For the arguments see vlm_rl.samplers.factory.make_sampler.

        Raises UserError for one of `options` that the learner's or the run's settings decide, and for what vLLM
        itself refuses.
        """
        for key in options or {}:
            if key in _OURS:
                raise UserError(f"rollout.vllm.{key} cannot be set: it is decided by {_OURS[key]}; remove it")
        self.policy_version = 0
        self.dtype = dtype
        self._builder = builder
        self._max_model_len = max_model_len
        self._vllm = import_vllm()
        self._on_cpu = not torch.cuda.is_available()
        settings: dict[str, Any] = {
            "model": model_path,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": max_model_len,
            "max_num_seqs": batch_size,
            "seed": seed,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "trust_remote_code": False,
            "use_tqdm_on_load": False,
            "enforce_eager": self._on_cpu,
            "enable_sleep_mode": not self._on_cpu,
        }
        if self._on_cpu:
            # A prompt cut into chunks samples a token that vLLM discards and then winds the request's
            # generator back, which CPU generators cannot do: seeded requests die.
            settings["enable_chunked_prefill"] = False
            settings["max_num_batched_tokens"] = max(8192, max_model_len)
        else:
            settings["gpu_memory_utilization"] = 0.45  # the learner lives on the same device
        settings |= builder.engine_options
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            settings["distributed_executor_backend"] = "external_launcher"
        try:
            with _global_random_state_kept(), _memory_left_alone(), _threads_kept():
                self._llm = self._vllm.LLM(**{**settings, **(options or {})})
        except (ValueError, NotImplementedError) as error:  # vLLM's for a model or an option that it does not support
            reason = " ".join(str(error).split())
            raise UserError(
                f"vLLM cannot run the model at {model_path}: {reason:.300}; use the transformers sampler"
            ) from error
        # The finalizer would destroy torch.distributed's default group, which may be the learner's by then.
        self._llm.llm_engine.engine_core._finalizer.detach()
        self._asleep = False
        self._as_published = as_published(model_path)
        self._buffers = self._llm.collective_rpc(worker_buffers)[0]

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        step: int,
        on_group: OnGroup | None = None,
    ) -> list[list[Rollout]]:
        """See Sampler.generate. One request per response: `n` would share noise between prompts."""
        check_lengths(prompts, params, max_model_len=self._max_model_len)
        self._reset_caches()
        numbers = [(index, g) for index in range(len(prompts)) for g in range(params.responses)]
        requests = [_request(prompt) for prompt in prompts]
        settings = [
            self._sampling(params, response_seed(seed, step, prompts[index].problem_id, g)) for index, g in numbers
        ]
        groups: list[dict[int, Rollout]] = [{} for _ in prompts]
        with _global_random_state_kept():
            for number, output in self._finished([requests[index] for index, _ in numbers], settings):
                index, g = numbers[number]
                groups[index][g] = self._rollout(prompts[index], g, output)
                if on_group is not None and len(groups[index]) == params.responses:
                    on_group(index, _in_order(groups[index]))
        return [_in_order(group) for group in groups]

    def _finished(
        self, requests: Sequence[dict[str, Any]], settings: Sequence[vllm.SamplingParams]
    ) -> Iterator[tuple[int, vllm.CompletionOutput]]:
        """Yield (number, output) of each request as it ends. Closing the iterator aborts the others."""
        engine: Any = self._llm.llm_engine
        names: list[str] = []
        try:
            for number, (request, setting) in enumerate(zip(requests, settings, strict=True)):
                names.append(engine.add_request(str(number), request, setting))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        yield int(output.request_id), output.outputs[0]
        finally:
            engine.abort_request(names, internal=True)  # by the names that the engine gave

    def stream(self, prompt: Prompt, params: SamplingParams, *, seed: int, step: int) -> Iterator[int]:
        """See Sampler.stream. Closing the iterator aborts the request."""
        assert params.responses == 1, params
        check_lengths([prompt], params, max_model_len=self._max_model_len)
        self._reset_caches()
        engine: Any = self._llm.llm_engine
        settings = self._sampling(params, response_seed(seed, step, prompt.problem_id, 0), whole=False)
        with _global_random_state_kept():
            name = engine.add_request("stream", _request(prompt), settings)
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
        """See Sampler.load_weights. The key-value cache wakes last: learner and engine weights come first."""
        if self._asleep:
            self._llm.wake_up(tags=["weights"])  # brings the buffers back too
        if self._on_cpu:
            self._llm.collective_rpc(forget_expert_kernels)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._as_published(tensors)})
        self._llm.collective_rpc(repack_heads)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._reset_caches()
        check_buffers(self.name, self._llm.collective_rpc(worker_buffers)[0], self._buffers)
        self.policy_version = version

    def fingerprint(self, layout: Layout) -> Fingerprint:
        """See Sampler.fingerprint. The weights are read back inside the worker."""
        return self._llm.collective_rpc(worker_fingerprint, kwargs={"layout": layout, "dtype": self.dtype})[0]

    def sleep(self) -> None:
        """See Sampler.sleep. Weights and key-value cache are dropped; on a CPU only the engine's states change."""
        if not self._asleep:
            self._llm.sleep(level=2)
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
        """Return vLLM's parameters; with `whole` a response is given out once, when it has ended."""
        kinds = self._vllm.sampling_params.RequestOutputKind
        # Not from_optional(): that clamps a bias to -100, and a large enough logit would get past it.
        return self._vllm.SamplingParams(
            n=1,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            min_tokens=0,
            max_tokens=params.max_tokens,
            seed=seed,
            stop_token_ids=list(self._builder.eos_ids),
            logit_bias=dict.fromkeys(self._builder.banned_ids, -float("inf")) or None,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=kinds.FINAL_ONLY if whole else kinds.CUMULATIVE,
        )

    def _rollout(self, prompt: Prompt, index: int, output: vllm.CompletionOutput) -> Rollout:
        ids = np.array(output.token_ids)
        flat: Any = output.logprobs
        assert list(flat.token_ids) == ids.tolist(), prompt.problem_id
        return make_rollout(
            prompt, index, ids, np.array(flat.logprobs), builder=self._builder, version=self.policy_version
        )


def import_vllm() -> Any:
    """Return the vllm module, imported with the environment that it needs."""
    # In this process: weights are handed over as tensors, and callables run in the worker.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    # vLLM looks for Triton before it has set up its logging, and triggers torch's deprecation warnings.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    import vllm

    return vllm


def _in_order(group: Mapping[int, Rollout]) -> list[Rollout]:
    return [group[g] for g in sorted(group)]


def _request(prompt: Prompt) -> dict[str, Any]:
    """Return vLLM's request for the prompt. vLLM expands the placeholders: an expanded list would expand twice.

    Each image comes with its hash: vLLM would take its own, which is slower, once for each response of the group.
    """
    request: dict[str, Any] = {"prompt_token_ids": prompt.sampler_ids.tolist()}
    if prompt.images:
        request["multi_modal_data"] = {"image": list(prompt.images)}
        request["multi_modal_uuids"] = {"image": [_digest(image) for image in prompt.images]}
    return request


def _digest(image: Image.Image) -> str:
    return hashlib.blake2b(image.tobytes(), digest_size=16, key=repr((image.mode, image.size)).encode()).hexdigest()


@contextmanager
def _memory_left_alone() -> Iterator[None]:
    """Keep vLLM's CPU worker from binding this process's memory, the learner's too, to one NUMA node."""
    operators: Any = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        del operators.init_cpu_memory_env  # torch looks it up again at its next use


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Restore torch's number of threads, and the function that sets it, which vLLM's CPU worker replaces.

    On a GPU vLLM leaves one thread to this process, in which an offloaded optimizer computes on the host.
    """
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        set_threads(threads)


@contextmanager
def _global_random_state_kept() -> Iterator[None]:
    """Restore this process's global random state at the end: vLLM seeds these generators and draws from them."""
    state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
