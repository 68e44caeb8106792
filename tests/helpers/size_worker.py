"""One rank of test_checkpoint_size.py: a checkpoint in each way, what it was planned to take, and what it takes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch

from tests.helpers.learner_worker import Case
from vlm_rl.config import CheckpointConfig, LoraConfig, parse_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import barrier, init_ranks, rank
from vlm_rl.learner.checkpoint_size import disk_room
from vlm_rl.learner.save_progress import SaveLines
from vlm_rl.learner.saving import CheckpointWriter
from vlm_rl.run.lock import RunLock
from vlm_rl.run.manifest import read_manifest
from vlm_rl.templates import TEMPLATES

# Enough adapters that the names of tensors and the tokenizer are a small part of a checkpoint of them.
WHAT: dict[str, dict[str, Any]] = {"all": {}, "adapters": {"lora": LoraConfig(rank=128)}}
WAYS = {
    f"{optimizer}, {str(dtype).removeprefix('torch.')}, ZeRO {stage}, {what}": {
        "optimizer": optimizer,
        "dtype": dtype,
        "stage": stage,
        **settings,
    }
    for optimizer, dtype, stage, (what, settings) in product(
        ("sgd", "adamw"), (torch.float32, torch.bfloat16), (0, 2, 3), WHAT.items()
    )
    if stage or dtype == torch.float32  # bfloat16 needs masters
}
WAYS["adamw, bfloat16, ZeRO 2, frozen"] = {"dtype": torch.bfloat16, "stage": 2, "freeze": ["tower"]}
WAYS["adamw, bfloat16, ZeRO 3, frozen"] = {"dtype": torch.bfloat16, "stage": 3, "freeze": ["tower"]}


def saved(model: Path, out: Path, settings: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Save after a step; return the bytes that were planned, those of all files, and the lines that were said."""
    settings = {"optimizer": "adamw", **settings}
    case = Case(model, **settings)
    case.train(case.rows(budget=300, groups=case.groups[:2]), steps=1)
    tree = {
        "out": str(out),
        "model": {"path": str(model)},
        "data": {"train": ["x"]},
        "train": {"zero_stage": settings["stage"], "optimizer": settings["optimizer"]},
    }
    room = disk_room(parse_config(tree), case.policy, on_gpu=False)
    if rank() == 0:
        out.mkdir(parents=True)
    barrier()
    lines: list[str] = []
    writer = CheckpointWriter(
        out / "checkpoints",
        case.learner,
        PromptBuilder(model, template=TEMPLATES["think_answer"]),
        CheckpointConfig(),
        lock=RunLock(out),
        size=room.size,
        lines=SaveLines(lines.append, lines.append),
    )
    with writer:
        writer.save({"step": 1})
    barrier()
    case.learner.engine.destroy()
    return room.size, read_manifest(out / "checkpoints" / "step-000001").num_bytes, lines


def main(model: str, out: str, *ways: str) -> int:
    init_ranks()
    results = {way: saved(Path(model), Path(out).parent / str(n), WAYS[way]) for n, way in enumerate(ways)}
    torch.save(results, f"{out}.{rank()}")
    return 0
