"""How evenly an update is dealt out to ranks: a simulation of the planner, which is the trainer's own.

    python perf/planner.py

Mini-batches as in configs/virl39k_luspo_7b.yaml: 16 prompts of an image (256 to 1,280 tokens) and 50 to 250 tokens of
text, 8 responses each, whose lengths are log-normal with mean 1,000 and at most 4,096; how long a problem's responses
are differs from problem to problem. Ranks wait for each other at every row, or once a step as under ZeRO 1.
Efficiency is the cost of the mini-batch, each prompt once, over ranks times the cost of the slowest rank's rows;
repeated prompts and padding count as cost. A token costs 1, and a pair that attends 1 / (6 hidden size). "At most" is
what no plan can exceed: a response is never cut, so no rank is faster than the longest response behind its prompt.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from unittest.mock import patch

import numpy as np

from vlm_rl.learner import row_plan
from vlm_rl.scaling.lengths import made_up
from vlm_rl.scaling.update import Rows, plan_update

HIDDEN = 3584


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=30, help="mini-batches of each kind")
    parser.add_argument("--budget", type=int, default=16_384, help="most tokens of a row")
    options = parser.parse_args()
    print(
        "| prompts | ranks | groups whole | groups cut (10 % to 90 %) | one wait | at most | repeated | ms a plan |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows = Rows(options.budget, HIDDEN)
    for prompts, ranks in product((16, 64), (2, 4, 8, 16, 32)):
        rng = np.random.default_rng(0)
        batches = [made_up(rng, prompts) for _ in range(options.draws)]
        with patch.object(row_plan, "PARTS", ()):
            whole = [plan_update(batch, rows, ranks=ranks).efficiency for batch in batches]
        begun = time.process_time()
        plans = [plan_update(batch, rows, ranks=ranks) for batch in batches]
        milliseconds = 1000 * (time.process_time() - begun) / options.draws
        cut = [plan.efficiency for plan in plans]
        once = np.mean([plan.efficiency_of_one_wait for plan in plans])
        bound, repeated = np.mean([(plan.bound, plan.repeated) for plan in plans], axis=0)
        low, high = np.quantile(cut, [0.1, 0.9])
        print(
            f"| {prompts} | {ranks} | {np.mean(whole):.2f} | {np.mean(cut):.2f} ({low:.2f} to {high:.2f}) "
            f"| {once:.2f} | {bound:.2f} | {repeated:.0%} | {milliseconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
