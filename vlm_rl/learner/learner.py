"""The learner: one DeepSpeed engine around the policy, on 1 to many ranks, ZeRO 0 to 3.

An optimizer step takes any number of packed rows, the same number on every rank. The loss of a row
is a plain sum whose weights were fixed for the whole mini-batch, so nothing is averaged: DeepSpeed
divides gradients by the number of ranks, and we multiply the loss by it.

The only module that imports deepspeed.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vlm_rl.config import TrainConfig
from vlm_rl.distributed import all_reduce_sums, barrier, rank, world_size
from vlm_rl.errors import UserError
from vlm_rl.learner.packing import PackedRow
from vlm_rl.learner.policy import Policy
from vlm_rl.losses import LossInputs

LossFunction = Callable[[Tensor, Tensor, LossInputs], tuple[Tensor, Mapping[str, Tensor]]]  # log-probs, entropies

SPIKE_FACTOR, SPIKE_WINDOW = 1e6, 20
STATE_TAG = "state"  # the name of DeepSpeed's folder inside the checkpoint's learner/


class GuardAbortError(RuntimeError):
    """Several optimizer steps in a row had gradients that must not be applied."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer step did. ``sums`` are over all ranks' response tokens."""

    loss: float
    grad_norm: float  # global, before clipping; may be NaN or Inf when not applied
    applied: bool
    learning_rate: float
    sums: Mapping[str, float]


