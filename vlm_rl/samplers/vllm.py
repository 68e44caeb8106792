"""The fast engine: vLLM inside this process. What runs inside a server imports vllm too, nothing else does.

Weights are streamed into the running engine. Its three caches (prefix blocks, image inputs, image embeddings)
are then reset, since they belong to the old weights. They are reset before every `generate` too, so that a
response never depends on what was generated earlier.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vlm_rl.data.checkpoint_layout import as_published
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.errors import UserError
from vlm_rl.samplers.base import OnGroup, SamplingParams, check_lengths, make_rollout, response_seed
from vlm_rl.samplers.fingerprint import Fingerprint, Layout, NamedTensors, StaleWeightsError, check_buffers
from vlm_rl.samplers.vllm_options import ENVIRONMENT, engine_options, prompt_request, sampling_options
from vlm_rl.samplers.vllm_worker import (
    forget_expert_kernels,
    repack_heads,
    worker_buffers,
    worker_fingerprint,
)
from vlm_rl.types import Prompt, Rollout

if TYPE_CHECKING:
    import vllm


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
        self.policy_version = 0
        self.dtype = dtype
        self._builder = builder
        self._max_model_len = max_model_len
        self._vllm = import_vllm()
        self._on_cpu = not torch.cuda.is_available()
        settings = engine_options(
            model_path=model_path,
            builder=builder,
            max_model_len=max_model_len,
            batch_size=batch_size,
            dtype=dtype,
            seed=seed,
            on_cpu=self._on_cpu,
            options=options,
        )
        settings.setdefault("enable_sleep_mode", not self._on_cpu)
        if not self._on_cpu:
            settings.setdefault("gpu_memory_utilization", 0.45)  # the learner lives on the same device
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            settings.setdefault("distributed_executor_backend", "external_launcher")
        try:
            with _global_random_state_kept(), _memory_left_alone(), _threads_kept():
                self._llm = self._vllm.LLM(**settings)
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
        return sampling_options(
            self._vllm,
            params,
            seed=seed,
            eos_ids=list(self._builder.eos_ids),
            banned_ids=list(self._builder.banned_ids),
            whole=whole,
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
    if os.environ.get("VLM_RL_OUTPUT") == "verbose":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    # vLLM looks for Triton before it has set up its logging, and triggers torch's deprecation warnings.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    import vllm

    return vllm


class NcclGroup:
    """The learner's end of the group of two of vLLM's own NCCL engine; it has not been run, for want of two GPUs."""

    def __init__(self, address: str) -> None:
        """Take a free port of this address; the server joins at it."""
        import_vllm()
        from vllm.utils.network_utils import get_open_port

        self._where = {"master_address": address, "master_port": get_open_port(), "world_size": 2}
        self.init_info = {**self._where, "rank_offset": 1, "packed": False}

    def join(self) -> None:
        """Wait for the server."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._group = trainer_init(self._where)

    def send(self, tensor: torch.Tensor) -> None:
        """Send one tensor."""
        self._group.broadcast(tensor.cuda(), src=0, stream=torch.cuda.current_stream())
        torch.cuda.current_stream().synchronize()


def _in_order(group: Mapping[int, Rollout]) -> list[Rollout]:
    return [group[g] for g in sorted(group)]


def _request(prompt: Prompt) -> dict[str, Any]:
    return prompt_request(prompt.sampler_ids.tolist(), prompt.images)


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
