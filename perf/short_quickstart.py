"""`vlm-rl quickstart` at tiny size, a few steps of each kind, with or without --real: does it run?

python perf/short_quickstart.py quickstart --out runs/short
python perf/short_quickstart.py quickstart --real --yes --out runs/short
"""

from __future__ import annotations

import sys
from dataclasses import replace

from vlm_rl.cli import main
from vlm_rl.commands import real_quickstart
from vlm_rl.data_prep import quickstart_data
from vlm_rl.toy import quickstart

if __name__ == "__main__":
    quickstart.WARM_ON_CPU = replace(quickstart.WARM_ON_CPU, passes=1, mixture=64)
    quickstart.RL_STEPS = 2
    quickstart_data.TRAIN_PROBLEMS = quickstart_data.WARM_PROBLEMS = 64
    quickstart_data.HELDOUT_PROBLEMS = quickstart_data.WARM_SPRINKLED = 32
    real_quickstart.SIZES = real_quickstart.RealSizes(
        traces=16, train=8, heldout=4, cold_steps=2, cold_batch=4, steps=3, prompts=1, max_tokens=48
    )
    sys.exit(main())
