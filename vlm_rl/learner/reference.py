"""Frozen models: the reference of the KL term, and the teacher of a distillation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vlm_rl.config import TrainConfig
from vlm_rl.learner.deepspeed import start_engine
from vlm_rl.learner.lora import without_adapters
from vlm_rl.learner.policy import Policy


class Reference:
    """A frozen policy: sharded over the ranks under ZeRO 3, else in host memory until it is needed."""

    def __init__(self, policy: Policy, *, zero_stage: int, stays: bool = False) -> None:
        """Freeze the policy.

        Args:
            policy: on the device under ZeRO 3 or where it stays, else in host memory.
            zero_stage: of the training.
            stays: whether it stays on the device.
        """
        self.is_sharded, self._stays = zero_stage == 3, stays
        policy.requires_grad_(False)
        self.model: Any = policy.eval()
        if self.is_sharded:
            self.model = start_engine(policy, TrainConfig(zero_stage=3))

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Keep the model on the device for the length of a `with` block."""
        if self.is_sharded or self._stays:
            yield
            return
        try:
            self.model.to(device)
            yield
        finally:  # where memory has ended too: the update is then repeated in shorter rows
            self.model.to("cpu")


class BaseReference:
    """The reference of a policy with adapters: that policy without them, which is the model that the run began with.

    It needs no memory of its own.
    """

    def __init__(self, engine: Any) -> None:
        self.model = engine  # the learner's

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Switch the adapters off for the length of a `with` block."""
        with without_adapters(self.model.module):
            yield
