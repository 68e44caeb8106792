"""Scores as the benchmarks define them: pure functions of judged rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vlm_rl.evaluation.benchmarks import dynamath, wemath
from vlm_rl.evaluation.benchmarks.items import Question, Row
from vlm_rl.stats import score_interval


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The unbiased estimate that one of k draws is right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021)."""
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def with_interval(scores: Iterable[float], *, seed: int = 0) -> dict[str, Any]:
    """{score, n, interval}: the mean of independent scores in [0, 1] with its 95 % interval; None over nothing."""
    scores_P = np.array(list(scores), dtype=np.float64)
    if not len(scores_P):
        return {"score": None, "n": 0, "interval": None}
    return {
        "score": float(scores_P.mean()),
        "n": len(scores_P),
        "interval": list(score_interval(scores_P, seed=seed)),
    }


def by_question(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """A question's id -> its samples."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.question.id].append(row)
    return dict(found)


def accuracies(rows: Sequence[Row]) -> dict[str, float]:
    """avg@k of each question: the share of its samples that are right."""
    return {name: sum(row.right for row in samples) / len(samples) for name, samples in by_question(rows).items()}


def facet_tables(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """facet -> value -> {score, n, interval}; a question with several values (skills) counts in each."""
    scores = accuracies(rows)
    questions = {row.question.id: row.question for row in rows}
    tables: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, question in questions.items():
        for facet, values in question.facets.items():
            for value in values:
                tables[facet][value].append(scores[name])
    return {
        facet: {value: with_interval(found) for value, found in sorted(table.items())}
        for facet, table in tables.items()
    }


def health(rows: Sequence[Row]) -> dict[str, Any]:
    """What it takes to believe a score: counts, box coverage, truncated share (None: unknown), failed gradings."""
    stops = [row.answer.stop_reason for row in rows if row.answer.stop_reason is not None]
    verdicts = [row.judgement.verdict for row in rows]
    samples = [len(found) for found in by_question(rows).values()]
    return {
        "n": len(samples),
        "num_responses": len(rows),
        "k": max(samples, default=0),
        "k_min": min(samples, default=0),
        "box_share": sum(row.has_box for row in rows) / len(rows) if rows else None,
        "truncated_share": sum(stop == "length" for stop in stops) / len(stops) if stops else None,
        "empty_share": sum(not row.answer.text.strip() for row in rows) / len(rows) if rows else None,
        "no_answer": verdicts.count("no_answer"),
        "timeouts": verdicts.count("timeout"),
        "errors": verdicts.count("error"),
        "published_verdicts": sum(row.judgement.note == "published verdict" for row in rows),
        "free_points": sum(row.judgement.note == "free point" for row in rows),
    }


def _plain(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {"accuracy": with_interval(accuracies(rows).values())}
    groups = by_question(rows)
    k = min(map(len, groups.values()), default=0)
    if k > 1:
        rights = [(len(group), sum(row.right for row in group)) for group in groups.values()]
        for size in sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k}):
            found[f"pass@{size}"] = with_interval(pass_at_k(n, c, size) for n, c in rights)
    return found


def _wemath(rows: Sequence[Row]) -> dict[str, Any]:
    rights = _first_samples(rows)
    found: dict[str, Any] = {}
    for how in ("strict", "loose"):
        cases = wemath.four_cases(rights, loose=how == "loose")
        found[f"score_{how}"] = with_interval(wemath.score_of(cases).values())
        found[f"rates_{how}"] = wemath.rates(cases)
        found[f"cases_{how}"] = {case: list(cases.values()).count(case) for case in ("IK", "IG", "CM", "RM")}
    problems = {question.problem for question, _ in rights}
    steps: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for question, right in rights:
        steps[int(question.problem[:1] or 1) if question.part == "multi" else 1].append(float(right))
    found |= {f"S{number}": with_interval(scores) for number, scores in steps.items()}
    return found | {"incomplete_problems": len(problems) - len(cases), **_plain(rows)}


def _dynamath(rows: Sequence[Row]) -> dict[str, Any]:
    average = with_interval(accuracies(rows).values())
    found: dict[str, Any] = {"average": average, "worst_case": with_interval(_worst_cases(rows).values())}
    variants: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        variants[row.question.problem].add(row.question.part)
    found["num_variants"] = sorted({len(parts) for parts in variants.values()})
    share = found["worst_case"]["score"]
    found["reasoning_robustness"] = share / average["score"] if average["score"] else None
    return found


def _worst_cases(rows: Sequence[Row]) -> dict[str, float]:
    """Seed -> 1 if every sample of each of its variants is right."""
    scores = accuracies(rows)
    questions = {row.question.id: row.question for row in rows}
    return dynamath.worst_case((question, float(scores[name] == 1)) for name, question in questions.items())


def _first_samples(rows: Sequence[Row]) -> list[tuple[Question, bool]]:
    return [(samples[0].question, samples[0].right) for samples in by_question(rows).values()]


_METRICS: Mapping[str, Callable[[Sequence[Row]], dict[str, Any]]] = {"wemath": _wemath, "dynamath": _dynamath}


def scores(benchmark: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Every score that the benchmark reports, by name."""
    return _METRICS.get(benchmark, _plain)(rows)


def headline_parts(benchmark: str, rows: Sequence[Row]) -> dict[str, float]:
    """What the headline is the mean of, where that is not the questions: We-Math's problems, DynaMath's seeds."""
    if benchmark == "wemath":
        return wemath.score_of(wemath.four_cases(_first_samples(rows), loose=False))
    return _worst_cases(rows) if benchmark == "dynamath" else {}
