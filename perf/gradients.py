"""Every algorithm through the real learner: one table of how far its gradients differ between splits.

    OMP_NUM_THREADS=1 python perf/gradients.py                # 1 and 2 ranks, ZeRO 0 to 3
    OMP_NUM_THREADS=1 python perf/gradients.py --ranks 1 --stages 0 2

Eight algorithms, each with and without HA-DW, KL and entropy, and a frozen vision tower: 64 variants. The
same five groups, with images and without, as 1, 2, 4 and 8 rows in different orders; each number is the
largest ||g - g0|| / ||g0|| of its column, g0 being the gradient of one row on one rank without ZeRO. The
cases are those of tests/helpers/learner_worker.py, where the tests also hold g0 against the papers' equations.
Exits with 1 if a number is above 1e-5.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlm_rl.toy.tiny_model import build_tiny_model

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1e-5

Results = dict[str, dict[str, Any]]


def gradients(model: Path, ranks: int, stage: int, folder: Path) -> Results:
    """Return what tests/helpers/learner_worker.py finds on this many ranks."""
    out = folder / f"{ranks}-{stage}.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-m", "tests.helpers.learner_worker", str(model), str(stage), str(out), "every_variant"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return torch.load(out, weights_only=False)["every_variant"]


def difference(result: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the first split's distance to the reference plus the largest distance of any split to the first."""
    ours, theirs = result["gradient"], reference["gradient"]
    square = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs)
    norm = sum(float(tensor.double().square().sum()) for tensor in theirs.values())
    return math.sqrt(square / norm) + max(result["gaps"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_tiny_model(folder / "model")
        reference = gradients(model, 1, 0, folder)
        columns = [(ranks, stage) for ranks in options.ranks for stage in options.stages]
        table: dict[str, list[float]] = {rule: [] for rule in reference}
        for ranks, stage in columns:
            results = reference if (ranks, stage) == (1, 0) else gradients(model, ranks, stage, folder)
            for rule, result in results.items():
                table[rule].append(difference(result, reference[rule]))
    heads = [f"{ranks} rank{'s' * (ranks > 1)}, ZeRO {stage}" for ranks, stage in columns]
    show("", heads)
    for variant, numbers in table.items():
        show(variant, [f"{number:.1e}" for number in numbers])
    print("\nThe largest over the variants of each algorithm:")
    for rule in dict.fromkeys(variant.partition("+")[0] for variant in table):
        of_rule = [numbers for variant, numbers in table.items() if variant.partition("+")[0] == rule]
        show(rule, [f"{max(column):.1e}" for column in zip(*of_rule, strict=True)])
    worst = max(max(numbers) for numbers in table.values())
    print(f"largest: {worst:.1e} of the gradient's norm")
    return int(not worst <= LIMIT)


def show(name: str, cells: Sequence[str]) -> None:
    print(f"{name:<32}" + "  ".join(f"{cell:>15}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
