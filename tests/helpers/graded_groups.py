"""Graded groups made by hand: lengths, reward parts and advantages, no text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlm_rl.types import Grade, Group, Problem, Reward, Rollout

PROBLEM = Problem("p", "", (), "1", "integer")


def make_group(
    lengths: Sequence[int],
    parts: Sequence[tuple[float, float, float]],
    advantages: Sequence[float],
    *,
    verdicts: Sequence[str] | None = None,
    cut: Sequence[int] = (),
) -> Group:
    """Return a group whose responses at the indices `cut` were stopped by the length limit."""
    verdicts = verdicts or ["correct" if part[0] > 0 else "wrong" for part in parts]
    rollouts = tuple(
        Rollout("p", i, np.zeros(n, np.int32), np.zeros(n, np.float32), "", "length" if i in cut else "stop", 0)
        for i, n in enumerate(lengths)
    )
    rewards = tuple(
        Reward(dict(zip(("accuracy", "format", "overlong"), part, strict=True)), Grade(verdict, None, "", ""))  # type: ignore
        for part, verdict in zip(parts, verdicts, strict=True)
    )
    return Group(PROBLEM, rollouts, rewards, np.array(advantages, dtype=np.float64))


RIGHT, WRONG = (1.0, 0.5, 0.0), (0.0, 0.0, 0.0)
