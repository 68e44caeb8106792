"""One rank of test_saving.py: checkpoints that are written while the training continues, and ones that are not."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import torch

from tests.helpers.learner_worker import Case
from vlm_rl.config import CheckpointConfig, LoraConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import barrier, init_ranks, rank, world_size
from vlm_rl.learner.saving import CheckpointWriter
from vlm_rl.run.checkpoint import verify
from vlm_rl.run.lock import RunLock
from vlm_rl.run.manifest import CheckpointError
from vlm_rl.templates import TEMPLATES

WAYS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"stage": 0},
    "ZeRO 1, bfloat16": {"stage": 1, "dtype": torch.bfloat16},
    "ZeRO 2": {"stage": 2},
    "ZeRO 2, frozen": {"stage": 2, "freeze": ["tower"]},
    "ZeRO 2, bfloat16, adapters": {"stage": 2, "dtype": torch.bfloat16, "lora": LoraConfig(rank=3)},
    "ZeRO 3": {"stage": 3, "deepspeed": {"zero_optimization": {"sub_group_size": 50_000}}},
}


class Savings:
    """A learner after one step, and a writer whose thread waits for `go_on`."""

    def __init__(self, model: Path, root: Path, settings: dict[str, Any]) -> None:
        self.case, self.root = Case(model, optimizer="adamw", **settings), root
        self.builder = PromptBuilder(model, template=TEMPLATES["think_answer"])
        self.step()
        self.go_on = Event()
        self.writer = self.make_writer(root / "async", async_save=True)
        self.writer._thread.submit(self.go_on.wait)

    def make_writer(self, root: Path, *, async_save: bool) -> CheckpointWriter:
        keep = CheckpointConfig(async_save=async_save)
        root.mkdir(parents=True, exist_ok=True)
        barrier()
        return CheckpointWriter(root, self.case.learner, self.builder, keep, lock=RunLock(self.root))

    def step(self) -> None:
        self.case.train(self.case.rows(budget=300, groups=self.case.groups[:2]), steps=1)


def compared(model: Path, root: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Save the same state in both ways, and train on before the thread writes; then read both manifests."""
    savings = Savings(model, root, settings)
    state = {"step": 1, "counts": [1]}
    savings.make_writer(root / "sync", async_save=False).save(state)
    weights = savings.case.weights()
    savings.writer.save(state)
    state["counts"].append(2)
    savings.step()
    savings.writer.finish(wait=False)
    early = [path.name for path in (root / "async").glob("step-*")]
    barrier()
    savings.go_on.set()
    with savings.writer:
        pass
    manifests = [verify(root / way / "step-000001") for way in ("sync", "async")]
    return {
        "early": early,
        "moved": any(not torch.equal(tensor, weights[name]) for name, tensor in savings.case.weights().items()),
        "files": [manifest.files for manifest in manifests],
        "info": [manifest.info for manifest in manifests],
    }


def refused(model: Path, root: Path) -> dict[str, Any]:
    """Let the last rank's thread alone meet a full disk, which /dev/full is; the checkpoint before must stay."""
    savings = Savings(model, root, WAYS["ZeRO 2"])
    savings.go_on.set()
    savings.writer.save({"step": 1})
    savings.writer.finish()
    savings.go_on.clear()
    savings.writer._thread.submit(savings.go_on.wait)
    savings.writer.save({"step": 2})
    (shards,) = (root / "async").glob(".tmp-*/learner/state")
    if rank() == world_size() - 1:
        (shards / f"zero_pp_rank_{rank()}_mp_rank_00_optim_states.pt").symlink_to("/dev/full")
    savings.go_on.set()
    message = ""
    try:
        savings.writer.finish()
    except CheckpointError as error:
        message = str(error)
    barrier()
    return {"message": message, "left": sorted(path.name for path in (root / "async").iterdir())}


def main(model: str, out: str, *ways: str) -> int:
    init_ranks()
    folder = Path(out).parent
    results = {way: compared(Path(model), folder / way, WAYS[way]) for way in ways}
    results["refused"] = refused(Path(model), folder / "refused")
    torch.save(results, f"{out}.{rank()}")
    return 0
