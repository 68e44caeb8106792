"""Responses that are sampled in several calls: what is complete, what is left, and how more tokens join them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.samplers.base import OnGroup, SampleRequest, make_rollout
from vlm_rl.types import Prompt


class PartialBatch:
    """The groups of a call that ends before all of them are complete; see InProcessSampler.generate_until."""

    def __init__(self, request: SampleRequest, builder: PromptBuilder, *, enough: int, on_group: OnGroup) -> None:
        """Begin with the responses so far. Groups that are complete already are the first that count.

        Args:
            request: what to sample.
            builder: the prompt builder of the model.
            enough: groups to wait for.
            on_group: called with (index, rollouts) for the first `enough` groups that are complete.
        """
        assert enough <= len(request.begun) == len(request.prompts), (enough, request)
        self.groups = [list(group) for group in request.begun]
        self._request, self._builder = request, builder
        self._left = [sum(rollout.stop_reason == "unfinished" for rollout in group) for group in request.begun]
        self._missing, self._on_group = enough, on_group
        for index, left in enumerate(self._left):
            if not left:
                self._done(index)

    @property
    def is_enough(self) -> bool:
        """Tell whether as many groups are complete as the caller waits for."""
        return self._missing == 0

    def unfinished(self) -> list[tuple[int, int]]:
        """Return (group, response) of every response to continue, in order; none if enough groups are complete."""
        if self.is_enough:
            return []
        return [
            (index, g)
            for index, group in enumerate(self.groups)
            for g, rollout in enumerate(group)
            if rollout.stop_reason == "unfinished"
        ]

    def would_be_enough(self, rows: Sequence[tuple[int, int]]) -> Callable[[list[int]], bool]:
        """Return a function that is given which of these responses end, and tells whether that is enough."""
        left, missing = list(self._left), [self._missing]

        def is_enough(ended: list[int]) -> bool:
            for row in ended:
                index = rows[row][0]
                left[index] -= 1
                missing[0] -= not left[index]
            return missing[0] <= 0

        return is_enough

    def extend(self, index: int, g: int, ids: np.ndarray, logprobs: np.ndarray, *, version: int) -> None:
        """Add new tokens to a response.

        Args:
            index: of its group.
            g: its place in the group.
            ids: the new tokens; none if the call ended before its turn.
            logprobs: of these, as they were sampled.
            version: the policy version that sampled them.
        """
        if not len(ids):
            return
        before = self.groups[index][g]
        older = before.older
        if len(before.ids) and before.policy_version != version:
            older = (*older, (before.policy_version, len(before.ids) - sum(count for _, count in older)))
        whole = make_rollout(
            self._request.prompts[index],
            g,
            np.r_[before.ids, ids],
            np.r_[before.logprobs, logprobs],
            builder=self._builder,
            version=version,
        )
        if whole.stop_reason == "length" and len(whole.ids) < self._request.params.max_tokens:
            self.groups[index][g] = replace(whole, older=older, stop_reason="unfinished")
            return
        self.groups[index][g] = replace(whole, older=older)
        self._left[index] -= 1
        if not self._left[index]:
            self._done(index)

    def _done(self, index: int) -> None:
        if self._missing:
            self._missing -= 1
            self._on_group(index, self.groups[index])


def with_prefix(prompt: Prompt, ids: np.ndarray) -> Prompt:
    """Return the prompt with the tokens of a response added, for both the sampler and the learner."""
    if not len(ids):
        return prompt
    return replace(prompt, ids=np.r_[prompt.ids, ids], sampler_ids=np.r_[prompt.sampler_ids, ids])
