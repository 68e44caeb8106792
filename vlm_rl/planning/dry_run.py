"""What a run will need: parameters, memory per rank and tokens per step, before anything is loaded.

    plan = dry_run(load_config("configs/virl39k_luspo_7b.yaml"), num_ranks=8)
    print_dry_run(plan)

The model is built on the meta device, which holds shapes and no numbers, from the local folder's config.json,
or else from the copy of it that we ship for a few published models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import Config, ModelPart, RewardConfig, RolloutConfig, SftConfig
from vlm_rl.devices import has_gpu, model_dtype
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import check_architecture, check_parts, check_routing, is_padded
from vlm_rl.learner.attention.patches import is_patched
from vlm_rl.learner.deepspeed import check_deepspeed_options, check_zero_stage, deepspeed_block
from vlm_rl.learner.lora import target_layers
from vlm_rl.model_files.model_folder import check_context, check_divides, read_model_config
from vlm_rl.planning.memory import (
    Memory,
    cache_bytes,
    count_parameters,
    memory_of_rank,
    parameters_by_part,
    side_by_side,
)

RANKS_SHOWN = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one configuration needs on a number of ranks."""

    config: Config
    num_ranks: int
    model_source: str
    dtype: torch.dtype
    is_on_gpu: bool
    is_patched: bool  # layers of ours in place of transformers' own
    num_parameters: int
    num_trainable: int
    num_parameters_of: Mapping[ModelPart, int]
    is_padded: bool  # each response behind a copy of its prompt
    num_adapted: int  # linear layers with an adapter
    hidden_size: int  # of the language model
    memory: Memory
    memory_by_ranks: Mapping[int, Memory]
    responses_side_by_side: int  # in one engine
    kv_bytes_per_token: int  # on each rank of an engine
    responses_per_step: int
    max_prompt_tokens_per_step: int
    max_response_tokens_per_step: int
    updates_per_step: int
    optimizer_steps: int
    deepspeed: Mapping[str, Any]


def dry_run(config: Config, *, num_ranks: int | None = None, ranks_shown: Sequence[int] = RANKS_SHOWN) -> DryRun:
    """Compute what the run needs on ``num_ranks`` ranks; None is torchrun's WORLD_SIZE, or 1.

    Its `memory_by_ranks` is for ``ranks_shown`` too.

    A model of which only the configuration is here is assumed to be trained on an accelerator.

    Raises UserError for an unknown algorithm, a model that is neither local nor shipped, and for combinations
    that training would refuse.
    """
    resolve_algorithm(config.algorithm)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if num_ranks is None else num_ranks
    _check_ranks(ranks, config.rollout)
    source, raw = read_model_config(config.model.path)
    model = _build(json.dumps(raw), source)
    _check_model(model.config, config, source)
    on_gpu = has_gpu() or not any(Path(source).parent.glob("*.safetensors"))
    dtype = model_dtype(torch.device("cuda" if on_gpu else "cpu"), config.model.dtype)
    check_zero_stage(config.train.zero_stage, dtype)
    check_deepspeed_options(config.train)
    patched = is_patched(config.model.layer_patches, on_gpu=on_gpu)
    plan_of = partial(memory_of_rank, config, model, dtype, patched=patched, on_gpu=on_gpu)
    r, t = config.rollout, config.train
    updates = -(-r.prompts_per_step // t.mini_batch_prompts)
    total, trainable = count_parameters(config, model)
    lora = config.model.lora
    padded = is_padded(model.config, config.model.rows)
    copies = r.responses_per_prompt if padded else 1  # of a prompt
    cache_of = partial(cache_bytes, model.config, dtype=dtype, ranks=r.tensor_parallel)
    return DryRun(
        config=config,
        num_ranks=ranks,
        model_source=source,
        dtype=dtype,
        is_on_gpu=on_gpu,
        is_patched=patched,
        num_parameters=total,
        num_trainable=trainable,
        num_parameters_of=parameters_by_part(model),
        is_padded=padded,
        num_adapted=len(target_layers(model, lora.targets)) if lora else 0,
        hidden_size=model.config.get_text_config().hidden_size,
        memory=plan_of(ranks),
        memory_by_ranks={
            n: plan_of(n)
            for n in sorted({*ranks_shown, ranks})
            if n % r.tensor_parallel == 0 or r.sampler == "server"
        },
        responses_side_by_side=side_by_side(config, ranks),
        kv_bytes_per_token=cache_of(1) - cache_of(0),
        responses_per_step=r.prompts_per_step * r.responses_per_prompt,
        max_prompt_tokens_per_step=r.prompts_per_step * config.data.max_prompt_tokens * copies,
        max_response_tokens_per_step=r.prompts_per_step * r.responses_per_prompt * r.max_tokens,
        updates_per_step=updates,
        optimizer_steps=updates * t.steps,
        deepspeed=deepspeed_block(t, dtype),
    )


def _check_ranks(ranks: int, rollout: RolloutConfig) -> None:
    """Raise UserError where no rank is planned for, or the ranks are not a multiple of rollout.tensor_parallel."""
    if ranks < 1:
        raise UserError(f"--ranks is {ranks}; it must be at least 1")
    if rollout.sampler != "server" and ranks % rollout.tensor_parallel:
        raise UserError(
            f"rollout.tensor_parallel is {rollout.tensor_parallel}, and the plan is for {ranks} "
            f"rank{'s' * (ranks > 1)}: give a multiple with --ranks"
        )


def _check_model(model_config: Any, config: Config, source: str) -> None:
    """Raise UserError for a model that these settings cannot train or sample from."""
    check_context(
        model_config,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.response_tokens,
        settings="data.max_prompt_tokens + rollout.max_tokens (or eval.max_tokens)",
    )
    check_architecture(model_config, path=source, rows=config.model.rows)
    check_divides(model_config, config.rollout)
    check_parts(model_config, config.model, lr_by_part=config.train.lr_by_part)
    check_routing(model_config, replay=config.rollout.replay_routing)


def without_sampling(config: SftConfig) -> Config:
    """Return the configuration of a training run whose update phase is a step of `vlm-rl sft`."""
    rollout = RolloutConfig(
        prompts_per_step=config.train.mini_batch_prompts,
        responses_per_prompt=1,
        max_tokens=config.data.max_response_tokens,
    )
    return Config(
        seed=config.seed,
        out=config.out,
        model=config.model,
        data=config.data,
        reward=RewardConfig(overlong_buffer=0),
        rollout=rollout,
        train=config.train,
        checkpoint=config.checkpoint,
    )


@lru_cache(maxsize=16)  # a search for settings that fit plans for one model dozens of times
def _build(configuration: str, source: str) -> PreTrainedModel:
    """Return the model of this configuration (JSON) on the meta device."""
    raw = json.loads(configuration)
    if "auto_map" in raw:
        raise UserError(f"model.path: {source} has an auto_map, which asks to run code that comes with the model")
    try:
        config = AutoConfig.for_model(**raw)
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever the values in the file lead to
        reason = " ".join(str(error).split())
        raise UserError(f"model.path: no model can be built from {source}: {reason:.300}") from None
