"""Run the command line: `python -m vlm_rl`, or `torchrun -m vlm_rl` on several ranks."""

from __future__ import annotations

import sys

from vlm_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
