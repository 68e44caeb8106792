"""`vlm-rl quickstart` with few problems, a short warm start and two steps of training: does it run?

python perf/short_quickstart.py quickstart --out runs/short
"""

from __future__ import annotations

import sys
from dataclasses import replace

from vlm_rl.cli import main
from vlm_rl.data_prep import quickstart_data
from vlm_rl.toy import quickstart

if __name__ == "__main__":
    quickstart.WARM_ON_CPU = replace(quickstart.WARM_ON_CPU, passes=1, mixture=64)
    quickstart.RL_STEPS = 2
    quickstart_data.TRAIN_PROBLEMS = quickstart_data.WARM_PROBLEMS = 64
    quickstart_data.HELDOUT_PROBLEMS = quickstart_data.WARM_SPRINKLED = 32
    sys.exit(main())
