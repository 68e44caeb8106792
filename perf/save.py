"""Seconds of an optimizer step with a checkpoint after each: none, written while the training waits, and beside it.

    OMP_NUM_THREADS=1 python perf/save.py                    # a random model of 17 M parameters on one rank
    OMP_NUM_THREADS=1 python perf/save.py --folder /data     # on a different disk

The ways take turns, a few steps each; the last checkpoint of a turn is complete when its time ends. Medians of the
turns are printed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {"hidden": 512, "layers": 4, "heads": 16, "kv_heads": 8, "mlp": 2048}
WAYS = ("none", "synchronous", "asynchronous")


def measure(folder: Path, *, steps: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds a step of each turn, by way; the first turn of each is left out."""
    import torch

    from vlm_rl.config import CheckpointConfig, TrainConfig
    from vlm_rl.data.prompts import PromptBuilder, PromptCache
    from vlm_rl.distributed import init_ranks
    from vlm_rl.learner.learner import Learner
    from vlm_rl.learner.policy import Policy, load_model
    from vlm_rl.learner.saving import CheckpointWriter
    from vlm_rl.learner.sft import Example, take_step
    from vlm_rl.run.lock import RunLock
    from vlm_rl.templates import TEMPLATES
    from vlm_rl.toy.tiny_model import build_tiny_model
    from vlm_rl.types import Problem

    init_ranks()
    model = build_tiny_model(folder / "model", **SIZES)
    policy = Policy(load_model(model, dtype=torch.float32), banned_ids=(), temperature=1.0)
    learner = Learner(policy, TrainConfig(zero_stage=2), total_optimizer_steps=1000)
    builder = PromptBuilder(model, template=TEMPLATES["think_answer"])
    examples = [Example(Problem(str(n), "How many?", (), "4", "integer"), "one two " * 60) for n in range(8)]
    prompts = PromptCache(builder)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        for way in WAYS:
            keep = CheckpointConfig(keep_last=1, async_save=way == "asynchronous")
            with CheckpointWriter(folder / way, learner, builder, keep, lock=RunLock(folder)) as writer:
                begun = time.perf_counter()
                for step in range(1, steps + 1):
                    take_step(learner, examples, builder, prompts)
                    if way != "none":
                        writer.save({"step": turn * steps + step})
                    writer.finish(wait=step == steps)
                if turn:
                    seconds[way].append((time.perf_counter() - begun) / steps)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, float32, {turns} turns of {steps} steps\n")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's folder for such files)")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        seconds = measure(Path(scratch), steps=options.steps, turns=options.turns)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    print("| saves | seconds a step | against none |\n|---|---|---|")
    for way, median in medians.items():
        print(f"| {way} | {median:.2f} | {median / medians['none']:.2f} |")


if __name__ == "__main__":
    main()
