"""The scores of an evaluation: plain JSON for its summary, and one line for people. Loads no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, JudgedResponse, Judgement, Response
from vlm_rl.evaluation.benchmarks.judging import benchmark_scores
from vlm_rl.run.eval_record import EvalRecord
from vlm_rl.stats import score_interval
from vlm_rl.types import Problem


def scores_of_benchmark(
    benchmark: Benchmark | None, problems: Sequence[Problem], records: Sequence[EvalRecord]
) -> dict[str, Any]:
    """Return the benchmark's report of these verdicts; {} for other sets."""
    if benchmark is None:
        return {}
    problem_of = {problem.id: problem for problem in problems}
    judged = [
        JudgedResponse(
            problem_of[record.problem_id],
            Response(record.problem_id, record.response, record.sample_index),
            Judgement(record.verdict, record.extracted, record.reason),
            has_box=record.has_box,
            cluster=record.cluster,
        )
        for record in records
    ]
    return benchmark_scores(benchmark, judged)


def summarise(records: Sequence[EvalRecord]) -> dict[str, Any]:
    """Return the scores of an evaluation as plain JSON; a mean over nothing is None.

    accuracy            avg@k: the mean over problems of the share of right samples
    interval            its 95 % interval over problems, or their clusters (stats.score_interval)
    *_share             of the responses
    timeouts, errors    responses that the grader could not judge; they count as wrong
    *_length            tokens, the end-of-sequence token included
    """
    right: dict[str, list[bool]] = defaultdict(list)
    clusters: dict[str, str] = {}
    for record in records:
        right[record.problem_id].append(record.correct)
        clusters[record.problem_id] = record.cluster or record.problem_id
    score_P = np.array([np.mean(samples) for samples in right.values()])
    correct = np.array([record.correct for record in records], dtype=bool)
    length = np.array([record.length for record in records], dtype=np.float64)
    return {
        "num_problems": len(right),
        "num_responses": len(records),
        "k": max(map(len, right.values()), default=0),
        "accuracy": _mean(score_P),
        "interval": list(score_interval(score_P, [*clusters.values()])) if len(score_P) else None,
        "box_share": _mean([record.has_box for record in records]),
        "truncated_share": _mean([record.stop_reason == "length" for record in records]),
        "timeouts": sum(record.verdict == "timeout" for record in records),
        "errors": sum(record.verdict == "error" for record in records),
        "mean_length": _mean(length),
        "median_length": _quantile(length, 0.5),
        "p90_length": _quantile(length, 0.9),
        "mean_length_correct": _mean(length[correct]),
        "mean_length_wrong": _mean(length[~correct]),
    }


def score_line(name: str, summary: Mapping[str, Any]) -> str:
    """Return one set's result as a line: the benchmark's own number first, then what it takes to believe it."""
    k = f" avg@{summary['k']}" if summary["k"] > 1 else ""
    headline = summary.get("headline", "accuracy")
    own = summary["scores"][headline] if headline != "accuracy" else None
    return (
        f"{name}: "
        + (f"{headline} {_with_ends(own['score'], own['interval'])} of {own['n']}, " if own and own["n"] else "")
        + f"accuracy{k} {_with_ends(summary['accuracy'], summary['interval'])}, n {summary['num_problems']}, "
        f"box {summary['box_share']:.2f}, truncated {summary['truncated_share']:.2f}, "
        f"timeouts {summary['timeouts']}, errors {summary['errors']}, mean length {summary['mean_length']:.1f}"
    )


def _with_ends(score: float, interval: Sequence[float]) -> str:
    return f"{score:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _mean(values: Sequence[Any] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _quantile(values: np.ndarray, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None
