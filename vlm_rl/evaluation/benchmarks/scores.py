"""Scores that benchmarks share: pure functions of judged responses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, JudgedResponse
from vlm_rl.stats import score_interval


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate that one of k samples is right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021)."""
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def with_interval(scores: Iterable[float], clusters: Sequence[str] | None = None) -> dict[str, Any]:
    """Return {score, n, interval}: the mean of scores in [0, 1] with its 95 % interval; None for none.

    The scores are independent, except for those of one cluster.
    """
    scores_P = np.array(list(scores), dtype=np.float64)
    if not len(scores_P):
        return {"score": None, "n": 0, "interval": None}
    return {
        "score": float(scores_P.mean()),
        "n": len(scores_P),
        "interval": list(score_interval(scores_P, clusters)),
    }


def by_problem(judged: Sequence[JudgedResponse]) -> dict[str, list[JudgedResponse]]:
    """Return a problem's id -> its samples."""
    samples: dict[str, list[JudgedResponse]] = defaultdict(list)
    for item in judged:
        samples[item.problem.id].append(item)
    return dict(samples)


def accuracy_by_problem(judged: Sequence[JudgedResponse]) -> dict[str, float]:
    """Return avg@k of each problem: the share of its samples that are right."""
    return {
        name: sum(item.correct for item in samples) / len(samples) for name, samples in by_problem(judged).items()
    }


def clusters_of(judged: Sequence[JudgedResponse]) -> list[str]:
    """Return each problem's cluster, or its id where it is on its own, in the order of `by_problem`."""
    return [samples[0].cluster or name for name, samples in by_problem(judged).items()]


def accuracy_and_pass(judged: Sequence[JudgedResponse]) -> dict[str, Any]:
    """Return the accuracy and, where every problem has several samples, pass@1, 2, 4, ... and k."""
    clusters = clusters_of(judged)
    scores: dict[str, Any] = {"accuracy": with_interval(accuracy_by_problem(judged).values(), clusters)}
    groups = by_problem(judged)
    k = min(map(len, groups.values()), default=0)
    if k > 1:
        counts = [(len(samples), sum(item.correct for item in samples)) for samples in groups.values()]
        for size in sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k}):
            scores[f"pass@{size}"] = with_interval((pass_at_k(n, right, size) for n, right in counts), clusters)
    return scores


def facet_tables(benchmark: Benchmark, judged: Sequence[JudgedResponse]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return facet -> value -> {score, n, interval}; a problem with several values (skills) counts in each."""
    accuracy = accuracy_by_problem(judged)
    problems = {item.problem.id: item.problem for item in judged}
    tables: dict[str, dict[str, list[tuple[float, str]]]] = defaultdict(lambda: defaultdict(list))
    for (name, problem), cluster in zip(problems.items(), clusters_of(judged), strict=True):
        for facet, values in benchmark.facet_values(problem).items():
            for value in filter(None, values):
                tables[facet][value].append((accuracy[name], cluster))
    return {
        facet: {
            value: with_interval([score for score, _ in cells], [cluster for _, cluster in cells])
            for value, cells in sorted(table.items())
        }
        for facet, table in tables.items()
    }


def health(judged: Sequence[JudgedResponse]) -> dict[str, Any]:
    """Return counts, shares (None: unknown) and failed gradings, which tell whether to believe a score."""
    stops = [item.response.stop_reason for item in judged if item.response.stop_reason is not None]
    verdicts = [item.judgement.verdict for item in judged]
    samples = [len(group) for group in by_problem(judged).values()]
    return {
        "n": len(samples),
        "num_responses": len(judged),
        "k": max(samples, default=0),
        "k_min": min(samples, default=0),
        "box_share": sum(item.has_box for item in judged) / len(judged) if judged else None,
        "truncated_share": sum(stop == "length" for stop in stops) / len(stops) if stops else None,
        "empty_share": sum(not item.response.text.strip() for item in judged) / len(judged) if judged else None,
        "no_answer": verdicts.count("no_answer"),
        "timeouts": verdicts.count("timeout"),
        "errors": verdicts.count("error"),
        "published_verdicts": sum(item.judgement.note == "published verdict" for item in judged),
        "free_points": sum(item.judgement.note == "free point" for item in judged),
    }
