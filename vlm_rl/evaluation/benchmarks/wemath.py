"""We-Math (We-Math/We-Math, CC BY-NC 4.0): problems of two or three steps, and how they are mastered.

A problem's steps and its whole ("multi") are separate rows. A problem is one of four cases: complete mastery (CM),
inadequate generalisation (IG: all steps right, the whole wrong), insufficient knowledge (IK: the whole and some step
wrong), rote memorisation (RM: the whole right without its steps; strict: any step wrong, loose: all steps wrong).
The score is CM + IG / 2 over the problems. The published extraction is a rule, without a judge model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from vlm_rl.data.golds import parse_choices, with_choices
from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkReport,
    BenchmarkRows,
    JudgedResponse,
    Judgement,
    PublishedPrompt,
    PublishedRule,
    RawRow,
    Response,
    one_image,
)
from vlm_rl.evaluation.benchmarks.protocols import VISION, Stated
from vlm_rl.evaluation.benchmarks.raw_rows import UnusableRowError, gold_text, id_text, problem_of, text, unwrapped
from vlm_rl.evaluation.benchmarks.scores import accuracy_and_pass, by_problem, with_interval
from vlm_rl.types import Problem

Case = Literal["CM", "IG", "IK", "RM"]
_WORTH: dict[Case, float] = {"CM": 1.0, "IG": 0.5, "IK": 0.0, "RM": 0.0}
_REMOVED = re.compile("[<>:.]")
_STEP = re.compile(r"[23]steps_(\d|multi)")


def read_row(row: RawRow) -> Problem:
    """Return the problem of a row of testmini.json or of the hub's table: one step of a problem, or its whole."""
    problem, key = id_text(row, "ID"), id_text(row, "key", "_key")
    if not _STEP.fullmatch(key):
        raise UnusableRowError("bad_value", f"key is {key!r}, which is no step, such as 2steps_1 or 3steps_multi")
    question, choices = text(row, "question"), parse_choices(text(row, "option"))
    answer = unwrapped(gold_text(row, "answer"))
    return problem_of(
        "wemath",
        f"{problem}-{key}",
        with_choices(question, choices) if question else "",
        gold=answer,
        answer=answer,
        answer_type="choice",
        choices=choices,
        category=row.get("knowledge concept"),
        meta={"problem": problem, "key": key},
    )


def saved_rows(row: RawRow, _path: Path, _place: int) -> dict[str, RawRow]:
    """Return the row of each step, where a file holds an object of steps by the problem's ID."""
    steps = {name: cell for name, cell in row.items() if _STEP.fullmatch(name)}
    return {
        name: {"ID": row.get("_key"), "key": name, **(cell if isinstance(cell, dict) else {"_value": cell})}
        for name, cell in steps.items()
    } or {"": row}


def facets(problem: Problem) -> dict[str, Any]:
    """Return the key that names the question's step, and the concept."""
    return {"step": problem.meta["key"], "concept": problem.category}


def official_rule(problem: Problem, response: Response) -> Judgement:
    """Take the first character after the last "Answer", punctuation removed."""
    tail = _REMOVED.sub("", response.text.split("Answer")[-1].strip()).strip()
    letter = tail[0] if tail and tail[0] in "ABCDEFGH" else None
    if letter is None:
        return Judgement("no_answer", None, "no letter A to H follows the last 'Answer'")
    return Judgement("correct" if letter == problem.answer else "wrong", letter, f"{letter} for {problem.answer}")


def case_of(steps: Sequence[bool], whole: bool, *, loose: bool) -> Case:
    """Return which of the four cases a problem is."""
    if not whole:
        return "IG" if all(steps) else "IK"
    mastered = any(steps) if loose else all(steps)
    return "CM" if mastered else "RM"


def four_cases(verdicts: Iterable[tuple[Problem, bool]], *, loose: bool) -> dict[str, Case]:
    """Return problem -> its case; a problem of which a step or the whole has no response is left out."""
    parts: dict[str, dict[str, bool]] = defaultdict(dict)
    for row, correct in verdicts:
        parts[str(row.meta["problem"])][_part(row)] = correct
    cases = {}
    for problem, verdict_of in parts.items():
        steps = [verdict_of[name] for name in sorted(verdict_of) if name != "multi"]
        if "multi" in verdict_of and len(steps) == (3 if problem.startswith("3") else 2):
            cases[problem] = case_of(steps, verdict_of["multi"], loose=loose)
    return cases


