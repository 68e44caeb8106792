"""The gradient guard: whether an optimizer step may be applied, and by how much its gradient is scaled.

DeepSpeed's own check is not enough: ZeRO 0 in float32 applies NaN and reports success, and no stage refuses a
finite spike. DeepSpeed clips nothing here, so that clipping is the same in every stage.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

SPIKE_FACTOR, SPIKE_WINDOW = 1e6, 20


class GuardAbortError(RuntimeError):
    """Too many optimizer steps in a row had gradients that must not be applied."""


class GradientGuard:
    """Refuse steps whose global gradient norm is NaN, infinite or a spike; clip the others.

    A spike is a norm above SPIKE_FACTOR times the median of the last SPIKE_WINDOW applied ones. A refused step
    leaves every weight unchanged, bit for bit.
    """

    def __init__(self, *, grad_clip: float, max_skipped_in_a_row: int, fixed_norm: float | None = None) -> None:
        self.grad_clip = grad_clip
        self.fixed_norm = fixed_norm
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self.history: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.num_skipped = 0
        self.skipped_in_a_row = 0

    def allows(self, norm: float) -> bool:
        """Return whether a step of this gradient norm may be applied."""
        if not math.isfinite(norm) or norm < 0:  # DeepSpeed reports an invalid norm as -1
            return False
        return not self.history or norm <= SPIKE_FACTOR * statistics.median(self.history)

    def scale(self, norm: float) -> float:
        """Return the factor that brings the norm to at most grad_clip, or to fixed_norm where that is set."""
        if self.fixed_norm is not None:
            return self.fixed_norm / norm if norm > 0 else 1.0
        return min(1.0, self.grad_clip / (norm + 1e-6))

    def record(self, norm: float, *, applied: bool) -> None:
        """Count the step. Raises GuardAbortError after too many refusals in a row."""
        if applied:
            self.skipped_in_a_row = 0
            if norm > 0:  # a batch of degenerate groups says nothing about the usual size
                self.history.append(norm)
            return
        self.num_skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.max_skipped_in_a_row:
            raise GuardAbortError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a gradient norm that must not be applied "
                f"(the last: {norm}): start a new run with a lower train.lr, or move the newest checkpoints away and "
                "resume from an earlier one"
            )

    def state(self) -> dict[str, Any]:
        """Return the state for a resume, as JSON."""
        return {
            "history": list(self.history),
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self.history = deque(state["history"], maxlen=SPIKE_WINDOW)
        self.num_skipped = state["num_skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]


class GatedOptimizer(torch.optim.Optimizer):
    """An optimizer that asks ``gate`` before each step for the factor of the gradients.

    It is inside DeepSpeed's ZeRO optimizers, which call step once for each partition (ZeRO 3) or once; the
    answer is the same for all partitions of a step.
    """

    gate: Callable[[], float | None]  # the gradients' factor, or None: do not apply

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradients times the gate's factor, or leave the parameters as they are."""
        factor = self.gate()
        if factor is None:
            return
        if factor != 1.0:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        super().step()  # type: ignore[misc]


class GatedAdamW(GatedOptimizer, torch.optim.AdamW):
    """AdamW behind the gate."""


class GatedSGD(GatedOptimizer, torch.optim.SGD):
    """Plain gradient descent behind the gate."""
