"""Compare two evaluations of the same problems, problem by problem.

The difference of two scores on one set is known far better than either score. The problems are the same, so the
interval is that of the differences per problem. Problems that were made from one are not independent: there interval
and test are over whole clusters (vlm_rl.stats).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlm_rl.stats import cluster_sums, estimate, sign_test


@dataclass(frozen=True, slots=True)
class ProblemScore:
    """The result of one evaluation on one problem."""

    score: float  # share of its samples that are right
    length: float | None  # mean tokens of a response; None if the file does not say
    category: str
    cluster: str | None = None  # as in EvalRecord


@dataclass(frozen=True, slots=True)
class Paired:
    """The change from A to B over the problems that both have; scores in [0, 1]."""

    n: int
    score_a: float
    score_b: float
    difference: float
    interval: tuple[float, float]  # 95 %, over problems, or their clusters (stats.estimate)
    won: int  # problems on which B is better
    lost: int
    p_value: float  # exact two-sided sign test on won against lost: of problems, or of clusters by their sums
    length_a: float | None  # mean tokens of a response, over the problems of which both are known
    length_b: float | None
    length_interval: tuple[float, float] | None  # 95 %, of B's minus A's; None without two that differ
    only_a: int  # problems that the other does not have: not compared
    only_b: int
    num_clusters: int  # what interval and test count: n where every problem is on its own


def pair(a: Mapping[str, ProblemScore], b: Mapping[str, ProblemScore]) -> Paired | None:
    """Compare A and B over the problems that both have; None if there is no such problem."""
    both = [name for name in a if name in b]
    if not both:
        return None
    score_a = np.array([a[name].score for name in both])
    score_b = np.array([b[name].score for name in both])
    difference_P = score_b - score_a
    clusters = np.array([a[name].cluster or b[name].cluster or name for name in both])
    change = estimate(difference_P, clusters=clusters, bounds=(-1, 1))
    sum_C = cluster_sums(difference_P, clusters)[0].round(9)  # thirds that cancel
    lengths = [(a[name].length, b[name].length) for name in both]
    known = np.array([None not in two for two in lengths])
    length_P2 = np.array([two for two in lengths if None not in two], dtype=np.float64).reshape(-1, 2)
    longer = estimate(length_P2[:, 1] - length_P2[:, 0], clusters=clusters[known])
    return Paired(
        n=len(both),
        score_a=float(score_a.mean()),
        score_b=float(score_b.mean()),
        difference=float(difference_P.mean()),
        interval=(change.low, change.high) if change.has_interval else (-1.0, 1.0),  # one problem settles nothing
        won=int((difference_P > 0).sum()),
        lost=int((difference_P < 0).sum()),
        p_value=sign_test(int((sum_C > 0).sum()), int((sum_C < 0).sum())),
        length_a=float(length_P2[:, 0].mean()) if len(length_P2) else None,
        length_b=float(length_P2[:, 1].mean()) if len(length_P2) else None,
        length_interval=(longer.low, longer.high) if longer.high - longer.low > 1e-9 else None,
        only_a=len(a) - len(both),
        only_b=len(b) - len(both),
        num_clusters=len(sum_C),
    )


def by_category(a: Mapping[str, ProblemScore], b: Mapping[str, ProblemScore]) -> dict[str, Paired]:
    """Compare A and B within each of A's categories."""
    members: dict[str, list[str]] = defaultdict(list)
    for name, problem in a.items():
        if name in b:
            members[problem.category].append(name)
    changes = {}
    for category, names in sorted(members.items()):
        change = pair({name: a[name] for name in names}, {name: b[name] for name in names})
        assert change is not None, "a category has at least one problem"
        changes[category] = change
    return changes


def problem_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, ProblemScore]:
    """Return problem -> its score, from records with id or problem_id, verdict, length, category and cluster."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[str(row["problem_id"] if "problem_id" in row else row["id"])].append(row)
    scores = {}
    for name, samples in groups.items():
        lengths = [row["length"] for row in samples if row.get("length") is not None]
        scores[name] = ProblemScore(
            score=sum(row["verdict"] == "correct" for row in samples) / len(samples),
            length=sum(lengths) / len(lengths) if lengths else None,
            category=str(samples[0].get("category") or ""),
            cluster=None if (cluster := samples[0].get("cluster")) is None else str(cluster),
        )
    return scores
