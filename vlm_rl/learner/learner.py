"""The learner: one DeepSpeed engine around the policy, on 1 to many ranks, ZeRO 0 to 3.

An optimizer step takes any number of packed rows, the same number on every rank. The loss of a row is a plain
sum whose weights were fixed for the whole mini-batch, so nothing is averaged: DeepSpeed divides gradients by
the number of ranks, and we multiply the loss by it. Ranks that compute a row together each add the gradient of their
part of it (vlm_rl.learner.sequence_parallel); the sum over all ranks is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlm_rl.config import TrainConfig
from vlm_rl.data.vision.family import BlindImage, blinded
from vlm_rl.distributed import alive, all_gather, all_reduce_sums, barrier, rank, world_size
from vlm_rl.errors import UserError
from vlm_rl.learner.checkpoint_files import CheckpointFiles
from vlm_rl.learner.deepspeed import (
    check_zero_stage,
    gathered,
    load_checkpoint,
    offload_optimizer,
    reload_optimizer,
    save_checkpoint,
    start_engine,
)
from vlm_rl.learner.discard import discard_gradients
from vlm_rl.learner.guard import GatedAdamW, GatedOptimizer, GatedSGD, GradientGuard
from vlm_rl.learner.learning_rate import learning_rate_factor
from vlm_rl.learner.lora import WeightSource, adapter_tensors, save_adapters, weight_sources
from vlm_rl.learner.packing import PackedRow
from vlm_rl.learner.policy import Policy
from vlm_rl.learner.reference import BaseReference, Reference
from vlm_rl.learner.row_sums import are_summed_here, sum_rows
from vlm_rl.model_files.weights import is_used, stored_buffers

# Log-probs [K], entropies [K], the row's other inputs, and, if a teacher names k ids a token, their log-probs
# [K, k] -> the loss, and sums for the metrics.
LossFunction = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]

STATE_TAG = "state"  # the name of DeepSpeed's folder inside the checkpoint's learner/


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer step did. ``sums`` are over the response tokens of all ranks."""

    loss: float
    grad_norm: float  # global, before clipping; NaN or infinite if that is why the guard refused the step
    learning_rate: float  # of the parts that train.lr_by_part does not name
    sums: Mapping[str, float]


