"""Metrics of a step, above all the length diagnostics: pure functions of groups and token weights.

A metric has TRL's name where TRL has it; docs/metrics.md explains each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vlm_rl.types import NUM_TENTHS, Group, Problem, Reward


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return rewards, lengths and verdicts of a rollout batch, as floats by metric name.

    Every group must have the same number of responses and the same reward parts. A mean over nothing is NaN.
    """
    lengths_PG = np.stack([group.lengths_G for group in groups])
    rewards_PG = np.array([[reward.total for reward in group.rewards] for group in groups])
    flat = [reward for group in groups for reward in group.rewards]
    metrics = {
        "reward": float(rewards_PG.mean()),
        "reward_std": float(rewards_PG.std(axis=1, ddof=min(1, rewards_PG.shape[1] - 1)).mean()),
        "frac_reward_zero_std": float((rewards_PG.max(axis=1) == rewards_PG.min(axis=1)).mean()),
        "verifier/timeout_rate": float(np.mean([reward.grade.verdict == "timeout" for reward in flat])),
        "verifier/error_rate": float(np.mean([reward.grade.verdict == "error" for reward in flat])),
        "verifier/dropped_rate": float(np.mean([reward.dropped for reward in flat])),
    }
    for part in flat[0].parts:
        values = np.array([reward.parts[part] for reward in flat])
        metrics[f"rewards/{part}/mean"] = float(values.mean())
        metrics[f"rewards/{part}/std"] = float(values.std(ddof=min(1, len(values) - 1)))
    for name in flat[0].logged:
        values = np.array([reward.logged[name] for reward in flat])
        values = values[~np.isnan(values)]
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    lengths = length_metrics(
        lengths_PG,
        rewards_PG,
        advantages_PG=np.stack([group.advantages_G for group in groups]),
        is_correct_PG=np.array([[reward.grade.correct for reward in group.rewards] for group in groups]),
    )
    return metrics | _completion_metrics(groups, lengths_PG) | lengths | episode_metrics(groups)


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return turns, observed tokens and images, calls and errors, as means over the responses; {} without episodes.

    Lengths elsewhere are sampled tokens alone.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not any(rollout.turns for rollout in rollouts):
        return {}
    correct = [reward.grade.correct for group in groups for reward in group.rewards]
    later = [turn for rollout in rollouts for turn in rollout.turns[1:]]
    seen = [[turn.observation for turn in r.turns if turn.observation is not None] for r in rollouts]
    called = [any(observation.tool for observation in of_one) for of_one in seen]
    return {
        "episode/turns": float(np.mean([len(rollout.turns) for rollout in rollouts])),
        "episode/observed_tokens": float(np.mean([rollout.num_observed for rollout in rollouts])),
        "episode/images": float(np.mean([sum(len(o.images) for o in of_one) for of_one in seen])),
        "episode/calls": float(np.mean([sum(bool(o.tool) for o in of_one) for of_one in seen])),
        "episode/errors": float(np.mean([sum(bool(o.error) for o in of_one) for of_one in seen])),
        "episode/cached_share": sum(turn.num_cached for turn in later) / max(sum(t.num_before for t in later), 1),
        "episode/called_rate": float(np.mean(called)),
        "episode/accuracy_called": _mean(np.array([c for c, k in zip(correct, called, strict=True) if k], float)),
        "episode/accuracy_not_called": _mean(
            np.array([c for c, k in zip(correct, called, strict=True) if not k], float)
        ),
        **{
            f"episode/ended_{ending}": float(np.mean([rollout.turns[-1].ending == ending for rollout in rollouts]))
            for ending in ("length", "turns", "observed_tokens")
        },
    }


def _completion_metrics(groups: Sequence[Group], lengths_PG: np.ndarray) -> dict[str, float]:
    stopped_PG = np.array([[rollout.stop_reason == "stop" for rollout in group.rollouts] for group in groups])
    return {
        "completions/mean_length": float(lengths_PG.mean()),
        "completions/min_length": float(lengths_PG.min()),
        "completions/max_length": float(lengths_PG.max()),
        "completions/mean_terminated_length": _mean(lengths_PG[stopped_PG]),
        "completions/clipped_ratio": float(1 - stopped_PG.mean()),
        "num_tokens": float(lengths_PG.sum()),
    }


