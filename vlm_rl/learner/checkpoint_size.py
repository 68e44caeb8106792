"""How large the checkpoints of a run are, how many are on the disk at a time, and whether they fit there.

    size = checkpoint_bytes(config.train, torch.bfloat16, total=3_754_622_976, trainable=3_754_622_976)
    room = DiskRoom.of(config, size)
    room.line()      # checkpoints: 60.1 GB each, every 50 steps, at most 3 at a time ... = 180 GB; 512 GB free
    room.refusal()   # None, or why a save is certain to be refused

`vlm-rl train --dry-run`, `vlm-rl doctor --config` and the start of a run call these.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from vlm_rl.config import CheckpointConfig, Config, SftConfig, TrainConfig
from vlm_rl.errors import UserError
from vlm_rl.learner.policy import Policy
from vlm_rl.run.checkpoint import size_text
from vlm_rl.run.directory import RunDirectory


def checkpoint_bytes(
    config: TrainConfig,
    dtype: torch.dtype,
    *,
    total: int,
    trainable: int,
    lora: bool = False,
    on_gpu: bool = False,
) -> int:
    """Return the bytes of a checkpoint: the Hugging Face folder and the shards of all ranks under learner/.

    Each is counted once, whatever the number of ranks. Left out is what does not grow with the model: the tokenizer,
    names of tensors, padding of shards, groups in progress (tests/learner/test_checkpoint_size.py).

    Args:
        config: the optimizer and the ZeRO stage.
        dtype: of the weights.
        total: parameters of the learner, adapters included.
        trainable: those that are trained.
        lora: whether these are adapters. A checkpoint then leaves the others out.
        on_gpu: whether the learner is on a GPU.
    """
    saved = trainable if lora else total
    frozen = saved - trainable
    folder = dtype.itemsize * saved
    if config.zero_stage < 3:
        weights = saved
        # In ZeRO 2 DeepSpeed adds host copies of frozen weights. On a CPU they share the weights' storage.
        weights += frozen if config.zero_stage == 2 and on_gpu else 0
    else:
        weights = frozen  # the masters are the only copy of the others
    masters = 4 if config.zero_stage >= 1 else 0
    moments = 8 if config.optimizer == "adamw" else 0
    return folder + dtype.itemsize * weights + (masters + moments) * trainable


def most_at_a_time(
    keep: CheckpointConfig, steps: int, *, there: Sequence[int] = (), has_best: bool = False, eval_every: int = 0
) -> int:
    """Return how many checkpoints are on the disk at a time, at most: old ones go once the new one is complete.

    Those that checkpoint.minutes adds are not counted: they matter in runs of fewer than keep_last scheduled saves.

    Args:
        keep: when checkpoints are written, and which are kept.
        steps: of the whole run.
        there: the steps of those that are there already, ascending.
        has_best: whether the best evaluated one is kept too.
        eval_every: rollout steps between evaluations, after each of which one may be saved; 0: none.
    """
    left = range(max(there, default=0) + 1, steps + 1)
    saves = [
        step for step in left if step % keep.every == 0 or step == steps or (eval_every and step % eval_every == 0)
    ]
    if not saves:
        return len(there)
    earlier = [*there, *saves[:-1]]
    last, older = earlier[-keep.keep_last :], earlier[: -keep.keep_last]
    milestones = sum(step % keep.keep_every == 0 for step in older) if keep.keep_every else 0
    best = 1 if has_best and milestones < len(older) else 0
    return max(len(last) + milestones + best, len(there)) + 1


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """What the checkpoints of a run take, and the free space of their disk. All sizes are in bytes."""

    out: str  # the run's folder, which need not exist
    keep: CheckpointConfig
    size: int  # of a checkpoint
    has_best: bool
    there: int  # how many there are already
    most: int  # how many there are at a time
    least: int  # without milestones and the best one, which may be moved away meanwhile
    free: int

    @classmethod
    def of(cls, config: Config | SftConfig, size: int) -> Self:
        """Look at the disk of a run whose checkpoints are this large, and at those that are there."""
        there = [step for step, _ in RunDirectory(config.out).checkpoints()]
        has_best = isinstance(config, Config) and config.eval.every > 0 and bool(config.data.eval)
        keep, steps = config.checkpoint, config.train.steps
        eval_every = config.eval.every if isinstance(config, Config) and has_best and keep.keep_best else 0
        return cls(
            out=config.out,
            keep=keep,
            size=size,
            has_best=has_best,
            there=len(there),
            most=most_at_a_time(keep, steps, there=there, has_best=has_best, eval_every=eval_every),
            least=most_at_a_time(keep.model_copy(update={"keep_every": 0}), steps, there=there),
            free=shutil.disk_usage(existing(Path(config.out))).free,
        )

    def line(self) -> str:
        """Return one line with the size of a checkpoint, how many are kept, and the free space."""
        kept = [f"keep_last {self.keep.keep_last}"]
        kept += [f"keep_every {self.keep.keep_every}"] if self.keep.keep_every else []
        kept += ["the best"] if self.has_best else []
        steps = "step" if self.keep.every == 1 else f"{self.keep.every} steps"
        return (
            f"checkpoints: {size_text(self.size)} each, every {steps}, at most {self.most} at a time "
            f"({', '.join(kept)}, and the one being written) = {size_text(self.most * self.size)}; "
            f"{size_text(self.free)} free in {self.out}"
        )

    def refusal(self) -> str | None:
        """Return why a save is certain to be refused, even if milestones are moved away; None if it is not."""
        more = self.least - self.there
        if self.free >= more * self.size:
            return None
        fewer = ", lower checkpoint.keep_last" if more > 1 and self.least > 2 else ""
        count = "a checkpoint takes" if more == 1 else f"{more} checkpoints at a time take"
        permanent = ["milestones"] if self.keep.keep_every else []
        permanent += ["the best one"] if self.has_best else []
        if permanent and self.most > self.least:
            count = f"even without {' and '.join(permanent)}, {count}"
        return (
            f"{self.out}: {count} {size_text(more * self.size)}, and {size_text(self.free)} are free: a save of this "
            f"run would be refused: free some space{fewer}, or set out to a folder on a larger disk"
        )

    def fault(self) -> str | None:
        """Return a line about checkpoints that do not fit, or will not once all are kept; None if all fit."""
        more = self.most - self.there
        if self.free >= more * self.size:
            return None
        if (reason := self.refusal()) is not None:
            return f"does not fit on the disk of {reason}"
        rarer = ", or raise checkpoint.keep_every" if self.keep.keep_every else ""
        return (
            f"warning: {size_text(more * self.size)} are needed in {self.out} until the run ends, and "
            f"{size_text(self.free)} are free: a save that does not fit will be refused and end the run: free some "
            f"space, move old checkpoints away in time{rarer}"
        )

    def lines(self) -> list[str]:
        """Return `line`, and `fault` where there is one."""
        return [self.line(), *filter(None, [self.fault()])]


def disk_room(config: Config | SftConfig, policy: Policy, *, on_gpu: bool) -> DiskRoom:
    """Compute the disk space of a run's checkpoints from its loaded policy, whole or in shards.

    Raises UserError if a save is certain to be refused.
    """
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in policy.model.parameters()]
    size = checkpoint_bytes(
        config.train,
        policy.model.dtype,
        total=sum(size for size, _ in sizes),
        trainable=sum(size for size, is_trained in sizes if is_trained),
        lora=policy.base is not None,
        on_gpu=on_gpu,
    )
    room = DiskRoom.of(config, size)
    if (reason := room.refusal()) is not None:
        raise UserError(reason)
    return room


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
