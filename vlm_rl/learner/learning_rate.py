"""The schedule of the learning rate: warm-up, then constant or a cosine."""

from __future__ import annotations

import math
from typing import Literal

from vlm_rl.config import TrainConfig


def learning_rate_factor(
    step: int, *, warmup_steps: int, schedule: Literal["constant", "cosine"], total_steps: int
) -> float:
    """Return the factor, 0 to 1, of the configured learning rate at optimizer step t.

        warm-up    (t + 1) / W                                  for t < W
        constant   1                                            for t >= W
        cosine     (1 + cos(pi (t - W) / (T - W))) / 2          for W <= t < T, then 0

    The cosine is that of SGDR (arXiv 1608.03983) without restarts.

    Args:
        step: t, the number of steps before this one.
        warmup_steps: W; 0 begins with the whole rate.
        schedule: what follows the warm-up.
        total_steps: T, of the whole training.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def moved_cosine(own: TrainConfig, now: TrainConfig, *, step: int, updates_per_step: int) -> str | None:
    """Say how a resume with different train.steps moves the learning rate; None if it does not.

    Args:
        own: the run's own configuration.
        now: that of the resume.
        step: rollout steps that are finished.
        updates_per_step: optimizer steps of each.
    """

    def rate(config: TrainConfig) -> float:
        update, total = step * updates_per_step, config.steps * updates_per_step
        warmup = config.warmup_updates(updates_per_step)
        return config.lr * learning_rate_factor(
            update, warmup_steps=warmup, schedule=config.schedule, total_steps=total
        )

    if now.schedule != "cosine" or own.steps == now.steps or rate(own) == rate(now):
        return None
    return (
        f"train.schedule is cosine, which now ends at step {now.steps}: the learning rate of the next step is "
        f"{rate(now):.3g}, and would have been {rate(own):.3g}"
    )
