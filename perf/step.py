"""Where the time of a training step goes: rollout, reward, old log-probs, update, sync, save, other.

    python perf/step.py runs/quickstart

The first step pays for caches and compilation and is left out. Seconds are means over all steps, so a save every
tenth step counts a tenth. Evaluation happens between steps and is not counted.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory

PHASES = (
    "rollout",
    "reward",
    "image_features",
    "old_logprobs",
    "blind_logprobs",
    "reference_logprobs",
    "update",
    "sync",
    "diagnostics",
    "save",
)
BESIDE_THE_MODEL = ("reward", "sync", "diagnostics", "save", "other")


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
        raise UserError(f"{run.path}: fewer than two steps are logged; train longer")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory")
    options = parser.parse_args()
    try:
        print_phases(RunDirectory(options.run).open())
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
