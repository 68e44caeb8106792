"""What rollout.carry_over brings: a simulation of rollouts whose lengths are known beforehand.

    python perf/carry_over.py                 # made-up lengths, as `vlm-rl plan` has them
    python perf/carry_over.py --run RUN       # lengths of a run's own groups

8 ranks with 16 prompts a step each and 8 responses a prompt, as in configs/virl39k_luspo_7b.yaml. A rank stops once
its 16 groups are done, and all wait for the slowest. A decode step reads the weights and every key and value once.
Before the first of them, the prompts and what earlier steps sampled are read in. Numbers: a 7B model in bfloat16,
15.2 GB of weights, 57,344 bytes of keys and values a token, 3.35 TB/s and 400 TFLOP/s a GPU, no other cost. So the
seconds are computed; nothing here was run on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np

from vlm_rl.run.directory import RunDirectory
from vlm_rl.scaling.lengths import groups_of_run, made_up
from vlm_rl.scaling.rates import BANDWIDTH, OPERATIONS

WEIGHTS, PARAMETERS, BYTES_A_TOKEN = 15.2e9, 7.6e9, 57_344
RANKS, PROMPTS = 8, 16

MakeLengths = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]  # -> prompts [P], responses [P, G]


@dataclass
class Rank:
    """The groups in progress of one rank; the oldest come first."""

    prompts: np.ndarray  # [groups]
    lengths: np.ndarray  # [groups, G]
    sampled: np.ndarray  # [groups, G], tokens so far
    born: np.ndarray  # [groups], the step that began each


def rollout(rank: Rank) -> tuple[int, float, float, np.ndarray]:
    """Sample until 16 groups are done. Return decode steps, seconds of decoding and reading in, and who is done."""
    left = rank.lengths - rank.sampled
    open_groups = left.max(axis=1) > 0
    tokens = rank.prompts[open_groups].sum() + rank.sampled[left > 0].sum()
    ends = np.sort(left.max(axis=1))
    steps = int(ends[PROMPTS - 1])
    responses = left[left > 0]
    context = (rank.prompts[:, None] + rank.sampled)[left > 0]
    order = np.argsort(responses)
    over_context = np.r_[context[order][::-1].cumsum()[::-1], 0]  # of the responses from the i-th shortest on
    t = np.arange(steps)
    first = np.searchsorted(responses[order], t, side="right")  # the shortest that is alive
    read = over_context[first] + (len(responses) - first) * t
    decoding = float((WEIGHTS + BYTES_A_TOKEN * read).sum() / BANDWIDTH)
    rank.sampled = np.minimum(rank.lengths, rank.sampled + steps)
    done = np.flatnonzero((rank.sampled == rank.lengths).all(axis=1))[:PROMPTS]
    return steps, decoding, float(2 * PARAMETERS * tokens / OPERATIONS), done


def simulate(make: MakeLengths, share: float, *, steps: int, seed: int) -> dict[str, float]:
    """Return means over the second half of the steps, and over the tokens and responses that they trained on."""
    rng = np.random.default_rng(seed)
    in_progress = ceil(PROMPTS / share)
    ranks = [
        Rank(np.zeros(0, int), np.zeros((0, 8), int), np.zeros((0, 8), int), np.zeros(0, int)) for _ in range(RANKS)
    ]
    rows, ages, lengths = [], [], []
    for step in range(steps):
        slowest = []
        for rank in ranks:
            prompts, new = make(rng, in_progress - len(rank.prompts))
            rank.prompts, rank.lengths = np.r_[rank.prompts, prompts], np.r_[rank.lengths, new]
            rank.sampled = np.r_[rank.sampled, np.zeros_like(new)]
            rank.born = np.r_[rank.born, np.full(len(new), step)]
            *numbers, done = rollout(rank)
            slowest.append(numbers)
            if step >= steps // 2:
                ages.append(step - rank.born[done])
                lengths.append(rank.lengths[done].ravel())
            kept = np.setdiff1d(np.arange(len(rank.prompts)), done)
            rank.prompts, rank.lengths, rank.sampled, rank.born = (
                values[kept] for values in (rank.prompts, rank.lengths, rank.sampled, rank.born)
            )
        rows.append(max(slowest, key=lambda numbers: numbers[1] + numbers[2]))
    count, decoding, reading = np.array(rows)[steps // 2 :].mean(axis=0)
    age, length = np.concatenate(ages), np.concatenate(lengths)
    return {
        "steps": count,
        "decoding": decoding,
        "reading": reading,
        "older": float((age > 0).mean()),
        "oldest": float(age.max()),
        "length": float(length.mean()),
    }


def as_planned(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return made-up prompts and responses: a mean of 1,000 tokens, at most 4,096."""
    batch = made_up(rng, count)
    return np.array(batch.prompts, int), np.array(batch.responses, int).reshape(count, 8)


def eight_times(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same with responses eight times as long, at most 32,768 tokens."""
    prompts, responses = as_planned(rng, count)
    return prompts, 8 * responses


def of_run(folder: Path) -> MakeLengths:
    """Return a function that samples groups of a run's last quarter of steps, whose responses must be 8 a prompt."""
    groups = groups_of_run(RunDirectory(folder), responses=8)

    def make(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(count, 900), groups[rng.integers(0, len(groups), count)].astype(int)

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="take the lengths of this run's groups")
    parser.add_argument("--steps", type=int, default=100, help="rollout steps, of which the second half counts")
    options = parser.parse_args()
    cases = {"mean 1,000, at most 4,096": as_planned, "mean 8,000, at most 32,768": eight_times}
    if options.run:
        cases = {str(options.run): of_run(options.run)}
    print(
        "| lengths | carry_over | decode steps | decoding, s | reading in, s | together, s | older | oldest | mean |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, make in cases.items():
        for share in (1.0, 0.9, 0.75, 0.5):
            r = simulate(make, share, steps=options.steps, seed=0)
            print(
                f"| {name} | {'off' if share == 1 else share} | {r['steps']:,.0f} | {r['decoding']:.1f} "
                f"| {r['reading']:.1f} | {r['decoding'] + r['reading']:.1f} | {r['older']:.0%} | {r['oldest']:.0f} "
                f"| {r['length']:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
