"""Teach a small vision-language model to see: SmolLM2-135M behind Qwen2.5-VL's classes, with an untrained tower.

    python perf/small_vlm.py runs/small-vlm            # a GPU, for 3,000 steps; it was run on no machine
    python perf/small_vlm.py runs/small-vlm --tiny     # 30 + 30 steps on few pictures

First the tower and the merger learn with the language model frozen, then everything learns. Each part is `vlm-rl sft`
on drawn pictures (vlm_rl/toy/drawn_pictures.py) and on easy-VQA's. Printed are the losses on held-out traces before
and after, and the accuracy on easy-VQA's test questions. The same command resumes it. `make real` installs the parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_rl.api import evaluate
from vlm_rl.commands.real_quickstart import cold_start
from vlm_rl.config import SftConfig, parse_tree
from vlm_rl.data_prep.picture_sets import PictureCounts, PictureSets, make_picture_sets
from vlm_rl.devices import has_gpu
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.toy.drawn_pictures import SIDE
from vlm_rl.toy.small_vlm import make_small_vlm
from vlm_rl.toy.smollm import make_smollm


@dataclass(frozen=True, slots=True)
class VlmSizes:
    """How many pictures there are, and how long each part learns."""

    counts: PictureCounts
    steps: int  # of each part
    batch: int  # traces of a step


SIZES = {
    False: VlmSizes(PictureCounts(), steps=1500, batch=32),
    True: VlmSizes(PictureCounts(drawn=480, published=480, heldout=32, test=40), steps=30, batch=8),
}
HELDOUT = "heldout_loss/heldout"
PARTS: dict[str, dict[str, Any]] = {  # what differs from `part_config`
    "tower": {"model": {"freeze": ["language_model"]}, "lr": 1e-3},
    "all": {"model": {}, "lr": 2e-4},
}


def part_config(name: str, model: Path, sets: PictureSets, out: Path, sizes: VlmSizes) -> SftConfig:
    """Return the configuration of one part: its name, what it begins with, and where it is written."""
    part = PARTS[name]
    return parse_tree(
        SftConfig,
        {
            "out": str(out),
            "model": {"path": str(model), **part["model"]},
            "data": {
                "train": [str(sets.traces)],
                "eval": [str(sets.heldout)],
                "max_prompt_tokens": 256,
                "max_response_tokens": 128,
                "min_pixels": SIDE * SIDE,
            },
            "train": {
                "steps": sizes.steps,
                "mini_batch_prompts": sizes.batch,
                "lr": part["lr"],
                "schedule": "cosine",
                "warmup_steps": max(1, sizes.steps // 30),
                **({} if has_gpu() else {"micro_batch_tokens": 2048}),
            },
            "eval": {"every": max(1, sizes.steps // 3)},
            "checkpoint": {"every": max(10, sizes.steps // 10), "keep_last": 1},
        },
        "perf/small_vlm.py",
    )


def learn(folder: Path, sizes: VlmSizes) -> tuple[RunDirectory, PictureSets]:
    """Make sets and model below `folder`, and let both parts learn; return the last part's run, and the sets."""
    sets = make_picture_sets(folder / "pictures", counts=sizes.counts)
    model = folder / "untrained"
    if not model.is_dir():
        make_small_vlm(make_smollm(folder / "SmolLM2-135M-Instruct"), model)
    run = RunDirectory(folder)
    for name in PARTS:
        run = RunDirectory(folder / name, config_file=SFT_CONFIG)
        model = cold_start(part_config(name, model, sets, run.path, sizes))
        losses = ", then ".join(f"{row[HELDOUT]:.3f}" for row in run.metrics() if HELDOUT in row)
        print(f"{name}: loss on held-out traces {losses}", flush=True)
    return run, sets


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is made")
    parser.add_argument("--tiny", action="store_true", help="a few steps, which show that it runs")
    options = parser.parse_args(arguments)
    sizes = SIZES[options.tiny]
    run, sets = learn(options.folder, sizes)
    result = evaluate(run.path / str(sizes.steps), sets.easy_vqa, options.folder / "eval", max_tokens=128)
    summary = result.evals()[-1].summary
    print(f"easy-VQA, {summary['num_problems']} test questions: accuracy {summary['accuracy']:.3f}")


if __name__ == "__main__":
    main()
