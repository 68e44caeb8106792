"""A rollout row and a configuration for tests of what is stored and shown."""

from __future__ import annotations

from typing import Any

from vlm_rl.config import parse_config
from vlm_rl.run.rollout_row import RolloutRow

CONFIG = parse_config({"out": "x", "model": {"path": "m"}, "data": {"train": ["d"]}})


def rollout_row(step: int = 3, attempt: int = 1, **changes: Any) -> RolloutRow:
    values = {
        "step": step,
        "attempt": attempt,
        "prompt_id": "p",
        "response_index": 0,
        "text": "é <think>\x00",
        "token_ids": [5, 6, 7],
        "logprobs": [-0.5, -0.25, 0.0],
        "reward": 1.2,
        "reward_accuracy": 1.0,
        "reward_format": 0.5,
        "reward_overlong": -0.3,
        "advantage": 0.7,
        "verdict": "correct",
        "extracted": None,
        "path": "integer",
        "reason": "",
        "length": 3,
        "stop_reason": "stop",
        "policy_version": 2,
        "turns": "",
    }
    return RolloutRow(**(values | changes))
