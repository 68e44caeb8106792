"""Checks of a recipe: does its plan fit on this machine?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import psutil

from vlm_rl.config import Config, load_config
from vlm_rl.devices import gpu_memory, has_gpu, num_gpus
from vlm_rl.doctor.check import Check
from vlm_rl.learner.checkpoint_size import planned_room
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import ROLLOUT_SHARE, UPDATE_SHARE, engine_share

_GIB = 2**30


class RecipeUnderTest:
    """A configuration file, and what this machine has for it."""

    def __init__(self, path: Path, *, num_ranks: int) -> None:
        """Open nothing yet."""
        self.path, self.num_ranks = path, num_ranks

    @cached_property
    def config(self) -> Config:
        """Return the configuration."""
        return load_config(self.path)

    @cached_property
    def plan(self) -> DryRun:
        """Return the dry run on this machine's ranks."""
        return dry_run(self.config, num_ranks=self.num_ranks)

    @property
    def free(self) -> tuple[int, int, str]:
        """Return the free and the whole memory of a rank's device in bytes, and what it is called."""
        if has_gpu():
            free, total = min(gpu_memory(index) for index in range(num_gpus()))
            return free, total, "on each GPU"
        state = psutil.virtual_memory()
        return state.available // self.num_ranks, state.total // self.num_ranks, "for each rank (no GPU here)"


def recipe(subject: RecipeUnderTest) -> Check:
    """Compute the plan, which refuses what training would refuse."""
    plan = subject.plan
    model = f"{short_name(plan.config.model.path)}, {plan.num_parameters / 1e9:.2f} B parameters"
    detail = f"{subject.path}: {model}, ZeRO {plan.config.train.zero_stage} on {plan.num_ranks} ranks"
    return Check("recipe", "ok", detail)


def update(subject: RecipeUnderTest) -> Check:
    """Compare the plan of the update phase with the free memory."""
    advice = (
        "use more ranks (vlm-rl train --dry-run lists them), train.zero_stage=3, model.gradient_checkpointing=true"
    )
    return _fits("update", subject, subject.plan.memory.update, "", f"{advice}, or model.lora")


def rollout(subject: RecipeUnderTest) -> Check:
    """Compare what the learner keeps and what the engine takes with the free memory."""
    plan, (_, total, _) = subject.plan, subject.free
    memory, share = plan.memory, engine_share(plan.config)
    response = plan.config.context_tokens * plan.kv_bytes_per_token
    on_gpu = has_gpu()
    if memory.is_served:
        return _fits("rollout", subject, memory.rollout, ", the servers' memory apart", "use more ranks")
    if on_gpu and share * total < memory.engine_weights + response:
        needed = f"{(memory.engine_weights + response) / _GIB:.1f} GiB for weights and one response at full length"
        detail = f"the engine's share is {share * total / _GIB:.1f} GiB; it needs {needed}"
        advice = "raise rollout.vllm.gpu_memory_utilization or rollout.tensor_parallel, or use a larger card"
        return Check("rollout", "off", detail, advice)
    engine = int(share * total) if on_gpu else memory.engine_weights + memory.kv_cache
    advice = "lower rollout.vllm.gpu_memory_utilization or rollout.batch_size, or use more ranks"
    return _fits("rollout", subject, memory.kept + engine, ", the engine's share included", advice)


def _fits(name: str, subject: RecipeUnderTest, needed: int, what: str, advice: str) -> Check:
    free, _, where = subject.free
    limit = UPDATE_SHARE if name == "update" else ROLLOUT_SHARE
    detail = f"{needed / _GIB:.1f} GiB planned{what}, {free / _GIB:.1f} free {where} (limit {limit:.0%} of that)"
    good = needed <= limit * free
    return Check(name, "ok" if good else "off", detail, "" if good else advice)


def host_memory(subject: RecipeUnderTest) -> Check:
    """Compare what the ranks hold in host memory, while they load the model and later, with what is free."""
    plan, memory, free = subject.plan, subject.plan.memory, psutil.virtual_memory().available
    loading = plan.num_ranks * memory.loading
    later = plan.num_ranks * memory.host + memory.checkpoint_copies
    detail = f"{loading / _GIB:.1f} GiB while {plan.num_ranks} ranks load the model, "
    detail += f"{later / _GIB:.1f} for what is kept, moved or copied there later, " if later else ""
    detail += f"{free / _GIB:.1f} free"
    if max(loading, later) <= free:
        return Check("host memory", "ok", detail)
    advice = ["train.zero_stage=3"] if loading > free and plan.config.train.zero_stage < 3 else []
    if later > free:
        advice += _less_on_the_host(subject.config)
    steps = ", ".join(["free some", *(f"set {setting}" for setting in advice)])
    return Check("host memory", "off", detail, f"{steps}, or take a machine with more memory")


def _less_on_the_host(config: Config) -> Iterator[str]:
    """Yield the settings that keep, move or copy less there, of those that are not set already."""
    if config.checkpoint.async_save:
        yield "checkpoint.async_save=false"
    if config.rollout.offload_optimizer:
        yield "rollout.offload_optimizer=false"
    zero = "train.deepspeed.zero_optimization"
    for key in ("offload_optimizer", "offload_param"):
        if config.train.offload_device(key) != "none":
            yield f"{zero}.{key}.device=none"
    if config.model.lora is not None and config.model.lora.sync == "adapter":
        yield "model.lora.sync=merged"


def checkpoints(subject: RecipeUnderTest) -> Check:
    """Compare the checkpoints that are kept, and the one that is being written, with the free disk."""
    room = planned_room(subject.plan)
    detail = room.line().removeprefix("checkpoints: ")
    if room.most * room.size <= room.free:
        return Check("checkpoints", "ok", detail)
    return Check("checkpoints", "off", detail, "free some, change out, or lower checkpoint.keep_last")


RECIPE_CHECKS = (recipe, update, rollout, host_memory, checkpoints)
