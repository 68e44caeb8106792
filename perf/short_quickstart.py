"""`vlm-rl quickstart` with a warm start of 16 lessons and two steps of training: does it run?

python perf/short_quickstart.py quickstart --out runs/short
"""

from __future__ import annotations

import sys
from dataclasses import replace

from vlm_rl.cli import main
from vlm_rl.toy import quickstart

if __name__ == "__main__":
    quickstart.WARM_ON_CPU = replace(quickstart.WARM_ON_CPU, passes=1, mixture=64)
    quickstart.RL_STEPS = 2
    sys.exit(main())
