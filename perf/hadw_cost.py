"""What HA-DW costs a step, and what 16 responses to a prompt cost instead of 8, in seconds and memory.

    python perf/hadw_cost.py                 # a small model with random weights, on this machine
    python perf/hadw_cost.py --rounds 3      # alternates more often, where other processes disturb

The three ways are runs of their own processes, in turn, on the same problems. Printed are the medians of a step's
seconds over all rounds, on the clock and of the processor (on a shared machine only the latter say much), their ratio
to GRPO with 8 responses, and the processes' peak memory above the imports'.
Rewards are coins, so that advantages are not 0; what is learned does not matter here. On a GPU the memory is what the
learner allocated at most.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "grpo, 8 responses": {},
    "grpo + HA-DW, 8 responses": {"algorithm": {"name": "grpo", "hadw": {"enabled": True}}},
    "grpo, 16 responses": {"rollout": {"responses_per_prompt": 16}},
}
SKIPPED = 2  # first steps, which warm caches up


def measure(way: str, folder: Path, out: Path, *, steps: int) -> dict[str, Any]:
    """Train in one way, in this process; return the seconds of each step by phase, and the memory in GiB."""
    from vlm_rl.config import parse_config
    from vlm_rl.run.directory import RunDirectory
    from vlm_rl.train import train

    rollout = {"sampler": "transformers", "prompts_per_step": 4, "responses_per_prompt": 8, "max_tokens": 64}
    tree = {
        "out": str(out),
        "model": {"path": str(folder / "model")},
        "data": {"train": [str(folder / "train")]},
        "algorithm": {"name": "grpo"},
        "reward": {"coin": 1.0, "overlong_buffer": 16},
        "train": {"steps": steps, "mini_batch_prompts": 4},
        "checkpoint": {"every": steps, "minutes": 0},
        "eval": {"every": 0},
    }
    changes = {key: {**rollout, **values} if key == "rollout" else values for key, values in WAYS[way].items()}
    begun, spent = _peak_gib(), [time.process_time()]

    def after_step(step: int) -> str:
        spent.append(time.process_time())
        return ""

    train(parse_config({"rollout": rollout, **tree, **changes}, where="hadw_cost"), remark=after_step)
    records = RunDirectory(out).metrics()[SKIPPED:]
    of_card = [record["memory/peak_gib"] for record in records if "memory/peak_gib" in record]
    parts = ("step_time", "timing/rollout", "timing/update")
    seconds = {name: [record[name] for record in records] for name in parts}
    seconds["processor"] = [b - a for a, b in pairwise(spent)][SKIPPED:]
    return {"seconds": seconds, "gib": max(of_card) if of_card else _peak_gib() - begun}


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def make_inputs(folder: Path) -> None:
    """Write a tiny model and 16 problems."""
    from vlm_rl.data_prep.quickstart_data import make_tiny_sets
    from vlm_rl.toy.tiny_model import build_tiny_model

    build_tiny_model(folder / "model", tokenizer_texts=make_tiny_sets(folder, []))


def main() -> None:
    """Measure each way in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        found = measure(options.way, options.folder, options.out, steps=options.steps)
        options.out.with_suffix(".json").write_text(json.dumps(found))
        return
    with TemporaryDirectory() as place:
        folder = Path(place)
        make_inputs(folder)
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for turn in range(options.rounds):
            for number, way in enumerate(WAYS):
                out = folder / f"run-{turn}-{number}"
                words = ["--way", way, "--folder", str(folder), "--out", str(out), "--steps", str(options.steps)]
                done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
                found[way].append(json.loads(out.with_suffix(".json").read_text()))
    print(as_table(found))


def as_table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the medians of each way and their ratios to the first, as Markdown."""
    rows = []
    for way, measured in found.items():
        parts = measured[0]["seconds"]
        seconds = [median([s for one in measured for s in one["seconds"][part]]) for part in parts]
        rows.append((way, [*seconds, median(one["gib"] for one in measured)]))
    base = rows[0][1]
    lines = ["| | step, s | rollout, s | update, s | processor, s | memory, GiB |", "|---|---|---|---|---|---|"]
    for way, values in rows:
        cells = [f"{value:.2f} ({value / first:.2f} x)" for value, first in zip(values, base, strict=True)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
