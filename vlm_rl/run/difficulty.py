"""Accuracy by difficulty: problems sorted by how often they were right when they were first evaluated.

Of the samples of a problem's first evaluation none was right (`never`), some were (`sometimes`), or all (`always`).
HA-DW's difficulty, whether a group's pass rate is below the belief, is not used: it is of the very responses that are
counted, so that accuracy by it would say what it was sorted by.

The first evaluation says nothing by itself, for the same reason. Part of the change to the second is chance: problems
that were right by luck are in `always`, the more of them the fewer samples there are. Compare later evaluations with
the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlm_rl.run.eval_record import cluster_labels
from vlm_rl.run.eval_result import EvalResult

DIFFICULTIES = ("never", "sometimes", "always")


@dataclass(frozen=True, slots=True, eq=False)
class DifficultyScores:
    """The problems of one difficulty in one evaluation."""

    scores_P: np.ndarray  # share of right samples, float64
    clusters: Sequence[str]  # as in EvalRecord, one a problem

    @property
    def accuracy(self) -> float:
        """Return the mean over the problems."""
        return float(self.scores_P.mean())


def by_difficulty(first: EvalResult, now: EvalResult) -> dict[str, DifficultyScores]:
    """Return the scores of an evaluation by difficulty; only those of which there are problems.

    Args:
        first: the set's first evaluation.
        now: a later one of the same set. Problems that the first lacks are left out.

    Raises UserError if a file of records is damaged.
    """
    begun, shares = _shares(first), _shares(now)
    sorted_in: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, (share, cluster) in shares.items():
        if name in begun:
            before = begun[name][0]
            sorted_in["never" if before == 0 else "always" if before == 1 else "sometimes"].append((share, cluster))
    return {
        kind: DifficultyScores(np.array([share for share, _ in found]), [cluster for _, cluster in found])
        for kind in DIFFICULTIES
        if (found := sorted_in[kind])
    }


def _shares(result: EvalResult) -> dict[str, tuple[float, str]]:
    """Return the share of right samples and the cluster of each problem."""
    rows = result.rows(["problem_id", "verdict", "cluster"])
    labels = cluster_labels(rows)
    correct: dict[str, list[bool]] = defaultdict(list)
    cluster: dict[str, str] = {}
    for name, verdict, label in zip(rows["problem_id"].to_pylist(), rows["verdict"].to_pylist(), labels, strict=True):
        correct[name].append(verdict == "correct")
        cluster[name] = label
    return {name: (sum(right) / len(right), cluster[name]) for name, right in correct.items()}
