"""Does rollout.carry_over shorten or lengthen responses? A policy of eight numbers, trained many times.

    python perf/carry_over_lengths.py

A response is up to 64 tokens long. Before each, the policy decides whether to stop, with a probability for each
eighth of the response. 16 prompts x 8 responses a step, the project's own advantages, token weights and loss, and
Adam. The reward is a coin, or 1 for a response of 24 tokens or more. The expected length of the trained policy
follows from its eight numbers without sampling. The interval is a 95 % t interval over the seeds, of the difference
to the runs that wait.
"""

from __future__ import annotations

import argparse
from itertools import product
from math import ceil

import numpy as np
import torch
from scipy import stats
from torch.nn.functional import logsigmoid

from vlm_rl.advantages import compute_advantages
from vlm_rl.algorithms import ALGORITHMS
from vlm_rl.losses import policy_loss, token_weights
from vlm_rl.types import LossInputs

PROMPTS, RESPONSES, LONGEST, EIGHTH = 16, 8, 64, 8


def expected_length(logits: np.ndarray) -> float:
    """Return the mean length of a response; the last token stops whatever is drawn."""
    goes_on = 1 / (1 + np.exp(logits.repeat(EIGHTH)[: LONGEST - 1]))
    return float(1 + np.cumprod(goes_on).sum())


def train(name: str, reward: str, share: float, *, steps: int, seed: int) -> float:
    """Return the expected length at the end of a run."""
    rng, rule = np.random.default_rng(seed), ALGORITHMS[name]
    theta = torch.full((LONGEST // EIGHTH,), -3.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=0.02)
    in_progress = ceil(PROMPTS / share)
    lengths = np.zeros((0, RESPONSES), int)
    ended = np.zeros((0, RESPONSES), bool)
    drawn_at = np.zeros((0, RESPONSES, LONGEST))  # the log-prob of each token as it was drawn
    for _ in range(steps):
        fresh = in_progress - len(lengths)
        lengths = np.concatenate([lengths, np.zeros((fresh, RESPONSES), int)])
        ended = np.concatenate([ended, np.zeros((fresh, RESPONSES), bool)])
        drawn_at = np.concatenate([drawn_at, np.zeros((fresh, RESPONSES, LONGEST))])
        stop = 1 / (1 + np.exp(-theta.detach().numpy()))
        while ended.all(axis=1).sum() < PROMPTS:
            group, response = np.nonzero(~ended)
            at = lengths[group, response]
            stops = rng.random(len(at)) < stop[at // EIGHTH]
            drawn_at[group, response, at] = np.log(np.where(stops, stop[at // EIGHTH], 1 - stop[at // EIGHTH]))
            lengths[group, response] += 1
            ended[group, response] = stops | (at + 1 == LONGEST)
        done = np.flatnonzero(ended.all(axis=1))[:PROMPTS]
        lengths_PG = lengths[done]
        coin_PG = rng.random(lengths_PG.shape) < 0.5
        rewards_PG = (coin_PG if reward == "coin" else lengths_PG >= 24).astype(float)
        advantages_PG = compute_advantages(rule.advantage, rewards_PG, ddof=1)
        weights_PG = token_weights(rule.aggregation, lengths_PG, advantages_PG, max_tokens=LONGEST)
        response_K = torch.arange(lengths_PG.size).repeat_interleave(torch.from_numpy(lengths_PG.ravel()))
        position_K = torch.cat([torch.arange(length) for length in lengths_PG.ravel()])
        cut_K = position_K == LONGEST - 1  # nothing depends on what is drawn there
        stops_K = position_K == torch.from_numpy(lengths_PG.ravel() - 1)[response_K]
        logits_K = theta[position_K // EIGHTH]
        logp_K = logsigmoid(torch.where(stops_K, logits_K, -logits_K)).masked_fill(cut_K, 0.0)
        sampled = np.concatenate(
            [row[:n] for row, n in zip(drawn_at[done].reshape(-1, LONGEST), lengths_PG.ravel(), strict=True)]
        )
        inputs = LossInputs(
            old_logp_K=None,
            sampler_logp_K=torch.from_numpy(sampled).masked_fill(cut_K, 0.0),
            response_K=response_K,
            lengths_n=torch.from_numpy(lengths_PG.ravel()),
            advantages_n=torch.from_numpy(advantages_PG.ravel()),
            weights_n=torch.from_numpy(weights_PG.ravel()),
        )
        options = {"ratio": rule.ratio, "surrogate": rule.surrogate, "clip_low": rule.clip_low}
        loss, _ = policy_loss(logp_K, logp_K, inputs, **options, clip_high=rule.clip_high, cap=2.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept = np.setdiff1d(np.arange(in_progress), done)
        lengths, ended, drawn_at = lengths[kept], ended[kept], drawn_at[kept]
    return expected_length(theta.detach().numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    print("| algorithm | reward | length at the start | at the end, waiting | carry_over 0.5 | difference |")
    print("|---|---|---|---|---|---|")
    start = expected_length(np.full(LONGEST // EIGHTH, -3.0))
    for name, reward in product(("grpo", "dapo"), ("coin", "length")):
        waits, carries = (
            np.array([train(name, reward, share, steps=options.steps, seed=seed) for seed in range(options.seeds)])
            for share in (1.0, 0.5)
        )
        low, high = stats.ttest_rel(carries, waits).confidence_interval(0.95)
        gap = f"{(carries - waits).mean():+.1f} ({low:.1f} to {high:.1f})"
        print(f"| {name} | {reward} | {start:.1f} | {waits.mean():.1f} | {carries.mean():.1f} | {gap} |", flush=True)


if __name__ == "__main__":
    main()
