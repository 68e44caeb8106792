"""Count a visitor's regular expression in the responses of each checkpoint.

An expression may take exponential time, (a+)+$ for instance. So it runs in a process with limits, over at most
MAX_CHARACTERS of responses, and one that went past a limit is not tried again.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from vlm_rl.demo.numbers.problem_table import ProblemTable
from vlm_rl.sandbox.limited import FaultError, LimitedWorker, LimitError
from vlm_rl.stats import Estimate, estimate

MAX_CHARACTERS = 4_000_000
_MAX_REFUSED = 200  # expressions that are remembered
_worker = LimitedWorker("vlm_rl.demo.numbers.pattern_worker.count", cpu_seconds=2.0, memory=256 << 20)
_refused: OrderedDict[str, str] = OrderedDict()  # an expression that went past a limit -> the sentence about it


@dataclass(frozen=True, slots=True)
class PatternUse:
    """How one checkpoint uses the expression; shares and means are over problems."""

    share: float  # of the responses that match
    per_response: float  # matches
    change: Estimate  # of the share against the baseline's, paired by problem


@dataclass(frozen=True, slots=True)
class PatternCount:
    """What was counted, or why not."""

    uses: tuple[PatternUse, ...] = ()  # one per checkpoint of the table
    num_problems: int = 0  # those that were looked at
    fault: str = ""


def count_pattern(table: ProblemTable, keep_P: np.ndarray, pattern: str) -> PatternCount:
    """Count a regular expression of Python in the responses to the kept problems, in the order of ids' checksums."""
    if pattern in _refused:
        return PatternCount(fault=_refused[pattern])
    problems, rows_C, texts = _chosen(table, keep_P)
    if not problems:
        return PatternCount(fault="There is no problem to count in.")
    try:
        counts = _worker.call(pattern, texts)
    except LimitError as error:
        if len(_refused) >= _MAX_REFUSED:
            _refused.popitem(last=False)
        _refused[pattern] = f"The expression {error}: it was stopped. Write it without nested repetitions."
        return PatternCount(fault=_refused[pattern])
    except (FaultError, OSError) as error:
        return PatternCount(fault=f"The expression could not be counted ({str(error)[:120]}).")
    if isinstance(counts, str):
        return PatternCount(fault=f"This is no regular expression of Python: {counts[:160]}.")
    return PatternCount(_uses(table, problems, rows_C, np.array(counts)), len(problems))


def _chosen(table: ProblemTable, keep_P: np.ndarray) -> tuple[list[int], list[list[int]], list[str]]:
    """Return the problems that are looked at, for each checkpoint the problem of each of its texts, and the texts."""
    kept = sorted(np.flatnonzero(keep_P).tolist(), key=lambda p: zlib.crc32(table.ids[p].encode()))
    texts_C: list[list[str]] = [[] for _ in table.checkpoints]
    places_C: list[list[int]] = [[] for _ in table.checkpoints]
    problems: list[int] = []
    size = 0
    columns = [checkpoint.responses.texts["response"] for checkpoint in table.checkpoints]
    for p in kept:
        if size >= MAX_CHARACTERS:
            break
        for checkpoint, column, texts, places in zip(table.checkpoints, columns, texts_C, places_C, strict=True):
            of_problem = [column[row].as_py() or "" for row in checkpoint.responses.row_of[table.ids[p]]]
            texts += of_problem
            places += [len(problems)] * len(of_problem)
            size += sum(map(len, of_problem))
        problems.append(p)
    return problems, places_C, [text for texts in texts_C for text in texts]


def _uses(
    table: ProblemTable, problems: list[int], places_C: list[list[int]], counts: np.ndarray
) -> tuple[PatternUse, ...]:
    shares: list[np.ndarray] = []
    uses: list[PatternUse] = []
    start = 0
    for places in places_C:
        count_R = counts[start : start + len(places)]
        start += len(places)
        num_P = np.bincount(places, minlength=len(problems))
        shares.append(np.bincount(places, weights=count_R > 0, minlength=len(problems)) / num_P)
        mean_P = np.bincount(places, weights=count_R, minlength=len(problems)) / num_P
        change = estimate(shares[-1] - shares[0], clusters=table.cluster_P[problems], bounds=(-1, 1))
        uses.append(PatternUse(float(shares[-1].mean()), float(mean_P.mean()) if len(mean_P) else math.nan, change))
    return tuple(uses)
