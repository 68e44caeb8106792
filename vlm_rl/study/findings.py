"""What a study says about the explanation of the BA paper, in sentences that its intervals support.

BA (arXiv 2605.04077) says that two quantities govern whether token or sequence aggregation does better:
how much lengths vary inside a group (length/group_cv), because sequence aggregation weighs down the tokens
of long responses, and the gap between the mean lengths of positive and negative responses
(length/sign_gap), because token aggregation lets the longer sign weigh more. Both are measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from vlm_rl.algorithms import Algorithm
from vlm_rl.stats import Estimate, estimate
from vlm_rl.study.results import RunNumbers, StudyResults, difference, is_share, measure_title, stretch_means

_MAX_PAIRS = 2


@dataclass(frozen=True, slots=True)
class Movement:
    """A metric over the first and the last tenth of the steps; one value per seed, its rules averaged."""

    early: Estimate
    late: Estimate
    change: Estimate
    num_runs: int


def movement(results: StudyResults, name: str) -> Movement | None:
    """Return how a metric moved; None if no run has it at both ends."""
    pairs = {}
    for run in results.runs:
        if name in run.curves:
            ends = stretch_means(run.curves[name], results.num_steps)
            if all(map(math.isfinite, ends)):
                pairs.setdefault(run.seed, []).append(ends)
    if not pairs:
        return None
    seeds = [[sum(end) / len(end) for end in zip(*ends, strict=True)] for ends in pairs.values()]
    return Movement(
        early=estimate([early for early, _ in seeds]),
        late=estimate([late for _, late in seeds]),
        change=estimate([late - early for early, late in seeds]),
        num_runs=sum(map(len, pairs.values())),
    )


def findings(results: StudyResults) -> list[str]:
    """Return the sentences; one that says what is missing where the two quantities were not logged."""
    variation, gap = (movement(results, name) for name in ("length/group_cv", "length/sign_gap"))
    if variation is None or gap is None:
        return [
            "The runs have not logged length/group_cv and length/sign_gap, the two quantities that, according to "
            "the BA paper (arXiv 2605.04077), decide between token and sequence aggregation."
        ]
    return [
        _variation_sentence(variation),
        _gap_sentence(gap),
        _account_sentence(gap),
        *_outcome_sentences(results),
    ]


def _variation_sentence(variation: Movement) -> str:
    return (
        f"Inside a group, the coefficient of variation of response length was {variation.early.mean:.3f} over the "
        f"first tenth of the steps and {variation.late.mean:.3f} over the last (mean of {variation.num_runs} "
        f"run{'' if variation.num_runs == 1 else 's'}){_settled(variation.change, lambda v: f'{v:+.3f}')}"
    )


def _gap_sentence(gap: Movement) -> str:
    early, late = (_longer(end.mean) for end in (gap.early, gap.late))
    return (
        f"Responses with a positive advantage were on average {early} than those with a negative one at first and "
        f"{late} at the end{_settled(gap.change, lambda v: f'{v:+.1f} tokens')}"
    )


def _longer(tokens: float) -> str:
    return f"{abs(tokens):.1f} tokens {'longer' if tokens >= 0 else 'shorter'}"


def _settled(change: Estimate, show: Callable[[float], str]) -> str:
    if not change.has_interval:
        return "; with one seed there is no interval, so the numbers hold for that seed only."
    interval = f"95 % interval over {change.num} seeds {show(change.low)} to {show(change.high)}"
    if change.excludes_zero:
        return f": a change of {show(change.mean)} ({interval})."
    return f"; the change of {show(change.mean)} is not settled ({interval})."


def _account_sentence(gap: Movement) -> str:
    account = (
        "According to the BA paper (arXiv 2605.04077), variation speaks against sequence aggregation, which weighs "
        "down the tokens of long responses, and a gap against token aggregation, which lets the longer sign weigh "
        "more"
    )
    late = gap.late
    if late.excludes_zero:
        sign, interval = "positive" if late.mean > 0 else "negative", f"{late.low:+.1f} to {late.high:+.1f} tokens"
        return f"{account}: here, at the end, the {sign} responses (95 % interval of the gap {interval})."
    if late.has_interval:
        interval = f"{late.low:+.1f} to {late.high:+.1f} tokens"
        return f"{account}; which sign that is at the end is not settled here (95 % interval of the gap {interval})."
    return f"{account}; one seed does not settle which sign that is."


def _outcome_sentences(results: StudyResults) -> list[str]:
    """Return one sentence per pair of a token and a sequence rule; pairs that differ in nothing else come first."""
    run_of = {run.rule: run for run in results.runs}
    kind = {rule: run_of[rule].algorithm.aggregation for rule in results.rules if rule in run_of}
    token = [rule for rule in kind if kind[rule] in ("token", "group_token")]
    sequence = [rule for rule in kind if kind[rule] == "sequence"]
    if not (token and sequence):
        return ["The study has no rule of both kinds, so it does not test which of the two does better."]
    measures = [measure for measure in results.measures if is_share(measure)]
    if not measures:
        return ["No accuracy was recorded, so the study does not test which of the two does better."]
    pairs = [(ours, other) for ours in token for other in sequence]
    rest = {rule: _without_aggregation(run_of[rule]) for rule in kind}
    alike = [(ours, other) for ours, other in pairs if rest[ours] == rest[other]]
    more = "" if alike else " (which differ in more than the aggregation)"
    return [
        f"Final {measure_title(measures[0])} of {ours} ({kind[ours]}) minus {other} (sequence){more}: "
        f"{_verdict(difference(results, ours, other, measures[0]))}"
        for ours, other in (alike or pairs)[:_MAX_PAIRS]
    ]


def _without_aggregation(run: RunNumbers) -> tuple[Algorithm, dict[str, Any]]:
    """Return the settings of a rule's runs, without the aggregation and those that the study sets itself."""
    factors = dict.fromkeys(["name", *(factor.name for factor in fields(Algorithm))], True)
    of_study = {"seed": True, "out": True, "model": {"path": True}}
    return replace(run.algorithm, aggregation=""), run.config.model_dump(exclude=of_study | {"algorithm": factors})


def _verdict(change: Estimate) -> str:
    if not change.num:
        return "no seed has both."
    mean = f"{100 * change.mean:+.1f} points"
    if not change.has_interval:
        return f"{mean} with one seed; there is no interval, so nothing follows."
    interval = f"95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f}"
    if change.excludes_zero:
        return f"{mean} ({interval}); the interval excludes 0."
    return (
        f"{mean} ({interval}); it includes 0, so {change.num} seeds do not tell them apart. They would detect "
        f"{100 * change.detectable:.1f} points."
    )
