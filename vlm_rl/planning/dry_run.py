"""What a run will need: parameters, memory per rank and tokens per step, before anything is loaded.

    dry = dry_run(load_config("configs/virl39k_luspo_7b.yaml"), num_ranks=8)
    print_dry_run(dry)

The model is built on the meta device, which holds shapes and no numbers, from the local folder's config.json,
or else from the copy of it that we ship for a few published models.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.config import Checkpointing, Config, RewardConfig, RolloutConfig, SftConfig
from vlm_rl.devices import has_gpu, model_dtype
from vlm_rl.errors import UserError
from vlm_rl.learner.architectures import check_architecture, check_parts, check_routing, is_padded
from vlm_rl.learner.attention.patches import is_patched
from vlm_rl.learner.checkpoint_size import DiskRoom, checkpoint_bytes
from vlm_rl.learner.deepspeed import check_deepspeed_options, check_zero_stage, deepspeed_block
from vlm_rl.learner.sequence_parallel import check_heads, check_ranks
from vlm_rl.model_files.fp8 import check_fp8
from vlm_rl.model_files.model_folder import check_context, check_divides, is_same_folder, read_model_config
from vlm_rl.planning.memory import (
    Memory,
    ModelSizes,
    cache_bytes,
    memory_of_rank,
)

RANKS_SHOWN = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one configuration needs on a number of ranks."""

    asked: Config | SftConfig  # the configuration whose keys a user changes
    config: Config  # the same, or for `vlm-rl sft` a training run whose update phase is its step
    num_ranks: int
    model_source: str
    sizes: ModelSizes
    dtype: torch.dtype
    is_on_gpu: bool
    is_patched: bool  # layers of ours in place of transformers' own
    is_padded: bool  # each response after a copy of its prompt
    teacher: int  # parameters of a teacher that is no part of the model; 0: there is none
    kv_bytes_per_token: int  # on each rank of an engine
    deepspeed: Mapping[str, Any]
    memory: Memory

    @property
    def samples(self) -> bool:
        """Tell whether the run samples responses; `vlm-rl sft` does not."""
        return isinstance(self.asked, Config)

    @property
    def num_parameters(self) -> int:
        """Return the number of the learner's parameters, with adapters."""
        return self.sizes.count(self.config)[0]

    @property
    def num_trainable(self) -> int:
        """Return the number of parameters that are trained."""
        return self.sizes.count(self.config)[1]

    @property
    def disk_room(self) -> DiskRoom:
        """Return the disk space of the run's checkpoints."""
        size = checkpoint_bytes(
            self.config.train,
            self.dtype,
            total=self.num_parameters,
            trainable=self.num_trainable,
            lora=self.config.model.lora is not None,
            on_gpu=self.is_on_gpu,
        )
        return DiskRoom.of(self.config, size)

    @property
    def updates_per_step(self) -> int:
        """Return the optimizer steps of a rollout step."""
        return -(-self.config.rollout.prompts_per_step // self.config.train.mini_batch_prompts)

    @property
    def max_prompt_tokens_per_step(self) -> int:
        """Return the most tokens of a step's prompts; padded, each response has its own copy."""
        rollout = self.config.rollout
        copies = rollout.responses_per_prompt if self.is_padded else 1
        return rollout.prompts_per_step * self.config.data.max_prompt_tokens * copies

    @property
    def max_response_tokens_per_step(self) -> int:
        """Return the most tokens of a step's responses."""
        rollout = self.config.rollout
        return rollout.prompts_per_step * rollout.responses_per_prompt * rollout.max_tokens

    def on(self, ranks: int) -> DryRun:
        """Return the plan of the same run on another number of ranks."""
        memory = memory_of_rank(
            self.config,
            self.sizes,
            self.dtype,
            ranks,
            patched=self.is_patched,
            on_gpu=self.is_on_gpu,
            teacher=self.teacher,
        )
        return replace(self, num_ranks=ranks, memory=memory)

    def by_ranks(self) -> dict[int, DryRun]:
        """Return the plans on RANKS_SHOWN, as far as engines and shared rows divide them, and on its own ranks."""
        rollout = self.config.rollout
        engine = 1 if rollout.sampler == "server" else rollout.tensor_parallel
        shared = math.lcm(engine, self.config.train.sequence_parallel)
        return {ranks: self.on(ranks) for ranks in sorted({*RANKS_SHOWN, self.num_ranks}) if ranks % shared == 0}


def dry_run(asked: Config | SftConfig, *, num_ranks: int | None = None, on_gpu: bool | None = None) -> DryRun:
    """Compute what a run needs.

    Args:
        asked: the configuration of the run.
        num_ranks: how many ranks it has; None is torchrun's WORLD_SIZE, or 1.
        on_gpu: whether it is trained on a GPU; None asks this machine, and says yes where the weights are not here.

    Raises UserError for an unknown algorithm, a model that is neither local nor shipped, and for combinations
    that training would refuse.
    """
    config = asked if isinstance(asked, Config) else without_sampling(asked)
    resolve_algorithm(config.algorithm)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if num_ranks is None else num_ranks
    _check_ranks(ranks, config)
    source, raw = read_model_config(config.model.path)
    sizes = _build(json.dumps(raw), source)
    _check_model(sizes.config, config, source)
    if on_gpu is None:
        on_gpu = has_gpu() or not any(Path(source).parent.glob("*.safetensors"))
    dtype = model_dtype(torch.device("cuda" if on_gpu else "cpu"), config.model.dtype)
    check_zero_stage(config.train.zero_stage, dtype)
    check_fp8(sizes.config, config.rollout, dtype=dtype)
    check_deepspeed_options(config.train)
    patched = is_patched(config.model.layer_patches, on_gpu=on_gpu)
    teacher = _teacher_parameters(config)
    cache_of = partial(cache_bytes, sizes.config, dtype=dtype, ranks=config.rollout.tensor_parallel)
    return DryRun(
        asked=asked,
        config=config,
        num_ranks=ranks,
        model_source=source,
        sizes=sizes,
        dtype=dtype,
        is_on_gpu=on_gpu,
        is_patched=patched,
        is_padded=is_padded(sizes.config, config.model.rows),
        teacher=teacher,
        kv_bytes_per_token=cache_of(1) - cache_of(0),
        deepspeed=deepspeed_block(config.train, dtype),
        memory=memory_of_rank(config, sizes, dtype, ranks, patched=patched, on_gpu=on_gpu, teacher=teacher),
    )


def with_checkpointing(dry: DryRun, way: Checkpointing) -> DryRun:
    """Return the plan of the same run with this model.gradient_checkpointing."""
    config = dry.config.model_copy(
        update={"model": dry.config.model.model_copy(update={"gradient_checkpointing": way})}
    )
    return replace(dry, config=config).on(dry.num_ranks)


def _teacher_parameters(config: Config) -> int:
    """Return the parameters of the teacher here; 0 without one, with servers, and for the model under adapters."""
    teacher = config.algorithm.distillation.teacher
    is_served = bool(config.algorithm.distillation.servers)
    is_base = config.model.lora is not None and teacher and is_same_folder(teacher, config.model.path)
    if teacher is None or is_served or is_base:
        return 0
    try:
        source, raw = read_model_config(teacher)
        return _build(json.dumps(raw), source).total
    except UserError as error:
        raise UserError(f"algorithm.distillation.teacher: {str(error).removeprefix('model.path: ')}") from None


def _check_ranks(ranks: int, config: Config) -> None:
    """Raise UserError if no rank is planned for, or the ranks form no engines or no groups that share a row."""
    if ranks < 1:
        raise UserError(f"--ranks is {ranks}; it must be at least 1")
    check_ranks(config.train.sequence_parallel, ranks)
    rollout = config.rollout
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
    padded = is_padded(model_config, config.model.rows)
    check_heads(model_config, config.train.sequence_parallel, is_padded=padded)
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
        data=config.data.model_copy(update={"eval": []}),  # a row of theirs takes less
        reward=RewardConfig(overlong_buffer=0),
        rollout=rollout,
        train=config.train,
        checkpoint=config.checkpoint,
    )


@lru_cache(maxsize=16)  # a search for settings that fit plans for one model dozens of times
def _build(configuration: str, source: str) -> ModelSizes:
    """Return the sizes of the model of this configuration (JSON), built on the meta device."""
    raw = json.loads(configuration)
    if "auto_map" in raw:
        raise UserError(f"model.path: {source} has an auto_map, which asks to run code that comes with the model")
    try:
        config = AutoConfig.for_model(**raw)
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            return ModelSizes(auto.from_config(config, trust_remote_code=False))
    except Exception as error:  # whatever the values in the file lead to
        reason = " ".join(str(error).split())
        raise UserError(f"model.path: no model can be built from {source}: {reason:.300}") from None