class GradientGuard:
    """Decides from the global gradient norm whether a step may be applied, and by how much to clip.

    DeepSpeed's own check is not enough: ZeRO 0 in float32 applies NaN and reports success, and no
    stage refuses a finite spike. Norms that are NaN, Inf or SPIKE_FACTOR times the median of the
    last SPIKE_WINDOW good ones leave the weights bit-unchanged.
    """

    def __init__(self, *, grad_clip: float, max_skipped_in_a_row: int, fixed_norm: float | None = None) -> None:
        self.grad_clip = grad_clip
        self.fixed_norm = fixed_norm
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self.history: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.num_skipped = 0
        self.skipped_in_a_row = 0

    def allows(self, norm: float) -> bool:
        if not math.isfinite(norm) or norm < 0:  # DeepSpeed reports an invalid norm as -1
            return False
        return not self.history or norm <= SPIKE_FACTOR * statistics.median(self.history)

    def scale(self, norm: float) -> float:
        """Factor that brings the global norm to at most grad_clip, or to fixed_norm where that is set."""
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
                f"(the last: {norm}); lower train.lr or resume from an earlier checkpoint"
            )

    def state(self) -> dict[str, Any]:
        return {
            "history": list(self.history),
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.history = deque(state["history"], maxlen=SPIKE_WINDOW)
        self.num_skipped = state["num_skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]


class _Gated(torch.optim.Optimizer):
    """An optimizer that asks before each step and scales the gradients as told.

    It sits inside DeepSpeed's ZeRO optimizers, which call step once per partition (ZeRO 3) or once;
    the answer is the same for all partitions of a step.
    """

    gate: Callable[[], float | None]  # the gradient scale, or None: do not apply

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        scale = self.gate()
        if scale is None:
            return
        if scale != 1.0:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        super().step()  # type: ignore[misc]


class GatedAdamW(_Gated, torch.optim.AdamW):
    """AdamW behind the gate."""


class GatedSGD(_Gated, torch.optim.SGD):
    """Plain gradient descent behind the gate."""


class Reference:
    """A frozen policy for the KL term: sharded over the ranks under ZeRO 3, else in host memory until needed."""

    def __init__(self, policy: Policy, *, zero_stage: int) -> None:
        self.is_sharded = zero_stage == 3
        policy.requires_grad_(False)
        self.model: Any = policy.eval()
        if self.is_sharded:
            initialize: Any = _import_deepspeed().initialize
            dtype = next(policy.parameters()).dtype
            self.model = initialize(model=policy, config=deepspeed_block(TrainConfig(zero_stage=3), dtype))[0]

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        if self.is_sharded:
            yield
            return
        self.model.to(device)
        yield
        self.model.to("cpu")


class Learner:
    """Trains a policy. Every method is collective: all ranks call it, in the same order."""

    def __init__(self, policy: Policy, config: TrainConfig, *, total_optimizer_steps: int) -> None:
        """Raises UserError for combinations that DeepSpeed cannot train."""
        deepspeed = _import_deepspeed()
        self.config = config
        self.policy = policy
        self.total_optimizer_steps = total_optimizer_steps
        self.num_updates = 0  # optimizer steps tried; the policy's version
        self.guard = GradientGuard(
            grad_clip=config.grad_clip,
            max_skipped_in_a_row=config.max_skipped_in_a_row,
            fixed_norm=config.fixed_grad_norm,
        )
        self._decision: tuple[float, float | None] | None = None  # (norm, scale) of the step being made
        dtype = next(policy.parameters()).dtype
        if dtype == torch.bfloat16 and config.zero_stage == 0:
            raise UserError(
                "train.zero_stage is 0 with bfloat16 weights: only stages 1 to 3 keep float32 master weights"
            )
        trainable = [p for p in policy.parameters() if p.requires_grad]
        optimizer = self._make_optimizer(trainable)
        optimizer.gate = self._gate
        self._optimizer = optimizer
        # Any: DeepSpeed's annotations name every optimizer it knows and none of what they share
        initialize: Any = deepspeed.initialize
        self.engine: Any = initialize(
            model=policy, optimizer=optimizer, model_parameters=trainable, config=deepspeed_block(config, dtype)
        )[0]
        self.device: torch.device = self.engine.device

    def _make_optimizer(self, parameters: list[torch.nn.Parameter]) -> _Gated:
        c = self.config
        if c.optimizer == "sgd":
            return GatedSGD(parameters, lr=c.lr, weight_decay=c.weight_decay)
        return GatedAdamW(parameters, lr=c.lr, betas=c.betas, weight_decay=c.weight_decay, fused=True)

    # --- log-probs and updates ----------------------------------------------------------------

    @torch.no_grad()
    def with_image_features(self, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """The rows with a frozen vision tower's features in place of their images, for all passes of a step."""
        filled = []
        for row in rows:
            features_FH = self.engine(row.to(self.device), only_features=True)
            filled.append(replace(row, vision={"image_features": features_FH.to(row.target_K.device)}))
        return filled

    @torch.no_grad()
    def with_old_log_probs(self, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """The rows with lp_old filled in: log-probs at the present weights, which the rollouts used."""
        filled = []
        for row in rows:
            logp_K, _ = self.engine(row.to(self.device))
            filled.append(replace(row, loss=replace(row.loss, old_logp_K=logp_K.to(row.target_K.device))))
        return filled

    @torch.no_grad()
    def with_reference_log_probs(self, rows: Sequence[PackedRow], reference: Reference) -> list[PackedRow]:
        """The rows with the frozen reference's log-probs filled in."""
        filled = []
        with reference.on_device(self.device):
            for row in rows:
                logp_K, _ = reference.model(row.to(self.device))
                filled.append(replace(row, loss=replace(row.loss, reference_logp_K=logp_K.to(row.target_K.device))))
        return filled

    def update(self, rows: Sequence[PackedRow], loss_function: LossFunction) -> UpdateResult:
        """One optimizer step over this rank's rows; all ranks give the same number of them."""
        totals: dict[str, Tensor] = {}
        for row in rows:
            row = row.to(self.device)
            logp_K, entropy_K = self.engine(row)
            loss, sums = loss_function(logp_K, entropy_K, row.loss)
            self.engine.backward(loss * world_size(), scale_wrt_gas=False)
            if not row.is_padding:
                for key, value in {"loss": loss, "entropy": entropy_K.sum(), **sums}.items():
                    totals[key] = totals.get(key, torch.zeros((), device=self.device)) + value.detach()
        learning_rate = self._set_learning_rate()
        norm, applied = self._step()
        reduced = all_reduce_sums(totals)
        return UpdateResult(
            loss=reduced.pop("loss", 0.0),
            grad_norm=norm,
            applied=applied,
            learning_rate=learning_rate,
            sums=reduced,
        )

    def _set_learning_rate(self) -> float:
        c, step = self.config, self.num_updates
        factor = min(1.0, (step + 1) / c.warmup_steps) if c.warmup_steps else 1.0
        if c.schedule == "cosine" and step >= c.warmup_steps:
            progress = (step - c.warmup_steps) / max(1, self.total_optimizer_steps - c.warmup_steps)
            factor = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self._optimizer.param_groups:
            group["lr"] = c.lr * factor
        return c.lr * factor

    def _step(self) -> tuple[float, bool]:
        self._decision = None
        self.engine.step()
        # An overflow that DeepSpeed found by itself never reaches the optimizer inside it.
        norm, scale = self._decision or (float(self.engine.optimizer._global_grad_norm), None)
        self.num_updates += 1
        self.guard.record(norm, applied=scale is not None)
        return norm, scale is not None

    def _gate(self) -> float | None:
        if self._decision is None:
            norm = self._global_norm()
            self._decision = (norm, self.guard.scale(norm) if self.guard.allows(norm) else None)
        return self._decision[1]

    def _global_norm(self) -> float:
        if self.config.zero_stage > 0:
            return float(self.engine.optimizer._global_grad_norm)
        grads = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    # --- weights ------------------------------------------------------------------------------

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its transformers name, whole, one at a time. Consume it to the end."""
        deepspeed = _import_deepspeed()
        for name, parameter in self.policy.model.named_parameters():
            is_sharded = self.config.zero_stage == 3
            with deepspeed.zero.GatheredParameters([parameter]) if is_sharded else nullcontext():
                yield name, parameter.data

    def save_model(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder (rank 0 writes)."""
        is_main = rank() == 0
        state = {name: tensor.cpu().clone() for name, tensor in self.stream_weights() if is_main}
        if is_main:
            self.policy.model.save_pretrained(folder, state_dict=state)
        barrier()

    def save(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, and the engine's shards under its learner/."""
        self.save_model(folder)
        self.engine.save_checkpoint(str(folder / "learner"), tag=STATE_TAG)
        barrier()

    def load(self, folder: Path) -> None:
        """Restore what save wrote, weights and optimizer, on the same number of ranks."""
        loaded, _ = self.engine.load_checkpoint(str(folder / "learner"), tag=STATE_TAG)
        if loaded is None:
            raise UserError(f"{folder / 'learner'}: DeepSpeed found no state to load; resume from another checkpoint")

    def state(self) -> dict[str, Any]:
        """The learner's own counters, for the checkpoint's manifest (JSON)."""
        return {"num_updates": self.num_updates, "guard": self.guard.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.num_updates = state["num_updates"]
        self.guard.restore(state["guard"])


def _import_deepspeed() -> ModuleType:
    """deepspeed, told which device it has, compiling nothing, and without the notices of every start.

    On a CPU it would build a shared-memory all-reduce, behind a lock file that a process killed meanwhile
    leaves behind: every later start then waits for it for ever. torch's own gloo does the same work.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in ("DeepSpeed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import deepspeed

    deepspeed.ops.__dict__["__compatible_ops__"] = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # the import sets it back
    return deepspeed


def deepspeed_block(config: TrainConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The DeepSpeed configuration of a run: ours, with train.deepspeed merged over it.

    Clipping is the guard's work, so that it is the same in every stage.
    """
    block: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": config.zero_stage},
    }
    if dtype == torch.bfloat16 and config.zero_stage >= 2:
        block["data_types"] = {"grad_accum_dtype": "fp32"}  # a bfloat16 sum over many rows loses the small ones
    for key, value in config.deepspeed.items():
        is_nested = isinstance(value, dict) and isinstance(block.get(key), dict)
        block[key] = {**block[key], **value} if is_nested else value
    return block
