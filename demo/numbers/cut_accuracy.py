"""Compute how often checkpoints would be right if every response were cut at T tokens: does extra length pay?

A response that ends within T tokens keeps its verdict. A longer one counts as right if it has stated the right answer
by then (vlm_rl/grading/first_answer.py), as if the model answered with that. So the curve of a checkpoint ends at
its accuracy. The place of a statement in tokens is taken from its place in characters; of an episode the last turn is
read, which begins after the tokens of the earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlm_rl.demo.numbers.problem_table import ProblemTable
from vlm_rl.demo.numbers.reasoning import reasoning_at
from vlm_rl.stats import Estimate, estimate

_LIMITS = 80  # of a curve


@dataclass(frozen=True, slots=True, eq=False)
class CutResponses:
    """One checkpoint's responses to some problems."""

    problem_R: np.ndarray  # index into these problems
    length_R: np.ndarray  # tokens
    stated_R: np.ndarray  # tokens until the right answer is first stated; infinite where it never is
    correct_R: np.ndarray
    num_problems: int

    def score_P(self, limit: float) -> np.ndarray:
        """Return each problem's share of responses that are right within `limit` tokens."""
        right = np.where(self.length_R <= limit, self.correct_R, self.stated_R <= limit)
        count = np.bincount(self.problem_R, minlength=self.num_problems)
        return np.bincount(self.problem_R, weights=right, minlength=self.num_problems) / count


def cut_responses(table: ProblemTable, index: int, problems: Sequence[int] | np.ndarray) -> CutResponses:
    """Return checkpoint `index`'s responses to problems of the table; reasoning is measured where it was not yet."""
    responses = table.checkpoints[index].responses
    rows = [(place, row) for place, p in enumerate(problems) for row in responses.row_of[table.ids[p]]]
    chosen = np.array([row for _, row in rows], dtype=np.int64)
    length_R, earlier_R = responses.length_R[chosen], responses.earlier_R[chosen]
    shares = [reasoning_at(responses, row).stated_at for _, row in rows]
    stated = [
        math.inf if share is None else before + share * (length - before)
        for share, before, length in zip(shares, earlier_R.tolist(), length_R.tolist(), strict=True)
    ]
    return CutResponses(
        problem_R=np.array([place for place, _ in rows], dtype=np.int64),
        length_R=length_R,
        stated_R=np.array(stated),
        correct_R=responses.correct_R[chosen],
        num_problems=len(problems),
    )


def cut_limits(lengths: Sequence[np.ndarray]) -> np.ndarray:
    """Return the limits of a curve, whole tokens from 0 to a little beyond the longest response."""
    longest = max((int(length_R.max()) for length_R in lengths if len(length_R)), default=0)
    return np.unique([*np.linspace(0, longest, _LIMITS).round(), math.ceil(1.03 * longest)])


@dataclass(frozen=True, slots=True)
class GainOfLength:
    """Two checkpoints, cut at the mean length of the shorter one, and what that costs the longer one."""

    longer: int  # indices into the table's checkpoints
    shorter: int
    limit: float  # tokens
    cut: tuple[float, float]  # accuracies within the limit, of the longer and of the shorter one
    whole: tuple[float, float]
    gain: Estimate  # the longer one's score uncut minus its score cut, paired by problem


def gain_of_length(table: ProblemTable, problems: np.ndarray, index: int, against: int) -> GainOfLength | None:
    """Return the accuracy that extra length brings the longer of two checkpoints; None without problems."""
    if not len(problems):
        return None
    means = {place: float(table.length_CP[place, problems].mean()) for place in (against, index)}
    shorter, longer = sorted(means, key=lambda place: means[place])
    limit = means[shorter]
    both = [cut_responses(table, place, problems) for place in (longer, shorter)]
    cut, whole = ([responses.score_P(at) for responses in both] for at in (limit, math.inf))
    gain = estimate(whole[0] - cut[0], clusters=table.cluster_P[problems], bounds=(-1, 1))
    return GainOfLength(
        longer,
        shorter,
        limit,
        cut=(float(cut[0].mean()), float(cut[1].mean())),
        whole=(float(whole[0].mean()), float(whole[1].mean())),
        gain=gain,
    )