class Learner:
    """Trains a policy. Every method is collective: all ranks call it, in the same order."""

    def __init__(self, policy: Policy, config: TrainConfig, *, total_optimizer_steps: int) -> None:
        """Wrap the policy for training. Raises UserError for weights that the ZeRO stage cannot train."""
        check_zero_stage(config.zero_stage, next(policy.parameters()).dtype)
        self.config = config
        self.policy = policy
        self.total_optimizer_steps = total_optimizer_steps
        self.num_updates = 0  # optimizer steps tried; the policy's version
        self.guard = GradientGuard(
            grad_clip=config.grad_clip,
            max_skipped_in_a_row=config.max_skipped_in_a_row,
            fixed_norm=config.fixed_grad_norm,
        )
        self.is_stepping = False  # in the optimizer's step, which may have changed some of the weights
        self._decision: tuple[float, float | None] | None = None  # (norm, scale) of the step in progress
        self._optimizer = self._make_optimizer()
        self._optimizer.gate = self._gate
        self.engine: Any = start_engine(policy, config, optimizer=self._optimizer)
        if are_summed_here(config, next(policy.parameters()).dtype, world_size()):
            sum_rows(self.engine)
        self.device: torch.device = self.engine.device

    def _make_optimizer(self) -> GatedOptimizer:
        c, by_rate = self.config, dict[float, list[nn.Parameter]]()
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad:
                rate = c.lr_by_part.get(self.policy.family.part_of(name), c.lr)
                by_rate.setdefault(rate, []).append(parameter)
        self._rates = list(by_rate)  # of the optimizer's groups, before warm-up and decay
        groups = [{"params": parameters} for parameters in by_rate.values()]
        if c.optimizer == "sgd":
            return GatedSGD(groups, lr=c.lr, weight_decay=c.weight_decay)
        return GatedAdamW(groups, lr=c.lr, betas=c.betas, weight_decay=c.weight_decay, fused=True)

    # --- log-probs and updates ----------------------------------------------------------------

    @torch.no_grad()
    def with_image_features(self, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """Return the rows with a frozen vision tower's features in place of their images.

        All passes of a step then share one pass of the tower.
        """
        filled = []
        for row in rows:
            alive()
            features_FMH = self.engine(row.to(self.device), only_features=True)
            filled.append(replace(row, vision={"image_features": features_FMH.to(row.target_K.device)}))
        return filled

    def with_old_log_probs(self, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """Return the rows with old_logp_K: log-probs at the current weights, which sampled the responses."""
        return [replace(row, loss=replace(row.loss, old_logp_K=self.log_probs(row))) for row in rows]

    def with_blind_log_probs(self, rows: Sequence[PackedRow], image: BlindImage = "blank") -> list[PackedRow]:
        """Return the rows with old_logp_K given blinded images of the same size, at the current weights.

        A row of text gets its usual ones: all ranks do the same number of passes.
        """
        shown = (replace(row, vision=blinded(row.vision, image, row.pictures)) for row in rows)
        blind = (self.log_probs(row) for row in shown)
        return [replace(r, loss=replace(r.loss, old_logp_K=logp_K)) for r, logp_K in zip(rows, blind, strict=True)]

    @torch.no_grad()
    def log_probs(self, row: PackedRow) -> Tensor:
        """Return the log-probs [K] of the row's response tokens at the current weights, on the row's device."""
        alive()
        logp_K, _ = self.engine(row.to(self.device), with_entropy=False)
        return logp_K.to(row.target_K.device)

    @torch.no_grad()
    def with_reference_log_probs(
        self, rows: Sequence[PackedRow], reference: Reference | BaseReference
    ) -> list[PackedRow]:
        """Return the rows with reference_logp_K: log-probs of the frozen reference, which routes by itself."""
        filled = []
        with reference.on_device(self.device):
            for row in rows:
                alive()
                logp_K, _ = reference.model(replace(row, experts_TLK=None).to(self.device), with_entropy=False)
                filled.append(replace(row, loss=replace(row.loss, reference_logp_K=logp_K.to(row.target_K.device))))
        return filled

    @torch.no_grad()
    def with_teacher_log_probs(
        self,
        rows: Sequence[PackedRow],
        shown: Sequence[PackedRow],
        teacher: Reference | BaseReference,
        *,
        top_k: int = 0,
    ) -> list[PackedRow]:
        """Return the rows with teacher_logp_K, and with teacher_ids_Kk and teacher_top_Kk if top_k is above 0.

        Args:
            rows: of a mini-batch.
            shown: the same responses in the same order, as the teacher reads them.
            teacher: the frozen model.
            top_k: how many of its most likely ids are kept for each token.
        """
        filled = []
        with teacher.on_device(self.device):
            for row, seen in zip(rows, shown, strict=True):
                alive()
                assert row.members == seen.members
                asked = replace(seen, experts_TLK=None).to(self.device)
                logp_K, _, *top = teacher.model(asked, with_entropy=False, top_k=top_k)
                ids_Kk, top_Kk = (each.to(row.target_K.device) for each in top) if top else (None, None)
                scores = {"teacher_logp_K": logp_K.to(row.target_K.device), "teacher_ids_Kk": ids_Kk}
                filled.append(replace(row, loss=replace(row.loss, **scores, teacher_top_Kk=top_Kk)))
        return filled

    def update(
        self,
        rows: Sequence[PackedRow],
        loss_function: LossFunction,
        *,
        before_step: Callable[[Mapping[str, float]], object] | None = None,
    ) -> UpdateResult:
        """Make one optimizer step over this rank's rows; all ranks give the same number of them.

        Ranks that compute rows together give the same rows.

        `before_step` gets the sums over the response tokens of all ranks; if it raises, the weights do not change.
        Raises GuardAbortError if the gradient guard has refused too many steps in a row.
        """
        totals: dict[str, Tensor] = {}
        for row in rows:
            alive()
            row = row.to(self.device)
            logp_K, entropy_K, *top = self.engine(row, ids_Kk=row.loss.teacher_ids_Kk)
            loss, sums = loss_function(logp_K, entropy_K, row.loss, *top)
            self.engine.backward(loss * world_size(), scale_wrt_gas=False)
            routing = self.policy.routers.take() | self.policy.take_kept()
            if not row.is_padding:
                # Routers count the tokens of a rank's share of a row; the others count whole rows, once for a group.
                of_row = {"loss": loss, "entropy": entropy_K.sum(), **sums} if self.policy.ranks.is_first else {}
                for key, value in {**of_row, **routing}.items():
                    totals[key] = totals.get(key, torch.zeros((), device=self.device)) + value.detach()
        reduced = all_reduce_sums(totals)
        if before_step is not None:
            before_step(reduced)
        learning_rate = self._set_learning_rate()
        norm = self._step()
        return UpdateResult(loss=reduced.pop("loss", 0.0), grad_norm=norm, learning_rate=learning_rate, sums=reduced)

    def _set_learning_rate(self) -> float:
        c = self.config
        factor = learning_rate_factor(
            self.num_updates,
            warmup_steps=c.warmup_updates(self.total_optimizer_steps // c.steps),
            schedule=c.schedule,
            total_steps=self.total_optimizer_steps,
        )
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        return c.lr * factor

    def _step(self) -> float:
        """Apply the accumulated gradient unless the guard refuses it. Returns its global norm."""
        self._decision = None
        self.is_stepping = True
        self.engine.step()
        self.is_stepping = False
        # An overflow that DeepSpeed found by itself never reaches the optimizer inside it.
        norm, scale = self._decision or (float(self.engine.optimizer._global_grad_norm), None)
        self.num_updates += 1
        self.guard.record(norm, applied=scale is not None)
        return norm

    def _gate(self) -> float | None:
        """Return the factor of the gradients, or None to refuse the step; decided once per step."""
        if self._decision is None:
            norm = self._global_norm()
            self._decision = (norm, self.guard.scale(norm) if self.guard.allows(norm) else None)
        return self._decision[1]

    def _global_norm(self) -> float:
        if self.config.zero_stage > 0:
            return float(self.engine.optimizer._global_grad_norm)
        grads = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def discard_gradients(self) -> None:
        """Forget the gradients since the last optimizer step, also those of a pass that failed. One rank only."""
        self.policy.routers.take()
        self.policy.take_kept()
        discard_gradients(self.engine)

    def offload_optimizer(self) -> None:
        """Move masters and moments to host memory, in ZeRO 2 and 3, until `reload_optimizer`. Changes no number.

        A checkpoint may be saved meanwhile; `update` and `load` need them back.
        """
        offload_optimizer(self.engine)

    def reload_optimizer(self) -> None:
        """Move masters and moments back to the device, if they are in host memory."""
        reload_optimizer(self.engine)

    # --- weights ------------------------------------------------------------------------------

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its transformers name, whole, one at a time. Consume it to the end.

        With adapters these are the merged weights: the model that an engine without adapters computes with. Weights
        that no output depends on are left out.
        """
        return self._stream(used=True)

    def _stream(self, *, used: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that outputs depend on, or the others."""
        for name, source in self._sources(used=used):
            with gathered(source.parameters, zero_stage=self.config.zero_stage):
                yield name, source.weight()

    def stream_base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what `stream_weights` does, without the adapters. Consume it to the end."""
        for name, source in self._sources(used=True):
            with gathered(source.parameters[:1], zero_stage=self.config.zero_stage):
                yield name, source.base()

    def _sources(self, *, used: bool) -> Iterator[tuple[str, WeightSource]]:
        """Yield what the weights are made of, each a sign of life."""
        for name, source in weight_sources(self.policy.model):
            if is_used(self.policy.model.config, name) == used:
                alive()
                yield name, source

    def stream_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every A and alpha / rank B, whole, one at a time. Consume it to the end."""
        for name, parameter, scaling in adapter_tensors(self.policy.model):
            with gathered([parameter], zero_stage=self.config.zero_stage):
                yield name, parameter.data * scaling if scaling != 1 else parameter.data

    def non_finite(self) -> str | None:
        """Return the name of a weight or an optimizer's state that is NaN or infinite on any rank; the same on all.

        Each tensor is read once, on its own device. ZeRO 3 pads its shards with uninitialised memory, so weights are
        gathered first. The float32 masters are not checked: the weights are copies of them.
        """
        largest = [(name, _largest(tensor)) for name, tensor in self.stream_weights()]
        for state in self._optimizer.state.values():
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            largest += [(f"the optimizer's {key}", _largest(tensor)) for key, tensor in tensors.items()]
        finite = torch.stack([value.to(self.device) for _, value in largest]).isfinite().tolist()
        mine = next((name for (name, _), is_finite in zip(largest, finite, strict=True) if not is_finite), None)
        return next((name for name in all_gather(mine) if name is not None), None)

    def save_model(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, or only its adapters (rank 0 writes)."""
        write = self._model_writer(folder)
        if rank() == 0:
            write()
        barrier()

    def _model_writer(self, folder: Path) -> Callable[[], object]:
        """Return a function for rank 0 that writes what the policy is now."""
        if self.policy.base is not None:
            return partial(save_adapters, self.policy.model, self._adapters(), folder, self.policy.base)
        # No sync and no optimizer knows most buffers, and the model is not whole without them.
        whole = chain(stored_buffers(self.policy.model), self.stream_weights(), self._stream(used=False))
        state = {name: tensor.to("cpu", copy=True) for name, tensor in whole if rank() == 0}
        return partial(self.policy.model.save_pretrained, folder, state_dict=state)

    def _adapters(self) -> dict[str, Tensor]:
        """Return whole copies of what is trained, on the CPU, by the model's names."""
        copies = {}
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad:
                with gathered([parameter], zero_stage=self.config.zero_stage):
                    copies[name] = parameter.data.to("cpu", copy=True)
        return copies

    def save(self, folder: Path, *, later: bool = False) -> CheckpointFiles:
        """Write the policy as `save_model` does, and the engine's shards under its learner/.

        With `later` these files are copies in host memory, and their `write` writes them.
        """
        files = CheckpointFiles(folder, later=later)
        write_model = self._model_writer(folder)
        if rank() == 0:
            files.add_model(write_model)
        is_whole = self.policy.base is None
        save_checkpoint(self.engine, folder / "learner", tag=STATE_TAG, write=files.add_shard, whole=is_whole)
        barrier()
        return files

    def load(self, folder: Path) -> None:
        """Restore the weights and the optimizer that ``save`` wrote, on any number of ranks.

        Raises UserError if the folder holds no state of DeepSpeed, or a state that would run code.
        """
        is_whole = self.policy.base is None  # a checkpoint of adapters lacks the frozen weights
        if not load_checkpoint(self.engine, folder / "learner", tag=STATE_TAG, strict=is_whole):
            raise UserError(
                f"{folder / 'learner'}: DeepSpeed found no state to load; resume from a different checkpoint"
            )

    def start_from(self, folder: Path) -> None:
        """Take over weights and moments of a different run's checkpoint, and keep this run's rates and options.

        Raises UserError if it belongs to other parameters.
        """
        options = [{key: group[key] for key in group if key != "params"} for group in self._optimizer.param_groups]
        if not load_checkpoint(self.engine, folder / "learner", tag=STATE_TAG, same_run=False):
            raise UserError(
                f"{folder / 'learner'}: DeepSpeed found no state to load; start from a different checkpoint"
            )
        for group, own in zip(self._optimizer.param_groups, options, strict=True):
            group.update(own)

    def state(self) -> dict[str, Any]:
        """Return the learner's counters, for the checkpoint's manifest (JSON)."""
        return {"num_updates": self.num_updates, "guard": self.guard.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned."""
        self.num_updates = state["num_updates"]
        self.guard.restore(state["guard"])


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest magnitude, in float32: NaN if an element is NaN, 0 for an empty tensor."""
    if not tensor.numel():
        return torch.zeros(())
    return torch.linalg.vector_norm(tensor, ord=math.inf).float()
