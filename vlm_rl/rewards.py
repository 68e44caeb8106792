"""Rewards: accuracy + format + overlong, each part kept apart.

    R = accuracy * [correct] + format * [well formed]
        + min(0, ((L_max - L_buffer) - |y|) / L_buffer * factor)

The weights are those of the LUSPO paper (arXiv 2602.05261: 1, 0.5, factor 0.3, L_max 4096, L_buffer
512; the overlong term is DAPO's, arXiv 2503.14476). |y| counts the generated tokens, the
end-of-sequence token included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from vlm_rl.answers import Grader, task_of
from vlm_rl.config import RewardConfig
from vlm_rl.templates import Template
from vlm_rl.types import Problem, Prompt, Reward, Rollout


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """Zero up to max_tokens - buffer tokens, then linear, reaching -factor at max_tokens; buffer 0 is off."""
    if buffer == 0:
        return 0.0
    return min(0.0, ((max_tokens - buffer) - length) / buffer * factor)


def coin(rollout: Rollout) -> bool:
    """Heads or tails for one response: a function of whose it is and when it was sampled, not of what it says."""
    key = f"{rollout.problem_id}\0{rollout.index}\0{rollout.policy_version}".encode()
    return hashlib.blake2b(key, digest_size=1).digest()[0] % 2 == 1


class RewardFunction:
    """Scores rollouts; holds no state but the grader's workers."""

    def __init__(self, config: RewardConfig, *, template: Template, max_tokens: int, grader: Grader) -> None:
        self.config = config
        self.template = template
        self.max_tokens = max_tokens
        self.grader = grader

    def score(self, items: Sequence[tuple[Problem, Prompt, Rollout]]) -> list[Reward]:
        """One reward per item, in order. The graded text is the prompt's prefill and the sampled text."""
        texts = [prompt.prefill + rollout.text for _, prompt, rollout in items]
        tasks = [task_of(problem, text, self.template) for (problem, _, _), text in zip(items, texts, strict=True)]
        grades = self.grader.grade_many(tasks)
        rewards = []
        for (_, _, rollout), text, grade in zip(items, texts, grades, strict=True):
            parts = {
                "accuracy": self.config.accuracy * grade.correct,
                "format": self.config.format * self.template.is_well_formed(text),
                "overlong": overlong_penalty(
                    len(rollout.ids),
                    max_tokens=self.max_tokens,
                    buffer=self.config.overlong_buffer,
                    factor=self.config.overlong_factor,
                ),
            }
            if self.config.coin:
                parts["coin"] = self.config.coin * coin(rollout)
            rewards.append(Reward(parts=parts, grade=grade))
        return rewards
