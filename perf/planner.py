"""How evenly an update is dealt out to ranks: a simulation of the planner, which is the trainer's own.

    python perf/planner.py

Mini-batches as in configs/virl39k_luspo_7b.yaml: 16 prompts of an image (256 to 1,280 tokens) and 50 to 250 tokens of
text, 8 responses each, whose lengths are log-normal with mean 1,000 and at most 4,096; how long a problem's responses
are differs from problem to problem. Ranks wait for each other at every row, or once a step as under ZeRO 1.
Efficiency is the cost of the mini-batch, each prompt once, over ranks times the cost of the slowest rank's rows;
repeated prompts and padding count as cost. A token costs 1, and a pair that attends 1 / (6 hidden size).
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from unittest.mock import patch

import numpy as np

from vlm_rl.learner import planning
from vlm_rl.learner.packing import Chunk
from vlm_rl.learner.planning import plan_rows

HIDDEN = 3584


def mini_batch(rng: np.random.Generator, *, prompts: int) -> tuple[list[int], list[list[int]]]:
    """Return the lengths of prompts and of their responses."""
    image_and_text = rng.integers(256, 1281, prompts) + rng.integers(50, 251, prompts)
    of_problem = rng.normal(0, 0.4, prompts)
    logs = of_problem[:, None] + rng.normal(0, 0.5, (prompts, 8))
    lengths = (1000 * np.exp(logs - (0.4**2 + 0.5**2) / 2)).clip(20, 4096).astype(int)
    return image_and_text.tolist(), lengths.tolist()


def efficiency(
    prompts: list[int], responses: list[list[int]], *, num_ranks: int, budget: int
) -> tuple[float, float, float, float]:
    """Return the plan's efficiency with a wait at each row and with a single one, what no plan can exceed, and the
    share of repeated prompts and padding.

    A response is never cut, so no rank is faster than the longest response behind its prompt.
    """
    pair_cost = 1 / (6 * HIDDEN)
    plan = plan_rows(prompts, responses, budget=budget, num_ranks=num_ranks, pair_cost=pair_cost)

    def cost(chunk: Chunk) -> float:
        prompt, lengths = prompts[chunk.group], [responses[chunk.group][i] for i in chunk.responses]
        pairs = prompt**2 / 2 + sum(prompt * n + n**2 / 2 for n in lengths)
        return prompt + sum(lengths) + pair_cost * pairs

    groups = [Chunk(group, tuple(range(len(lengths)))) for group, lengths in enumerate(responses)]
    useful = sum(map(cost, groups))
    computed = sum(cost(chunk) for rows in plan for row in rows for chunk in row)
    costs = [[sum(map(cost, row)) for row in rows] for rows in plan]
    slowest = sum(map(max, zip(*costs, strict=True)))
    longest = max(cost(Chunk(group.group, (index,))) for group in groups for index in group.responses)
    return (
        useful / (num_ranks * slowest),
        useful / (num_ranks * max(map(sum, costs))),
        min(1.0, useful / (num_ranks * longest)),
        1 - useful / computed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=30, help="mini-batches of each kind")
    parser.add_argument("--budget", type=int, default=16_384, help="most tokens of a row")
    options = parser.parse_args()
    print(
        "| prompts | ranks | groups whole | groups cut (10 % to 90 %) | one wait | at most | repeated | ms a plan |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for prompts, ranks in product((16, 64), (2, 4, 8, 16, 32)):
        rng = np.random.default_rng(0)
        batches = [mini_batch(rng, prompts=prompts) for _ in range(options.draws)]
        with patch.object(planning, "PARTS", ()):
            whole = [efficiency(*batch, num_ranks=ranks, budget=options.budget)[0] for batch in batches]
        begun = time.process_time()
        plans = [efficiency(*batch, num_ranks=ranks, budget=options.budget) for batch in batches]
        cut, once, bound, repeated = zip(*plans, strict=True)
        milliseconds = 1000 * (time.process_time() - begun) / options.draws
        low, high = np.quantile(cut, [0.1, 0.9])
        print(
            f"| {prompts} | {ranks} | {np.mean(whole):.2f} | {np.mean(cut):.2f} ({low:.2f} to {high:.2f}) "
            f"| {np.mean(once):.2f} | {np.mean(bound):.2f} | {np.mean(repeated):.0%} | {milliseconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