def asking_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    """Return how often functions and judge gave no value, and what the judge cost, over a step's sampled responses.

    Those of groups that dynamic sampling dropped count too: they were asked about.
    """
    metrics: dict[str, float] = {}
    for name in rewards[0].undecided if rewards else ():
        metrics[f"rewards/{name}/undecided_rate"] = float(np.mean([bool(r.undecided[name]) for r in rewards]))
    for name in rewards[0].cost if rewards else ():
        metrics[f"judge/{name}"] = float(sum(reward.cost[name] for reward in rewards))
    return metrics


def undecided_notes(groups: Sequence[tuple[Problem, Sequence[Reward]]]) -> list[str]:
    """Return a line for each function and the judge that gave no value: how often, and the first problem's reason."""
    notes = []
    for name in groups[0][1][0].undecided if groups else ():
        reasons = [
            (problem.id, reward.undecided[name])
            for problem, rewards in groups
            for reward in rewards
            if reward.undecided[name]
        ]
        if reasons:
            total = sum(len(rewards) for _, rewards in groups)
            problem_id, reason = reasons[0]
            notes.append(f"reward {name}: {len(reasons)} of {total} undecided; problem {problem_id!r} {reason}")
    return notes


def length_metrics(
    lengths_PG: np.ndarray, rewards_PG: np.ndarray, *, advantages_PG: np.ndarray, is_correct_PG: np.ndarray
) -> dict[str, float]:
    """Measure length by verdict and by sign of the advantage, and its spread inside groups.

    The gap between positive and negative responses and the coefficient of variation in a group are
    the two quantities that decide which aggregation wins (BA, arXiv 2605.04077).

    Args:
        lengths_PG: generated tokens of each response, [P, G] for P prompts with G responses each.
        rewards_PG: total rewards, float64.
        advantages_PG: advantages, float64.
        is_correct_PG: verdicts, bool.

    Returns:
        Keys `length/...` as docs/metrics.md explains them, in tokens; NaN where there is no such response.
    """
    positive, negative = _mean(lengths_PG[advantages_PG > 0]), _mean(lengths_PG[advantages_PG < 0])
    p10, p50, p90 = np.percentile(lengths_PG, [10, 50, 90])
    return {
        "length/p10": float(p10),
        "length/p50": float(p50),
        "length/p90": float(p90),
        "length/correct_mean": _mean(lengths_PG[is_correct_PG]),
        "length/wrong_mean": _mean(lengths_PG[~is_correct_PG]),
        "length/positive_mean": positive,
        "length/negative_mean": negative,
        "length/sign_gap": positive - negative,
        "length/group_cv": float((lengths_PG.std(axis=1) / np.maximum(lengths_PG.mean(axis=1), 1)).mean()),
        "length/reward_correlation": _correlation(lengths_PG.ravel(), rewards_PG.ravel()),
    }


def gradient_mass_metrics(groups: Sequence[Group], weights_PG: np.ndarray) -> dict[str, float]:
    """Return the shares of the summed |token weight x advantage| by length decile and sign of the advantage.

    The twenty shares add up to 1, or are all 0 where every advantage is 0. They are exact: the weights [P, G] and
    advantages are those that the loss used. A decile is a tenth of the step's responses, the shortest first; equal
    lengths keep the order given.
    """
    lengths = np.concatenate([group.lengths_G for group in groups])
    advantages = np.concatenate([group.advantages_G for group in groups])
    mass = lengths * weights_PG.ravel() * np.abs(advantages)
    total = mass.sum()
    decile = length_tenths(lengths)
    shares: dict[str, float] = {}
    for sign, member in (("positive", advantages > 0), ("negative", advantages < 0)):
        for bucket in range(NUM_TENTHS):
            value = mass[member & (decile == bucket)].sum()
            shares[f"gradient_mass/{sign}/decile_{bucket + 1}"] = float(value / total) if total > 0 else 0.0
    return shares


def length_tenths(lengths: np.ndarray) -> np.ndarray:
    """Return the tenth, 0 to 9, of each response by length, int64: the shortest first, equal ones in their order."""
    tenths = np.empty(len(lengths), dtype=np.int64)
    tenths[np.argsort(lengths, kind="stable")] = np.arange(len(lengths)) * NUM_TENTHS // len(lengths)
    return tenths


