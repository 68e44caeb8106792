"""`vlm-rl quickstart` on a CPU with the dtype, warm start and learning rate of a GPU: what does bfloat16 cost?

python perf/quickstart_dtype.py bfloat16 3e-5 --out runs/bfloat16      # eight minutes
"""

from __future__ import annotations

import sys

import torch

from vlm_rl import devices

if __name__ == "__main__":
    name, rate, *words = sys.argv[1:]
    dtype = getattr(torch, name)
    devices.model_dtype = lambda device, setting="auto": dtype  # before others import it

    from vlm_rl.cli import main
    from vlm_rl.toy import quickstart

    quickstart.WARM_ON_CPU, quickstart.learning_rate = quickstart.WARM_ON_GPU, lambda: float(rate)
    sys.exit(main(["quickstart", *words]))
