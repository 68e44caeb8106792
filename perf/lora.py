"""Adapters against full fine-tuning: CPU seconds and memory of an optimizer step, and the merge of a sync.

    OMP_NUM_THREADS=1 python perf/lora.py
    OMP_NUM_THREADS=1 python perf/lora.py --model tiny --rounds 9

Every side trains the same model on the same group in a fresh process of its own, with AdamW and one group to a row.
The sides take turns step by step, and medians are printed. Memory is what the peak grew by from the first step on:
weights are in memory before it, gradients, moments and activations are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from learner import peak_mib, sharpen
from versus_trl import LR, Point, Worker, build_models, groups_of, now, report, rule_of

SIDES = {
    "all weights": {},
    "all but the tower": {"freeze": ["tower", "merger"]},
    "LoRA, rank 16": {"rank": 16},
    "LoRA, rank 64": {"rank": 64},
}


def work(side: str, point: Point, folder: Path) -> None:
    """Make an optimizer step, and then a sync's stream, for each line of standard input."""
    from weighed_groups import pack

    from vlm_rl.data.prompts import rope_positions
    from vlm_rl.learner.row_plan import plan_rows
    from vlm_rl.losses import policy_loss

    learner = learner_of(side, point, folder)
    rule, groups = rule_of(point), groups_of(point, folder)
    clips = {"clip_low": rule.clip_low, "clip_high": rule.clip_high}
    loss = partial(policy_loss, ratio=rule.ratio, surrogate=rule.surrogate, cap=2.0, **clips)
    chunks = plan_rows([point.prompt], [point.shape.lengths], budget=2**20)[0]
    before = peak_mib()
    while sys.stdin.readline():
        begun = now()
        rows = [pack(each, groups, partial(rope_positions, learner.policy.model)) for each in chunks]
        if learner.policy.has_frozen_vision:
            rows = learner.with_image_features(rows)
        result = learner.update(rows, loss)
        ended = now()
        for _ in learner.stream_weights():
            pass
        sync = now()[1] - ended[1]
        trained = sum(p.numel() for p in learner.policy.parameters() if p.requires_grad) / 1e6
        report(begun, ended, before, result.loss, result.grad_norm, sync=sync, trained=trained)


def learner_of(side: str, point: Point, folder: Path) -> Any:
    import torch

    from vlm_rl.config import LoraConfig, TrainConfig
    from vlm_rl.data.adapters import BaseModel
    from vlm_rl.distributed import init_ranks
    from vlm_rl.learner.learner import Learner
    from vlm_rl.learner.policy import Policy, load_model

    init_ranks()
    policy = Policy(load_model(folder / point.model, dtype=torch.float32), banned_ids=(), temperature=1.0)
    sharpen(policy.model)
    settings = SIDES[side]
    if "rank" in settings:
        lora = LoraConfig(rank=settings["rank"])
        policy.add_adapters(lora, base=BaseModel(str(folder / point.model), ""), seed=0)
    policy.freeze(settings.get("freeze", []))
    return Learner(policy, TrainConfig(lr=LR, zero_stage=0), total_optimizer_steps=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["100m", "tiny"], default="100m")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each side after the first")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, Point(**json.loads(options.point)), options.folder)
        return
    point = Point(options.model, 340, 8, 100)
    with tempfile.TemporaryDirectory() as name:
        build_models(Path(name), {point.model})
        workers = {side: Worker(side, point, Path(name), script=__file__) for side in SIDES}
        try:
            for _ in range(1 + options.rounds):
                for worker in workers.values():
                    worker.step()
        finally:
            for worker in workers.values():
                worker.close()
    print(f"{point}\n\n| trained | M parameters | CPU s a step | memory, MiB | merge at a sync, CPU s |")
    print("|---|---|---|---|---|")
    whole = workers["all weights"].summary()
    for side, worker in workers.items():
        s = worker.summary()
        merge = statistics.median(step["sync"] for step in worker.steps)
        cpu = f"{s['cpu']:.2f} ({s['cpu'] / whole['cpu']:.2f})"
        memory = f"{s['memory']:.0f} ({s['memory'] / whole['memory']:.2f})"
        print(f"| {side} | {worker.steps[-1]['trained']:.1f} | {cpu} | {memory} | {merge:.2f} |")


if __name__ == "__main__":
    main()