def length_pull_metrics(
    groups: Sequence[Group], weights_PG: np.ndarray, *, with_parts: bool = True
) -> dict[str, float]:
    """Return how hard each part of the reward pulls on length; the parts add up to ``length_pull/total``.

        pull = sum_i c_i A_i (|y_i| - mean length of i's group),   c_i = token weight x |y_i|

    To first order and on-policy, this is the direction in which the update moves expected length: a positive pull
    lengthens. Inside a group advantages are linear in the reward, so A_i is a sum over the parts of the reward:
    A_i^part = k_i (part_i - mean part) with k_i = A_i / (r_i - mean r). Without that, `with_parts` is False.
    """
    parts = list(groups[0].rewards[0].parts) if with_parts else []
    pull = dict.fromkeys([*parts, "total"], 0.0)
    for group, weights_G in zip(groups, weights_PG, strict=True):
        lengths_G, advantages_G = group.lengths_G, group.advantages_G
        there_G = np.array([not reward.dropped for reward in group.rewards])
        if not there_G.any():
            continue
        lever_G = weights_G * lengths_G * (lengths_G - lengths_G.mean())
        pull["total"] += float(lever_G @ advantages_G)
        centred_G = np.array([reward.total for reward in group.rewards])
        centred_G -= centred_G[there_G].mean()
        # A reward equal to the mean has advantage 0, up to rounding, and no slope.
        has_slope_G = there_G & (np.abs(centred_G) > 1e-12)
        slope_G = np.divide(advantages_G, centred_G, out=np.zeros_like(advantages_G), where=has_slope_G)
        for part in parts:
            values_G = np.array([reward.parts[part] for reward in group.rewards])
            pull[part] += float(lever_G @ (slope_G * (values_G - values_G[there_G].mean())))
    return {f"length_pull/{part}": value for part, value in pull.items()}


def difficulty_metrics(
    phi_PG: np.ndarray, advantages_PG: np.ndarray, pass_rates_P: Sequence[float], belief: float
) -> dict[str, float]:
    """Return the mean HA-DW weight on hard prompts (pass rate below the belief) and on easy ones.

    Args:
        phi_PG: the weights.
        advantages_PG: the advantages before weighting; responses with advantage 0 do not count.
        pass_rates_P: the share of right responses of each prompt.
        belief: HA-DW's belief before the step.
    """
    is_hard_PG = np.broadcast_to(np.asarray(pass_rates_P)[:, None] < belief, phi_PG.shape)
    has_signal_PG = advantages_PG != 0
    return {
        "hadw/weight_hard": _mean(phi_PG[is_hard_PG & has_signal_PG]),
        "hadw/weight_easy": _mean(phi_PG[~is_hard_PG & has_signal_PG]),
    }


def update_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means per token over the optimizer steps of one rollout step, from the learner's sums of each."""
    total = {key: sum(result.get(key, 0.0) for result in results) for key in set().union(*results)}
    tokens = max(total.get("tokens", 0.0), 1.0)
    low, high = total.get("clipped_low", 0.0) / tokens, total.get("clipped_high", 0.0) / tokens
    metrics = {
        "entropy": total.get("entropy", 0.0) / tokens,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }
    for sign, tokens_in, clipped_in in (("negative", 0, 1), ("positive", 2, 3)):
        for tenth in range(1, NUM_TENTHS + 1):
            if of_tenth := total.get(f"by_length/{tokens_in * NUM_TENTHS + tenth}"):
                clipped = total.get(f"by_length/{clipped_in * NUM_TENTHS + tenth}", 0.0)
                metrics[f"clip_ratio/{sign}/decile_{tenth}"] = clipped / of_tenth
    if "clipped_dual" in total:
        metrics["clip_ratio/dual_mean"] = total["clipped_dual"] / tokens
    if "rejected" in total:
        metrics["rollout/rejected"] = total["rejected"] / tokens
    if "kept_mass" in total:
        metrics["rollout/kept_mass"] = total["kept_mass"] / tokens
        metrics["rollout/kept_ids"] = total["kept_ids"] / tokens
    if "policy_loss" in total:
        metrics["loss/policy"] = total["policy_loss"] / len(results)
    if "kl" in total:
        metrics["kl"] = total["kl"] / tokens
    if "teacher_kl" in total:
        metrics["teacher/kl"] = total["teacher_kl"] / tokens
    if "teacher_mass" in total:
        metrics["teacher/mass"] = total["teacher_mass"] / tokens
    if seeing := total.get("seeing_tokens"):
        metrics["visual/kl"] = total["perception"] / seeing
    if "gap" in total and (fresh := total.get("fresh_tokens", tokens)):
        metrics["rollout/logprob_gap"] = total["gap"] / fresh
    if routed := total.get("router_tokens"):
        metrics["router/entropy"] = total["router_entropy"] / routed
        metrics["router/max_load"] = total["router_max_load"] / routed
        if "router_replaced" in total:
            metrics["router/replaced"] = total["router_replaced"] / routed
    return metrics


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else float("nan")
