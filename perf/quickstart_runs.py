"""Does the quickstart hold? Ten seeds with two kinds of arithmetic, and the range of what they reach.

python perf/quickstart_runs.py --out runs/quickstart-runs              # twenty runs of two to six minutes
python perf/quickstart_runs.py --kinds one-thread                      # ten of them

Runs that are done are not made again; one that was stopped begins anew. The second kind of arithmetic takes another
number of threads and the kernels of an older processor: it rounds differently, and training amplifies the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from vlm_rl.api import read_run

ARITHMETIC = {
    "one-thread": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    "avx2": {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
    },
}
CONTROLS = ("forced_scan", "blank_images", "shuffled_images", "best_constant")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-runs"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=ARITHMETIC, default=[*ARITHMETIC])
    options = parser.parse_args()
    print("seed  arithmetic   accuracy by step; forced to scan before; blank, shuffled images after; a constant")
    last: list[float] = []
    for seed in range(options.seeds):
        for kind in options.kinds:
            out = options.out / f"{kind}-{seed}"
            if not (out / "controls.json").is_file():
                for left in (out, out.with_name(f"{out.name}-data")):
                    shutil.rmtree(left, ignore_errors=True)
                command = [sys.executable, "-m", "vlm_rl", "quickstart", "--seed", str(seed), "--out", str(out)]
                with (options.out.parent / f"{options.out.name}.log").open("a") as log:
                    subprocess.run(command, env=os.environ | ARITHMETIC[kind], stdout=log, stderr=log, check=True)
            accuracies = [result.summary["accuracy"] for result in read_run(out).evals()]
            last.append(accuracies[-1])
            controls = json.loads((out / "controls.json").read_text())
            shown = [*accuracies, *(controls[name] for name in CONTROLS)]
            print(f"{seed:>4}  {kind:<11}  " + "  ".join(f"{value:.3f}" for value in shown), flush=True)
    print(json.dumps({"runs": len(last), "lowest": min(last), "highest": max(last)}))


if __name__ == "__main__":
    main()
