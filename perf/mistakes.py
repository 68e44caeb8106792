"""Measure how soon a mistake is answered, in CPU seconds of the whole command.

    python perf/mistakes.py

Each line is a command with a mistake in it that needs neither a model nor a GPU to be seen.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "configs" / "virl39k_luspo_7b.yaml"
COMMANDS = (
    "train nowhere.yaml",
    "train RECIPE train.lrr=1",
    "train RECIPE algorithm.name=ppo",
    "train RECIPE",
    "train RECIPE --resume",
    "train RECIPE --dry-run model.path=nowhere",
    "plan nowhere.yaml",
    "plan RECIPE --gpus 0",
    "quickstart --algorithm ppo",
    "prepare nowhere --out set",
    "init --model nowhere --data nowhere",
    "eval --model nowhere --data nowhere --out out",
    "eval compare nowhere",
    "score --benchmark mathvista --responses nowhere",
    "grade --gold 1",
    "study nowhere.yaml",
    "report nowhere",
    "demo nowhere",
    "export nowhere --out out",
    "doctor --model nowhere",
)


def main() -> None:
    print(f"{'CPU s':>6}  {'command':<50} the message's first line")
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            before = cpu_seconds()
            words = [str(RECIPE) if word == "RECIPE" else word for word in command.split()]
            done = subprocess.run(
                [sys.executable, "-m", "vlm_rl", *words], capture_output=True, text=True, cwd=folder, check=False
            )
            seconds = cpu_seconds() - before
            slowest = max(slowest, seconds)
            said = done.stderr.splitlines()[0].removeprefix("vlm-rl: ") if done.stderr else ""
            said = said.replace(str(RECIPE), "RECIPE")
            assert done.returncode == 2, (command, done.stderr[-2000:])
            print(f"{seconds:6.2f}  {command:<50} {said[:60]}")
    print(f"slowest: {slowest:.2f} CPU seconds")


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
