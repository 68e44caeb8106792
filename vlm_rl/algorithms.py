"""One row per published algorithm: advantage x ratio x surrogate x aggregation x credit.

The factors are independent: a configuration takes a named row and may replace any of them. vlm_rl.advantages,
vlm_rl.losses and vlm_rl.credit compute each factor, with its equation and source beside the code.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from vlm_rl.config import AlgorithmConfig, DistillationConfig
from vlm_rl.errors import UserError, near


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A policy-gradient rule; every combination of factors is legal."""

    advantage: str  # key of advantages.ADVANTAGES
    ratio: str  # key of losses.RATIOS
    surrogate: str  # key of losses.SURROGATES
    clip_low: float
    clip_high: float
    aggregation: str  # key of losses.AGGREGATIONS
    dynamic_sampling: bool = False
    credit: str = "uniform"  # or a key of credit.CREDITS


def resolve_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Return the named row with the configuration's overrides.

    Raises UserError for an unknown name, for a cap on negative advantages that the rule cannot have, and for a rule
    that would not train on a teacher's scores.
    """
    if config.name not in ALGORITHMS:
        hint = near(config.name, ALGORITHMS, otherwise=f"known names: {', '.join(ALGORITHMS)}")
        raise UserError(f"algorithm.name is {config.name!r}: {hint}")
    overrides = {f.name: getattr(config, f.name) for f in fields(Algorithm) if getattr(config, f.name) is not None}
    rule = replace(ALGORITHMS[config.name], **overrides)
    _check_dual(rule, config.clip_dual)
    _check_distillation(rule, config.distillation)
    return rule


def _check_distillation(rule: Algorithm, distillation: DistillationConfig) -> None:
    if distillation.teacher is None:
        return
    if rule.aggregation == "balanced" and not distillation.top_k:
        raise UserError(
            "algorithm.distillation.top_k is 0, and algorithm.aggregation is balanced, which weighs responses by the "
            "sign of their reward's advantage and leaves out those without: set top_k, or a different aggregation"
        )
    if rule.dynamic_sampling and not distillation.rewards:
        raise UserError(
            "algorithm.distillation.rewards is false, and algorithm.dynamic_sampling is true, which drops groups for "
            "their rewards: set dynamic_sampling=false"
        )


def _check_dual(rule: Algorithm, dual: float | None) -> None:
    if dual is None:
        return
    if rule.surrogate != "clip":
        raise UserError(
            f"algorithm.clip_dual is {dual:g}, and algorithm.surrogate is {rule.surrogate}, which bounds every ratio "
            "by itself: leave clip_dual out, or set surrogate to clip"
        )
    if dual <= 1 + rule.clip_high:
        raise UserError(
            f"algorithm.clip_dual is {dual:g}: it must be above 1 + clip_high = {1 + rule.clip_high:g}; verl's "
            "default is 3, and DAPO's script has 10"
        )


#                        advantage        ratio       surrogate  low    high    aggregation
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm("group_norm", "token", "clip", 0.2, 0.2, "sequence"),
    "dr_grpo": Algorithm("group_center", "token", "clip", 0.2, 0.2, "constant"),
    "dapo": Algorithm("group_norm", "token", "clip", 0.2, 0.28, "token", dynamic_sampling=True),
    "gspo": Algorithm("group_norm", "sequence", "clip", 3e-4, 4e-4, "sequence"),
    "luspo": Algorithm("group_norm", "sequence", "clip", 2e-3, 2.5e-3, "length_weighted"),
    "ba": Algorithm("group_norm", "token", "clip", 0.2, 0.28, "balanced"),
    "rloo": Algorithm("leave_one_out", "token", "clip", 0.2, 0.2, "token"),
    "cispo": Algorithm("group_norm", "token", "cispo", 1.0, 0.28, "token"),
    "sapo": Algorithm("group_norm", "token", "sapo", 0.2, 0.2, "sequence"),
    "vl_norm": Algorithm("group_norm", "token", "clip", 0.2, 0.2, "variance"),
}
