"""Measure the reasoning of responses: where it first states the right answer, and which moves it makes.

A response is measured once and kept with its evaluation. The grader decides with those of its rules that need no
process, so the work for one response is bounded; for the numbers of a panel it is bounded over all responses too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlm_rl.data.golds import infer_answer_type
from vlm_rl.demo.numbers.problem_table import ProblemTable
from vlm_rl.demo.numbers.responses import Responses
from vlm_rl.grading.first_answer import find_first_answer, reasoning_span
from vlm_rl.grading.grader import GradeTask
from vlm_rl.grading.moves import MOVES, Mark, moves_of, repeated_share
from vlm_rl.stats import Estimate, estimate, score_interval
from vlm_rl.templates import TEMPLATES

MAX_TEXT = 60_000  # characters of a response; a longer one is not measured
# For the numbers of one panel, where nothing was measured before: together two to three seconds of a core.
MAX_CHARACTERS = 1_000_000  # of responses
MAX_COMPARED = 3_000  # values that the grader compares
MIN_PROBLEMS = 10  # of an interval: over fewer, it says more about its method than about the checkpoint


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What was found in one response; the marks' places are characters from the beginning of its reasoning."""

    marks: tuple[Mark, ...] = ()
    share_after: float | None = None  # the overthinking share; None if the right answer is not stated
    stated_at: float | None = None  # where that statement ends, as a share of the response's characters
    compared: int = 0  # values that the grader looked at
    repeated: float = 0.0  # share of the words
    characters: int = 0  # of the response

    def count(self, kind: str) -> int:
        """Return the number of marks of a kind."""
        return sum(mark.kind == kind for mark in self.marks)

    def amount(self, kind: str) -> float:
        """Return the share of repeated words for repetition, the number of marks for any other kind."""
        return self.repeated if kind == "repetition" else self.count(kind)


def measure(response: str, gold: str, question: str = "") -> Reasoning:
    """Find the moves and the first answer in a response. Without a gold only the moves are found."""
    if len(response) > MAX_TEXT:
        return Reasoning(characters=len(response))
    start, end = reasoning_span(response)
    text = response[start:end]
    marks = moves_of(text)
    repeated = repeated_share(text, marks)
    if not gold:
        return Reasoning(tuple(marks), repeated=repeated, characters=len(response))
    task = GradeTask(response, gold, infer_answer_type(gold), TEMPLATES["plain"], question=question)
    first, compared = find_first_answer(task)
    if first is None:
        return Reasoning(tuple(marks), compared=compared, repeated=repeated, characters=len(response))
    marks.append(Mark(first.start - start, first.end - start, "first"))
    return Reasoning(tuple(marks), first.share_after, first.end / len(response), compared, repeated, len(response))


def reasoning_at(responses: Responses, row: int) -> Reasoning:
    """Find the moves and the first answer in the response of a row of its records."""
    if row not in responses.reasoning_cache:
        texts = [responses.texts[name][row].as_py() or "" for name in ("response", "gold", "question")]
        responses.reasoning_cache[row] = measure(*texts)
    return responses.reasoning_cache[row]


@dataclass(frozen=True, slots=True, eq=False)
class ReasoningSummary:
    """One checkpoint on the measured problems. A value per problem is the mean over its responses."""

    shares: np.ndarray  # the overthinking share of each correct response that states the answer, in [0, 1]
    num_correct: int  # correct responses
    num_wrong: int
    num_left: int  # wrong responses that had stated the right answer
    mean_share: float  # over problems
    share_interval: tuple[float, float]  # 95 %, over problems, or their clusters; NaN over fewer than MIN_PROBLEMS
    moves: dict[str, Estimate]  # per response: reflection and backtracking as counts, repetition as a share of words;
    # no interval over fewer than MIN_PROBLEMS

    @property
    def has_share_interval(self) -> bool:
        """Tell whether enough problems have a share."""
        return not math.isnan(self.share_interval[0])


def measured_problems(table: ProblemTable, keep_P: np.ndarray, *, effort: float = 1.0) -> np.ndarray:
    """Return the kept problems that are measured, as indices into the table's, and measure them.

    They come in an order of their ids' checksums, which does not follow the data set's, and end where `effort` times
    MAX_CHARACTERS or MAX_COMPARED is reached: the same view always measures the same problems.
    """
    kept = sorted(np.flatnonzero(keep_P).tolist(), key=lambda p: zlib.crc32(table.ids[p].encode()))
    characters = compared = 0
    chosen: list[int] = []
    for p in kept:
        if compared >= effort * MAX_COMPARED or characters >= effort * MAX_CHARACTERS:
            break
        chosen.append(p)
        for checkpoint in table.checkpoints:
            for row in checkpoint.responses.row_of[table.ids[p]]:
                reasoning = reasoning_at(checkpoint.responses, row)
                compared += reasoning.compared
                characters += reasoning.characters
    return np.array(chosen, dtype=np.int64)


def reasoning_summaries(table: ProblemTable, problems: Sequence[int] | np.ndarray) -> list[ReasoningSummary]:
    """Return one summary per checkpoint of the table over the given problems."""
    clusters = {table.ids[p]: int(table.cluster_P[p]) for p in problems}
    return [_summary(checkpoint.responses, clusters) for checkpoint in table.checkpoints]


def _summary(responses: Responses, clusters: Mapping[str, int]) -> ReasoningSummary:
    """Return the summary of these problems; `clusters` says which of them belong together."""
    shares: list[float] = []
    by_problem: dict[str, float] = {}
    moves: dict[str, list[float]] = {kind: [] for kind in MOVES}
    num_correct = num_wrong = num_left = 0
    for name in clusters:
        measured = [(reasoning_at(responses, row), bool(responses.correct_R[row])) for row in responses.row_of[name]]
        right = [reasoning.share_after for reasoning, is_right in measured if is_right]
        wrong = [reasoning.share_after for reasoning, is_right in measured if not is_right]
        stated = [share for share in right if share is not None]
        if stated:
            shares += stated
            by_problem[name] = float(np.mean(stated))
        num_correct += len(right)
        num_wrong += len(wrong)
        num_left += sum(share is not None for share in wrong)
        for kind, values in moves.items():
            values.append(float(np.mean([reasoning.amount(kind) for reasoning, _ in measured])))
    stating = np.array([clusters[name] for name in by_problem])
    return ReasoningSummary(
        shares=np.array(shares),
        num_correct=num_correct,
        num_wrong=num_wrong,
        num_left=num_left,
        mean_share=float(np.mean([*by_problem.values()])) if by_problem else math.nan,
        share_interval=score_interval(np.array([*by_problem.values()]), stating)
        if len(set(stating)) >= MIN_PROBLEMS
        else (math.nan, math.nan),
        moves={
            kind: _mean(values, [*clusters.values()], bounds=(0, 1 if kind == "repetition" else math.inf))
            for kind, values in moves.items()
        },
    )


def _mean(values: Sequence[float], clusters: Sequence[int], *, bounds: tuple[float, float]) -> Estimate:
    mean = estimate(values, clusters=np.array(clusters), bounds=bounds)
    return mean if len(set(clusters)) >= MIN_PROBLEMS else replace(mean, low=math.nan, high=math.nan)
