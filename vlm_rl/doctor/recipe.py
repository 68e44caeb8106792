"""Checks of a recipe: does its plan fit on this machine?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from vlm_rl.config import Config, load_config
from vlm_rl.doctor.check import Check
from vlm_rl.model_files.hub_models import short_name
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import Card, Fit, MemoryPart, fits, gib
from vlm_rl.planning.remedies import fitting_ranks, fitting_remedies

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
    def dry(self) -> DryRun:
        """Return the dry run on this machine's ranks."""
        return dry_run(self.config, num_ranks=self.num_ranks)

    @cached_property
    def fit(self) -> Fit:
        """Return how it fits into the memory that is free now."""
        return fits(self.dry, Card.here(self.num_ranks))

    @cached_property
    def advice(self) -> str:
        """Return the advice that makes it fit."""
        found, ranks = fitting_remedies(self.fit), fitting_ranks(self.fit)
        options = [f"set {' '.join(map(str, found))}"] if found else []
        options += [f"use {ranks} ranks"] if ranks else []
        return ", or ".join(options) or "use a smaller model, model.lora, or larger cards"


def recipe(subject: RecipeUnderTest) -> Check:
    """Compute the plan, which refuses what training would refuse."""
    dry = subject.dry
    model = f"{short_name(dry.config.model.path)}, {dry.num_parameters / 1e9:.2f} B parameters"
    detail = f"{subject.path}: {model}, ZeRO {dry.config.train.zero_stage} on {dry.num_ranks} ranks"
    return Check("recipe", "ok", detail)


def update(subject: RecipeUnderTest) -> Check:
    """Compare the plan of the update phase with the free memory."""
    return _check("update", subject, ("update",), "")


def rollout(subject: RecipeUnderTest) -> Check:
    """Compare what the learner keeps and what the engine takes with the free memory."""
    what = ", the engine's share included"
    if subject.dry.memory.is_served:
        what = ", the servers' memory apart"
    return _check("rollout", subject, ("rollout", "engine", "share"), what)


def _check(name: str, subject: RecipeUnderTest, parts: Sequence[MemoryPart], what: str) -> Check:
    fit = subject.fit
    found = [need for need in fit.needs if need.part in parts]
    where = "on each GPU" if fit.card.is_gpu else "for each rank (no GPU here)"
    free, limit = f"{fit.card.free / _GIB:.1f} free {where}", found[-1].limit / fit.card.free
    if over := [need for need in found if need.margin < 0]:
        return Check(name, "off", f"{over[0].fault}; {free}", subject.advice)
    return Check(name, "ok", f"{gib(found[-1].needed)} planned{what}, {free} (limit {limit:.0%} of that)")


def host_memory(subject: RecipeUnderTest) -> Check:
    """Compare what a rank holds in host memory, while it loads the model and later, with its part of what is free."""
    loading, later = (need for need in subject.fit.needs if need.part == "host")
    detail = f"{gib(loading.needed)} a rank while it loads the model, "
    detail += f"{later.needed / _GIB:.1f} for what is kept, moved or copied there later, " if later.needed else ""
    detail += f"{loading.limit / _GIB:.1f} free for each rank here"
    if loading.margin >= 0 and later.margin >= 0:
        return Check("host memory", "ok", detail)
    advice = ["train.zero_stage=3"] if loading.margin < 0 and subject.config.train.zero_stage < 3 else []
    if later.margin < 0:
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
    """Compare the checkpoints that are kept, and the one that is being written, with the free disk, as a run does."""
    room = subject.dry.disk_room
    detail = "; ".join(room.lines()).removeprefix("checkpoints: ")
    if room.refusal() is None:  # milestones that will not fit are a warning, since they may be moved away
        return Check("checkpoints", "ok", detail)
    return Check("checkpoints", "off", detail, "free some, change out, or lower checkpoint.keep_last")


RECIPE_CHECKS = (recipe, update, rollout, host_memory, checkpoints)
