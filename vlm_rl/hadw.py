"""HA-DW, history-aware adaptive difficulty weighting (arXiv 2601.08521).

A scalar belief C tracks how able the policy is. A prompt is hard where its group's pass rate p_hat is below the
belief before this step, and easy otherwise. Every advantage is scaled by

    Phi_i = lambda * exp(D_i |p_hat - C|),   D_i = -sgn(A_i) sgn(p_hat - C)

so right answers to hard prompts and wrong answers to easy ones count more. Where the paper is silent, this module
decides: until ``window`` beliefs exist, C is the running mean of the batch accuracies; the first step has no belief
and applies Phi = 1; a pass rate of 0 or 1 with A != 0, which composite rewards allow, gives Phi = lambda; the step
size eta_t is kept within [0.01, 1].

The code that the authors published (github.com/yangfengkai/HA-DW) computes something different, which is here too
(variant ``published_code``): difficulty is a group's mean reward, the belief is the mean of the last m batches' mean
rewards with the present batch among them, and lambda is 1.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MIN_STEP_SIZE, MAX_STEP_SIZE = 0.01, 1.0


@dataclass(frozen=True, slots=True)
class Belief:
    """The belief after some number of steps. `restored` reads what dataclasses.asdict and JSON made of it."""

    ability: float | None = None  # C; None before the first batch
    history: tuple[float, ...] = ()  # C after each past step, the newest last, at most `window`
    accuracies: tuple[float, ...] = ()  # y of the past steps, at most `window`
    num_steps: int = 0

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Belief:
        """Return the belief of a checkpoint, whose tuples JSON has stored as lists."""
        return cls(**{**state, "history": tuple(state["history"]), "accuracies": tuple(state["accuracies"])})


def first_belief(*, variant: str, threshold: float) -> Belief:
    """Return the belief before the first batch: none yet, or with variant `constant` the threshold, which stays."""
    return Belief(ability=threshold) if variant == "constant" else Belief()


def update_belief(belief: Belief, accuracy: float, *, eta: float, window: int, variant: str = "adaptive") -> Belief:
    """Return the belief after a rollout batch (arXiv 2601.08521).

    Args:
        belief: the belief before the batch.
        accuracy: y, the share of right responses in the batch, before any group is dropped; with `published_code`
            the mean reward instead.
        eta: scale of the step size.
        window: m, how many past beliefs or accuracies count.
        variant: `adaptive`, C' = (1 - eta_t) C + eta_t y with eta_t = eta * std of the last m beliefs;
            `hard` and `published_code`, C' = mean of the last m accuracies; or `constant`, C' = C.
    """
    accuracies = (*belief.accuracies, accuracy)[-window:]
    if variant == "constant":
        ability = belief.ability
    elif variant in ("hard", "published_code") or belief.num_steps < window:
        ability = float(np.mean(accuracies))
    else:
        assert belief.ability is not None
        step_size = float(np.clip(eta * np.std(belief.history), MIN_STEP_SIZE, MAX_STEP_SIZE))
        ability = (1 - step_size) * belief.ability + step_size * accuracy
    return replace(
        belief,
        ability=ability,
        history=belief.history if ability is None else (*belief.history, ability)[-window:],
        accuracies=accuracies,
        num_steps=belief.num_steps + 1,
    )


def difficulty_weights(
    advantages_PG: np.ndarray, pass_rates_P: np.ndarray | Sequence[float], belief: Belief, *, scale: float
) -> np.ndarray:
    """Return Phi = lambda * exp(D |p_hat - C|), float64 [P, G]; all ones before the first step.

    Phi multiplies the final advantages and is not renormalised.

    Args:
        advantages_PG: the advantages to scale; only their signs count.
        pass_rates_P: p_hat of each group, its share of right responses.
        belief: the belief before this step.
        scale: lambda.
    """
    if belief.ability is None:
        return np.ones_like(advantages_PG)
    rates_P = np.asarray(pass_rates_P, dtype=np.float64)
    gap_P = np.where((rates_P == 0) | (rates_P == 1), 0.0, rates_P - belief.ability)
    return _weights(advantages_PG, gap_P, scale)


def published_weights(
    advantages_PG: np.ndarray, mean_rewards_P: np.ndarray | Sequence[float], belief: Belief, *, scale: float
) -> np.ndarray:
    """Return the weights [P, G] of the authors' published code; all ones while there is no belief.

    Args:
        advantages_PG: the advantages to scale; only their signs count.
        mean_rewards_P: the mean of each group's total rewards, which need not lie in [0, 1].
        belief: the belief with the present batch among its batches.
        scale: lambda, 1.5 in that code.
    """
    if belief.ability is None:
        return np.ones_like(advantages_PG)
    return _weights(advantages_PG, np.asarray(mean_rewards_P, dtype=np.float64) - belief.ability, scale)


def _weights(advantages_PG: np.ndarray, gap_P: np.ndarray, scale: float) -> np.ndarray:
    """Return lambda * exp(D |gap|) with D = -sgn(A) sgn(gap)."""
    gap_P1 = gap_P[:, None]
    return scale * np.exp(-np.sign(advantages_PG) * np.sign(gap_P1) * np.abs(gap_P1))
