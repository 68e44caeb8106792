"""Steps that teach nothing: no response was better or worse than the others to its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from vlm_rl.types import Group, Reward

FIRST = 5
"""Consecutive steps after which a line says so; the next lines follow after twice as many, and so on."""


class NoSignal:
    """Counts consecutive steps in which every advantage was 0, and says why and what to check."""

    def __init__(self) -> None:
        self.steps, self._next = 0, FIRST

    def after_step(self, groups: Sequence[Group], sampled: Sequence[Reward]) -> str | None:
        """Return a warning if one is due.

        Args:
            groups: those that the step trains on, with advantages.
            sampled: the rewards of all its responses, including those of dropped groups.
        """
        if any(group.advantages_G.any() for group in groups):
            self.steps, self._next = 0, FIRST
            return None
        self.steps += 1
        if self.steps < self._next:
            return None
        self._next *= 2
        return (
            f"warning: the last {self.steps} steps taught nothing, since every advantage was 0: {_reason(sampled)}; "
            "`vlm-rl report` shows responses with their rewards"
        )


def _reason(rewards: Sequence[Reward]) -> str:
    judged = [reward for reward in rewards if not reward.dropped]
    if not judged:
        return "no response of the last step was judged, so that all were dropped; see the reasons above"
    reasons = ["; ".join(filter(None, reward.undecided.values())) for reward in judged]
    if all(reasons):
        return f"no reward of the last step was decided ({reasons[0]}); fix the function or the judge"
    if all(reward.grade.correct for reward in judged):
        return "all responses of the last step were right; take harder problems"
    if not any(reward.grade.correct for reward in judged):
        return (
            "no response of the last step was right; check whether the answers have the form that data.template asks "
            "for, and take easier problems or a better model"
        )
    return (
        "the responses to each prompt of the last step got the same reward; raise rollout.responses_per_prompt or "
        "rollout.temperature"
    )
