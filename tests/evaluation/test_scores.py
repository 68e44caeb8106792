"""Scores as benchmarks define them, against hand arithmetic."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.evaluation.benchmarks import dynamath, wemath
from vlm_rl.evaluation.benchmarks.benchmark import JudgedResponse, Judgement, Response
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.evaluation.benchmarks.scores import accuracy_and_pass, facet_tables, health, pass_at_k, with_interval
from vlm_rl.stats import score_interval
from vlm_rl.types import Problem, Verdict


def judged(
    name: str, correct: bool, *, sample: int = 0, category: str = "", cluster: str | None = None, **meta: object
) -> JudgedResponse:
    problem = Problem(name, "?", (), "1", "integer", category=category, meta=meta)
    judgement = Judgement("correct" if correct else "wrong", "1", "")
    return JudgedResponse(problem, Response(name, "", sample), judgement, has_box=True, cluster=cluster)


# -- We-Math --------------------------------------------------------------------------------------------


def test_wemath_score_by_hand() -> None:
    """CM, strict RM (loose CM), IG, IK and one problem without its second step: four count."""
    table = {"2steps_1": "111", "2steps_2": "101", "2steps_3": "110", "3steps_4": "0110"}
    rows = [
        judged(f"{problem}-{part}", verdict == "1", problem=problem, key=f"{problem[:6]}_{part}")
        for problem, verdicts in table.items()
        for part, verdict in zip([*map(str, range(1, len(verdicts))), "multi"], verdicts, strict=True)
    ]
    rows += [judged(f"9-{part}", True, problem="2steps_9", key=f"2steps_{part}") for part in ("1", "multi")]
    scores = wemath.scores(rows)
    assert scores["score_strict"]["score"] == (1 + 0 + 0.5 + 0) / 4
    assert scores["score_loose"]["score"] == (1 + 1 + 0.5 + 0) / 4
    assert scores["rates_strict"] == {"IK": 0.25, "IG": 0.25, "CM": 0.25, "RM": 0.5}
    assert scores["rates_loose"]["RM"] == 0
    assert scores["incomplete_problems"] == 1
    parts = {"2steps_1": 1.0, "2steps_2": 0.0, "2steps_3": 0.5, "3steps_4": 0.0}
    assert wemath.headline_parts(rows) == parts
    # S1: all ten steps, those of the incomplete problem too; S2 and S3: the wholes of two and of three steps
    assert [scores[name]["score"] for name in ("S1", "S2", "S3")] == [8 / 10, 3 / 4, 0]
    # (n - IG/2 - RM - IK) / n, as published
    cases = scores["cases_strict"]
    assert scores["score_strict"]["score"] == (4 - 0.5 * cases["IG"] - cases["RM"] - cases["IK"]) / 4


def test_the_steps_of_a_problem_are_one_cluster() -> None:
    """Steps 11, 10 and 100, wholes 1, 0 and 0: S1 counts three problems of 2, 2 and 3 steps, S2 two wholes."""
    table = {"2steps_1": "111", "2steps_2": "100", "3steps_3": "1000"}
    rows = [
        judged(f"{problem}-{part}", verdict == "1", cluster=problem, problem=problem, key=f"{problem[:6]}_{part}")
        for problem, verdicts in table.items()
        for part, verdict in zip([*map(str, range(1, len(verdicts))), "multi"], verdicts, strict=True)
    ]
    names = {BENCHMARKS["wemath"].cluster_of(row.problem) for row in rows}
    assert names == {f"problem {problem}" for problem in table}
    scores = wemath.scores(rows)
    steps, labels = [1, 1, 1, 0, 1, 0, 0], list("aabbccc")
    assert (
        scores["S1"]["interval"]
        == list(score_interval(np.array(steps), labels))
        != list(score_interval(np.array(steps)))
    )
    assert scores["S2"]["interval"] == list(score_interval(np.array([1, 0])))
    everything = score_interval(np.array([1, 1, 1, 1, 0, 0, 1, 0, 0, 0]), list("aaabbbcccc"))
    assert scores["accuracy"]["interval"] == list(everything)


# -- DynaMath -------------------------------------------------------------------------------------------


def test_dynamath_worst_case_by_hand() -> None:
    """Seed 1: all right; seed 2: one of two right. Average 3/4, worst case 1/2, robustness 2/3."""
    table = [("1", 1, True), ("1", 2, True), ("2", 1, True), ("2", 2, False)]
    rows = [judged(f"{seed}-v{variant}", right, seed=seed, variant=variant) for seed, variant, right in table]
    scores = dynamath.scores(rows)
    assert scores["average"]["score"] == 0.75 and scores["worst_case"]["score"] == 0.5
    assert scores["reasoning_robustness"] == pytest.approx(2 / 3) and scores["num_variants"] == [2]
    assert dynamath.worst_cases(rows) == {"1": 1.0, "2": 0.0}
    # With several samples a variant counts for the worst case only if all of them are right.
    rows += [judged("1-v2", False, seed="1", variant=2, sample=1)]
    assert dynamath.scores(rows)["worst_case"]["score"] == 0


# -- metrics ----------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.data())
def test_pass_at_k_counts_the_draws(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([i < right for i in range(n)], k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_avg_and_pass_at_k_by_hand() -> None:
    """Four samples each; 2 and 0 right: avg@4 = 1/4, pass@2 = (1 - 1/6)/2 = 5/12, pass@4 = 1/2."""
    rows = [judged("a", i < 2, sample=i) for i in range(4)] + [judged("b", False, sample=i) for i in range(4)]
    scores = accuracy_and_pass(rows)
    assert scores["accuracy"]["score"] == 0.25 and scores["accuracy"]["n"] == 2
    assert scores["pass@1"]["score"] == 0.25
    assert scores["pass@2"]["score"] == pytest.approx(5 / 12) and scores["pass@4"]["score"] == 0.5
    three = accuracy_and_pass([row for row in rows if row.response.sample < 3])
    assert [name for name in three if name.startswith("pass")] == ["pass@1", "pass@2", "pass@3"]  # k itself, always


def test_a_score_comes_with_its_number_and_interval() -> None:
    scores = np.linspace(0, 1, 41) ** 2
    assert with_interval(scores) == {"score": scores.mean(), "n": 41, "interval": list(score_interval(scores))}


def test_intervals_are_over_clusters() -> None:
    """Four clusters of two problems with two samples each: the accuracy, pass@k and each facet count four values."""
    right = {"a": (2, 2), "b": (1, 0), "c": (0, 0), "d": (2, 1)}  # of each problem's two samples
    rows = [
        judged(f"{name}{place}", k < num, sample=k, cluster=name, category="t")
        for name, nums in right.items()
        for place, num in enumerate(nums)
        for k in range(2)
    ]
    scores = accuracy_and_pass(rows)
    assert scores["accuracy"]["n"] == 8
    assert scores["accuracy"]["interval"] == list(score_interval(np.array([1, 0.25, 0, 0.75])))
    assert scores["pass@2"]["interval"] == list(score_interval(np.array([1, 0.5, 0, 1])))
    assert facet_tables(BENCHMARKS["mathvista"], rows)["task"]["t"]["interval"] == scores["accuracy"]["interval"]


def test_health_by_hand() -> None:
    """Five responses to two questions: one cut of the three whose end is known, two boxes, one empty."""
    verdicts: list[Verdict] = ["correct", "no_answer", "timeout", "error", "correct"]
    notes, stops = ["free point", "", "", "", "published verdict"], ["length", "stop", None, "stop", None]
    rows = [
        JudgedResponse(
            Problem("ab"[i % 2], "?", (), "1", "integer"),
            Response("ab"[i % 2], " " if i == 2 else "x", sample=i // 2, stop_reason=stop),
            Judgement(verdict, None, "", note),
            has_box=i < 2,
        )
        for i, (verdict, note, stop) in enumerate(zip(verdicts, notes, stops, strict=True))
    ]
    assert health(rows) == {
        "n": 2,
        "num_responses": 5,
        "k": 3,
        "k_min": 2,
        "box_share": 2 / 5,
        "truncated_share": 1 / 3,
        "empty_share": 1 / 5,
        **dict.fromkeys(("no_answer", "timeouts", "errors", "published_verdicts", "free_points"), 1),
    }


def test_facets_count_a_problem_in_each_of_its_values() -> None:
    rows = [judged("a", True, skills=["x", "y"], category="t"), judged("b", False, skills=["y"], category="t")]
    tables = facet_tables(BENCHMARKS["mathvista"], rows)
    assert {value: (cell["score"], cell["n"]) for value, cell in tables["skills"].items()} == {
        "x": (1.0, 1),
        "y": (0.5, 2),
    }
    assert tables["task"]["t"]["score"] == 0.5
