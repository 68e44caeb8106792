"""Parts of a run that need little but its configuration: problems, the frozen reference, the rollout engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import torch

from vlm_rl.config import Config, LoraConfig, TrainConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import contaminated_sources, load_eval_sets, load_training_sets, refuse_contaminated
from vlm_rl.devices import has_gpu, model_dtype
from vlm_rl.distributed import from_main
from vlm_rl.learner.learner import Learner
from vlm_rl.learner.loading import check_whole, policy_of
from vlm_rl.learner.policy import load_model
from vlm_rl.learner.reference import BaseReference, Reference
from vlm_rl.learner.sequence_parallel import group_of_ranks
from vlm_rl.model_files.model_folder import check_model_folder
from vlm_rl.samplers.base import Sampler
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.remote.server_token import token_path
from vlm_rl.samplers.remote.servers import ServerSampler, ServerSettings
from vlm_rl.samplers.vllm.options import batch_invariance
from vlm_rl.types import Problem


def load_problems(config: Config) -> tuple[list[Problem], dict[str, list[Problem]]]:
    """Return the training problems and the evaluation sets by name.

    Raises UserError for a set with rows of a benchmark that is trained on.
    """
    with_tools = config.environment.name is not None
    problems = load_training_sets(config.data, may_be_larger=with_tools)
    eval_sets = load_eval_sets(config.data, may_be_larger=with_tools) if config.eval.every else {}
    for name, held_out in eval_sets.items():
        refuse_contaminated(name, held_out, contaminated_sources(problems))
    return problems, eval_sets


def load_reference(config: Config, learner: Learner, builder: PromptBuilder) -> Reference | BaseReference:
    """Load the model that the run began with, on a resume too, where the policy comes from a checkpoint.

    With adapters it is in memory already.
    """
    if config.model.lora is not None:
        return BaseReference(learner.engine)
    path = Path(config.model.path)
    check_model_folder(path)
    return load_frozen(config, learner, path, banned_ids=builder.banned_ids)


def load_frozen(
    config: Config, learner: Learner, path: Path, *, banned_ids: Sequence[int], stays: bool = False
) -> Reference:
    """Load a frozen model, on all ranks together.

    Args:
        config: of the run.
        learner: of the policy, whose dtype and ZeRO stage it has.
        path: its folder.
        banned_ids: ids at log-prob -inf.
        stays: whether it stays on the device.
    """
    from_main(lambda: check_whole(path))
    stage, dtype = config.train.zero_stage, model_dtype(learner.device, config.model.dtype)
    # In shards it stays on the device; whole, it waits in host memory.
    device = learner.device if stage == 3 or stays else torch.device("cpu")
    model = load_model(
        path, dtype=dtype, device=device, rows=config.model.rows, shard_for=TrainConfig(zero_stage=stage)
    )
    policy = policy_of(model, config.model, banned_ids=banned_ids, temperature=config.rollout.temperature)
    policy.share_rows(group_of_ranks(config.train.sequence_parallel))
    return Reference(policy, zero_stage=stage, stays=stays)


def load_sampler(
    config: Config,
    model_path: Path,
    *,
    builder: PromptBuilder,
    learner: Learner,
    is_stopped: Callable[[], bool],
    note: Callable[[str], None],
) -> Sampler:
    """Start the engine of rollout.sampler, or prepare the client of rollout.servers.

    Args:
        config: of the run.
        model_path: the folder of the model that the run begins or resumes with.
        builder: the prompt builder of the model.
        learner: streams its weights again to servers that come back.
        is_stopped: tells whether the run is to end.
        note: prints a line.
    """
    rollout, dtype = config.rollout, model_dtype(learner.device, config.model.dtype)
    if rollout.sampler == "server":
        check_model_folder(config.model.path)  # a resume may have been moved without it
        settings = ServerSettings(
            rollout.servers,
            token_file=token_path(rollout.server_token),
            timeout=rollout.server_timeout,
            tensor_parallel=rollout.tensor_parallel,
            quantization=rollout.quantization,
            model_sha256=sha256((Path(config.model.path) / "config.json").read_bytes()).hexdigest(),
        )
        return ServerSampler(
            settings,
            model_path=str(model_path),
            builder=builder,
            max_model_len=config.context_tokens,
            dtype=dtype,
            weights=learner.stream_weights,
            is_stopped=is_stopped,
            note=note,
        )
    if rollout.batch_invariant:
        os.environ |= batch_invariance(on_cpu=not has_gpu(), beside_learner=True)
    return make_sampler(
        rollout.sampler,
        EngineSettings(
            model_path=str(model_path),
            builder=builder,
            max_model_len=config.context_tokens,
            batch_size=rollout.batch_size,
            dtype=dtype,
            vllm_options=rollout.vllm,
            adapter=engine_adapter(config),
            tensor_parallel=rollout.tensor_parallel,
            quantization=rollout.quantization,
            seed=config.seed,
            returns_routing=rollout.replay_routing,
            returns_kept=rollout.top_k > 0,
        ),
    )


def engine_adapter(config: Config) -> LoraConfig | None:
    """Return the adapter that the engine gets on top of its weights; None if it gets merged weights."""
    lora = config.model.lora
    return lora if lora is not None and lora.sync == "adapter" else None


# Mean |log-prob of the learner - of the sampler| per token that rounding cannot explain.
DEFAULT_MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def max_gap(config: Config, device: torch.device) -> float:
    """Return rollout.max_gap, or the default of the model's dtype."""
    return config.rollout.max_gap or DEFAULT_MAX_GAP[model_dtype(device, config.model.dtype)]
