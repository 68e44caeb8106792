"""Does a small model learn a larger one's scan without a reward, and in how many steps? One command, some minutes.

python perf/distillation.py --out runs/distillation

The policy is the quickstart's, warm-started on traces of which more than half are guesses. The teacher is a larger
model that has learned the careful scan alone. The policy is trained by rewards, as in the quickstart, and then by
the teacher's log-probs of its own responses, without a reward: as an advantage, and over the teacher's 8 likeliest
words. Printed are accuracies by step, greedy on held-out problems and as sampled. What is there is not made again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlm_rl.api import read_run
from vlm_rl.config import Config, with_values
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.quickstart_data import make_quickstart_data, warm_examples
from vlm_rl.learner.sft import Example, warm_start
from vlm_rl.toy.counting_squares import FORCED_SCAN, SQUARES
from vlm_rl.toy.quickstart import (
    RL_STEPS,
    TEMPLATE,
    WEIGHT_STD,
    ToyData,
    WarmStart,
    quickstart_config,
)
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.train import train

TEACHER = {"hidden": 192, "heads": 6, "layers": 4, "mlp": 576, "weight_std": 0.072}  # about 1 / sqrt(192)
STEPS = RL_STEPS // 10
RULE = {
    "algorithm.name": "grpo",
    "algorithm.aggregation": "token",
    "algorithm.distillation.rewards": False,
    "train.mini_batch_prompts": 4,
    "train.steps": STEPS,
    "eval.every": 1,
    "reward.overlong_buffer": 0,
}
WAYS = {  # by name: what differs from RULE
    "teacher": {"algorithm.distillation.top_k": 0, "train.lr": 3e-4},
    "teacher-top-8": {"algorithm.distillation.top_k": 8, "train.lr": 5e-4},
}


def toy_data(folder: Path, *, seed: int) -> ToyData:
    """Return the quickstart's data, drawn where it is missing."""
    if not folder.is_dir():
        return make_quickstart_data(folder, seed=seed)
    how = WarmStart.here()
    examples = warm_examples(folder / "raw" / "warm", folder / "warm", seed=seed, passes=how.passes, sprinkled=800)
    return ToyData(folder, folder / "train", folder / "heldout", examples, SQUARES.tokenizer_texts(), FORCED_SCAN)


def clean_examples(toy: ToyData, *, seed: int) -> list[Example]:
    """Return the careful scans alone."""
    problems = {problem.id: problem for problem in load_set(toy.folder / "warm")}
    lines = map(json.loads, (toy.folder / "raw" / "warm" / "traces.jsonl").read_text().splitlines())
    clean = [Example(problems[line["id"]], line["response"]) for line in lines if line["phase"] == "clean"]
    return clean * WarmStart.here().passes


def learned(toy: ToyData, name: str, examples: list[Example], *, seed: int, **sizes: Any) -> Path:
    """Return the folder of a new model that has learned these examples, in their order."""
    out = toy.folder / f"{name}-learned"
    if not out.is_dir():
        model = build_tiny_model(toy.folder / name, seed=seed, tokenizer_texts=toy.tokenizer_texts, **sizes)
        how = WarmStart.here()
        builder = PromptBuilder(model, template=TEMPLATE)
        warm_start(examples, out, model_path=model, builder=builder, config=how.train, batch_size=how.batch_size)
    return out


def trained(config: Config, changes: Mapping[str, Any]) -> tuple[dict[int, float], dict[int, float]]:
    """Return two accuracies by finished steps, of a run that is made where it is missing.

    The greedy one on held-out problems, and that of the responses that the next step samples to train on.
    """
    out = Path(config.out)
    if not (out / "metrics.jsonl").is_file():
        train(with_values(config, changes))
    run = read_run(out)
    sampled = {
        int(record["step"]) - 1: float(record["rewards/accuracy/mean"])
        for record in run.metrics()
        if "rewards/accuracy/mean" in record
    }
    return {result.step: result.summary["accuracy"] for result in run.evals()}, sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for seed in range(options.seeds):
        folder = options.out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        toy = toy_data(folder / "data", seed=seed)
        policy = learned(toy, "policy", list(toy.warm_examples), seed=seed, weight_std=WEIGHT_STD)
        teacher = learned(toy, "teacher", clean_examples(toy, seed=seed), seed=seed, **TEACHER)
        runs = {"rewards": {}, **{name: {**RULE, **way} for name, way in WAYS.items()}}
        for name, changes in runs.items():
            begun = time.monotonic()
            base = quickstart_config(toy, policy, folder / name, seed=seed, sampler="transformers", algorithm="luspo")
            if changes:
                changes = {**changes, "algorithm.distillation.teacher": str(teacher)}
            greedy, sampled = trained(base, changes)
            for kind, values in (("greedy", greedy), ("sampled", sampled)):
                numbers = "  ".join(f"{step}: {value:.3f}" for step, value in values.items())
                print(f"seed {seed}  {name:<14} {kind:<8} {numbers}   ({time.monotonic() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
