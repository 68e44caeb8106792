"""What `model.gradient_checkpointing: auto` keeps: decided once, before the model is loaded, for all ranks."""

from __future__ import annotations

from typing import TypeVar

from vlm_rl.config import Checkpointing, Config, SftConfig
from vlm_rl.devices import has_gpu
from vlm_rl.distributed import from_main, rank, world_size
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.planning.fits import Card, fits, gib
from vlm_rl.planning.page import RECOMPUTED
from vlm_rl.run.terminal import make_console

_Settled = TypeVar("_Settled", Config, SftConfig)


def settled(config: _Settled) -> _Settled:
    """Return the configuration with `auto` replaced by the least recomputation with which the plan fits here."""
    if config.model.gradient_checkpointing != "auto":
        return config
    way, line = from_main(lambda: _least(config))
    if rank() == 0:
        make_console().print(line, soft_wrap=True)
    return config.model_copy(
        update={"model": config.model.model_copy(update={"gradient_checkpointing": way})},
    )


def _least(config: Config | SftConfig) -> tuple[Checkpointing, str]:
    """Return the least recomputation that fits on the smallest card, and the line that says so."""
    card = Card.here(world_size())
    fit = fits(dry_run(config, num_ranks=world_size(), on_gpu=has_gpu()), card)
    way = fit.dry.config.model.gradient_checkpointing
    return way, (
        f"model.gradient_checkpointing=auto: {RECOMPUTED[way]}, planned {gib(fit.dry.memory.update)} "
        f"in the update on {card}"
    )
