"""The schedule of the learning rate: warm-up, then constant or a cosine."""

from __future__ import annotations

import math
from typing import Literal


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
