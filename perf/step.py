"""Where the time of a training step goes: rollout, reward, old log-probs, update, sync, save, other.

    python perf/step.py runs/quickstart
    OMP_NUM_THREADS=1 python perf/step.py

With a run directory it reads metrics.jsonl; without one it first trains for a few steps on toy problems in a
temporary folder. The first step pays for caches and compilation and is left out. Seconds are means over all steps, so
a save every tenth step counts a tenth. Evaluation happens between steps and is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from vlm_rl.run.directory import RunDirectory

PHASES = (
    "rollout",
    "reward",
    "image_features",
    "old_logprobs",
    "reference_logprobs",
    "update",
    "sync",
    "diagnostics",
    "save",
)
BESIDE_THE_MODEL = ("reward", "sync", "diagnostics", "save", "other")
TOY_STEPS = 5


def seconds_by_phase(records: list[dict[str, float]]) -> dict[str, float]:
    """Return a step's mean seconds by phase; "other" is the time in no phase (advantages, packing, logging)."""
    seconds = {name: statistics.fmean(r.get(f"timing/{name}", 0.0) for r in records) for name in PHASES}
    # All phases but the save are inside step_time.
    inside = sum(value for name, value in seconds.items() if name != "save")
    seconds["other"] = statistics.fmean(r["step_time"] for r in records) - inside
    return seconds


def print_phases(run: RunDirectory) -> None:
    records = run.metrics()[1:]
    if not records:
        raise SystemExit(f"{run.path}: fewer than two steps are logged; train longer")
    seconds = seconds_by_phase(records)
    total = sum(seconds.values())
    tokens = statistics.fmean(r["num_tokens"] for r in records if "num_tokens" in r)
    config = run.config()
    rollout = config.rollout
    print(
        f"{len(records)} steps of {rollout.prompts_per_step} prompts x {rollout.responses_per_prompt} responses, "
        f"{tokens:.0f} generated tokens a step, sampler {rollout.sampler}, ZeRO {config.train.zero_stage}"
    )
    for name, value in seconds.items():
        print(f"  {name:<19}{value:>9.3f} s{100 * value / total:>7.1f} %")
    rest = sum(seconds[name] for name in BESIDE_THE_MODEL)
    print(f"  {'neither generation nor the model':<34}{100 * rest / total:>5.1f} %  ({', '.join(BESIDE_THE_MODEL)})")
    print(f"  {'a step':<19}{total:>9.3f} s{tokens / total:>10.0f} generated tokens/s")


def toy_run(folder: Path, *, sampler: str) -> RunDirectory:
    """Train a few steps of LUSPO in the quickstart's shape, from a random tiny model."""
    from vlm_rl.config import parse_config
    from vlm_rl.data_prep.preparation import prepare
    from vlm_rl.toy.counting_squares import SQUARES
    from vlm_rl.toy.tiny_model import build_tiny_model
    from vlm_rl.train import train

    raw = SQUARES.write(folder / "raw", seed=0, train=64, heldout=8, warm=8, mixture=8)
    prepare("virl39k", raw / "train", folder / "train")
    config = {
        "out": str(folder / "run"),
        "model": {"path": str(build_tiny_model(folder / "model", tokenizer_texts=SQUARES.tokenizer_texts()))},
        "data": {"train": [str(folder / "train")], "max_prompt_tokens": 160},
        "reward": {"overlong_buffer": 36},
        "rollout": {"sampler": sampler, "prompts_per_step": 16, "max_tokens": 72},
        "train": {"steps": TOY_STEPS, "mini_batch_prompts": 8, "lr": 1e-4, "zero_stage": 2},
        "checkpoint": {"every": 2},
        "log": {"samples_every": 0},
    }
    train(parse_config(config, where="toy run"))
    return RunDirectory(folder / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a run directory (default: a new toy run)")
    parser.add_argument(
        "--sampler", choices=["auto", "vllm", "transformers"], default="auto", help="sampler of the toy run"
    )
    options = parser.parse_args()
    if options.run:
        print_phases(RunDirectory(options.run).open())
        return
    with tempfile.TemporaryDirectory() as name:
        print_phases(toy_run(Path(name), sampler=options.sampler))


if __name__ == "__main__":
    main()