def _part(row: Problem) -> str:
    """Return "1", "2", "3" or "multi"."""
    return str(row.meta["key"]).rpartition("_")[2]


def case_scores(cases: Mapping[str, Case]) -> dict[str, float]:
    """Return problem -> its worth; their mean is the published score."""
    return {problem: _WORTH[case] for problem, case in cases.items()}


def rates(cases: Mapping[str, Case]) -> dict[str, float | None]:
    """Return the share of each case; RM, as published, over the problems whose whole is right."""
    count = {case: sum(other == case for other in cases.values()) for case in _WORTH}
    whole_right = count["CM"] + count["RM"]
    shares: dict[str, float | None] = {
        case: count[case] / len(cases) if cases else None for case in ("IK", "IG", "CM")
    }
    return shares | {"RM": count["RM"] / whole_right if whole_right else None}


def scores(judged: Sequence[JudgedResponse]) -> dict[str, Any]:
    """Return scores, rates and cases, strict and loose, the accuracy of steps and wholes, and the plain one."""
    verdicts = _first_samples(judged)
    values: dict[str, Any] = {}
    cases: dict[str, Case] = {}
    for how in ("strict", "loose"):
        cases = four_cases(verdicts, loose=how == "loose")
        values[f"score_{how}"] = with_interval(case_scores(cases).values())
        values[f"rates_{how}"] = rates(cases)
        values[f"cases_{how}"] = {case: list(cases.values()).count(case) for case in ("IK", "IG", "CM", "RM")}
    # S1: the single steps; S2 and S3: the wholes of problems of two and of three steps.
    by_steps: dict[int, list[tuple[float, str]]] = {1: [], 2: [], 3: []}
    for row, correct in verdicts:
        steps = int(str(row.meta["key"])[0]) if _part(row) == "multi" else 1
        by_steps[steps].append((float(correct), str(row.meta["problem"])))
    values |= {
        f"S{number}": with_interval([score for score, _ in rows], [problem for _, problem in rows])
        for number, rows in by_steps.items()
    }
    num_problems = len({row.meta["problem"] for row, _ in verdicts})
    return values | {"incomplete_problems": num_problems - len(cases), **accuracy_and_pass(judged)}


def headline_parts(judged: Sequence[JudgedResponse]) -> dict[str, float]:
    """Return problem -> its worth by the strict cases."""
    return case_scores(four_cases(_first_samples(judged), loose=False))


def _first_samples(judged: Sequence[JudgedResponse]) -> list[tuple[Problem, bool]]:
    return [(samples[0].problem, samples[0].correct) for samples in by_problem(judged).values()]


BENCHMARK = Benchmark(
    name="wemath",
    license="CC BY-NC 4.0",
    protocol=replace(VISION, split=Stated("testmini", "its authors' leaderboard")),
    files=BenchmarkFiles(
        hub="We-Math/We-Math",
        tables=("{split}.json", "data/{split}.json", "**/{split}-*.parquet"),
        splits=("testmini",),
        num_rows=(1740,),
    ),
    rows=BenchmarkRows(
        read_row=read_row,
        images=one_image("image_path", "image"),
        saved_rows=saved_rows,
        needs_options=True,
        response_ids=("{ID}-{key}", "_key", "id"),
        carries_annotations=True,
    ),
    rule=PublishedRule(judgement=official_rule, needs_judge_model=False),
    report=BenchmarkReport(
        facets=facets, cluster_key="problem", scores=scores, headline="score_strict", headline_parts=headline_parts
    ),
    prompt=PublishedPrompt(
        "wemath",
        "We-Math/We-Math, its paper's table of prompts, CC BY-NC 4.0",
        before="Now, we require you to solve a multiple-choice math question. Please briefly describe your thought "
        "process and provide the final answer(option).\nQuestion: ",
        after="\nRegarding the format, please answer following the template below, and be sure to include two <> "
        "symbols:\n<Thought process>: <<your thought process>> <Answer>: <<your option>>",
    ),
)
