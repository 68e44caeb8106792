"""How long a run will take, in one sentence: the assumptions of `vlm-rl plan`, on cards that sample and train."""

from __future__ import annotations

import argparse

from vlm_rl.config import Config
from vlm_rl.errors import UserError
from vlm_rl.planning.dry_run import DryRun
from vlm_rl.scaling.command import basis_of
from vlm_rl.scaling.divisions import divide

_FACTOR = 2  # how far each way assumed rates may be off: ours; a decode step's host time alone can be as much
_SIMULATED = 4  # steps
_OPTIONS = ("run", "run_gpus", "lengths", "decode_tokens_per_second", "learner_tokens_per_second")


def hours_line(dry: DryRun, gigabytes: float) -> str:
    """Return about how long the run of a plan takes on its cards; "" if that cannot be said.

    That is where it does not fit, where rollouts come from servers or are carried over, and on a CPU, whose speed
    nobody has assumed.

    Args:
        dry: what a dry run says of a training run.
        gigabytes: memory of a card, in 10^9 bytes.
    """
    config = dry.asked
    if not isinstance(config, Config) or not dry.is_on_gpu or config.environment.name is not None:
        return ""
    if config.rollout.sampler == "server" or config.rollout.carry_over is not None:
        return ""
    options = argparse.Namespace(
        gpus=[dry.num_ranks],
        ahead=[0],
        steps=_SIMULATED,
        seed=0,
        gpu_memory=gigabytes,
        bandwidth=None,
        operations=None,
        sync_seconds=None,
        **dict.fromkeys(_OPTIONS),
    )
    try:
        together = divide(basis_of(options, config).work, dry.num_ranks, [0])[0]
    except UserError:  # what is not simulated is no fault of the run
        return ""
    if together.pace is None:
        return ""
    hours = together.pace.seconds * config.train.steps / 3600
    cards = "1 card" if dry.num_ranks == 1 else f"{dry.num_ranks} cards"
    return (
        f"about {_shown(hours)} for {config.train.steps:,} steps on {cards}, give or take a factor of {_FACTOR}: "
        f"{together.pace.seconds:,.0f} s a step by assumed speeds and lengths (vlm-rl plan names them)"
    )


def _shown(hours: float) -> str:
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"
