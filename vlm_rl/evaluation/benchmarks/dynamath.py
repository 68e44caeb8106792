"""DynaMath (DynaMath/DynaMath_Sample, Apache-2.0): ten variants of each seed problem.

Scores: average accuracy; worst case (a seed counts only if all of its variants are right); reasoning robustness
(worst case over average). The published rule reads the JSON reply's "short answer": a float within 0.001, a letter
among the first three characters, a text that contains the gold (so "not 5" is 5, which is marked as a free point).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_rl.data.golds import parse_choices
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
    authors_gold,
)
from vlm_rl.evaluation.benchmarks.protocols import VISION, Stated
from vlm_rl.evaluation.benchmarks.raw_rows import UnusableRowError, gold_text, id_text, problem_of, text, unwrapped
from vlm_rl.evaluation.benchmarks.scores import accuracy_by_problem, clusters_of, with_interval
from vlm_rl.types import AnswerType, Problem

_TYPES: dict[str, AnswerType] = {"float": "float", "multiple choice": "choice", "text": "text"}
TOLERANCE = 0.001
_SHORT_ANSWER = "short answer"  # the key in a JSON reply
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9])")  # published where the minutes are less than ten
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_TRIAL = re.compile(r"(?i)(?:sample[_ -]?)?(?:trial|variant|split)[_ -]?(\d+)")


def read_row(row: RawRow) -> Problem:
    """Return the problem of a row of a trial's dataset.json or of a split of the hub's table.

    The row has its variant's number in "trial", which its file or folder is named by.
    """
    published_type = str(row.get("answer_type"))
    if published_type not in _TYPES:
        raise UnusableRowError("bad_type", f"answer_type is {published_type!r}; known: {', '.join(_TYPES)}")
    kind, question, gold = _TYPES[published_type], text(row, "question"), gold_text(row, "ground_truth", "answer")
    answer = unwrapped(gold)
    seed, variant = id_text(row, "key", "_key", "id"), id_text(row, "trial")
    return problem_of(
        "dynamath",
        f"{seed}-v{variant}",
        question,
        gold=gold,
        answer=answer,
        answer_type=kind,
        choices=parse_choices(question) if kind == "choice" else (),
        category=row.get("subject"),
        meta={
            "seed": seed,
            "variant": int(variant) if variant.isdecimal() else variant,
            "level": row.get("level") or row.get("knowledge_level"),
            "tolerance": TOLERANCE if kind == "float" else None,
            "alternatives": (_other_spellings(answer, question) or None) if kind == "text" else None,
        },
    )


def _other_spellings(gold: str, question: str) -> list[str]:
    """Return 8:00 for the time 8:0, and the other names of a month (Sep, Sept, September); [] for other golds."""
    asked = question.lower()
    if "time" in asked and (clock := _CLOCK.fullmatch(gold)):
        return [f"{clock[1]}:0{clock[2]}"]
    for month in _MONTHS if "month" in asked else ():
        names = {month, month[:3], month[:4]} if month == "September" else {month, month[:3]}
        if gold in names:
            return sorted(names - {gold})
    return []


def saved_rows(row: RawRow, path: Path, place: int) -> dict[str, RawRow]:
    """Return name -> row of each variant that a row of a file stands for.

    A file may be a table with a column for each (Question ID, Variant 1, ...), or hold objects by trial and seed, in
    either order. Each row gets "trial": what it says itself (trial or variant), else the number by which its file or
    folder is named (trial3, 3.json), else its file's place.
    """
    match = _TRIAL.search(path.stem) or re.fullmatch(r"0*(\d+)", path.stem) or _TRIAL.fullmatch(path.parent.name)
    of_file = match[1] if match else str(place)
    return {name: {**variant, "trial": _trial(variant) or of_file} for name, variant in _variants(row).items()}


def _trial(row: RawRow) -> str:
    said = row.get("trial", row.get("variant"))
    return "" if said is None else str(said).lower().removeprefix("trial").removeprefix("variant").strip(" _-")


def _variants(row: RawRow) -> dict[str, RawRow]:
    seed = row.get("_key")
    if isinstance(seed, str):
        seed = re.sub(r"^[Qq](?=\d+$)", "", seed)  # the authors number Q1, Q2 in their tables
        row = {**row, "_key": seed}
    cells = {name: cell for name, cell in row.items() if name not in ("_key", "_number")}
    are_numbered = cells != {} and all(name.isdigit() and isinstance(cell, dict) for name, cell in cells.items())
    if are_numbered and (trial := _TRIAL.fullmatch(str(seed))):
        return {name: {"_key": name, "trial": trial[1], **cell} for name, cell in cells.items()}
    trials = {name: match[1] for name in cells if (match := _TRIAL.fullmatch(name.strip()))}
    trials |= {name: name for name in cells if are_numbered}
    if not trials:
        return {"": row}
    return {name: {"_key": seed, "trial": trial, **_cell(cells[name])} for name, trial in trials.items()}


def _cell(cell: Any) -> RawRow:
    """Look up one variant in a table: a row, an answer, or the verdict that the authors publish instead."""
    if isinstance(cell, dict):
        return cell
    is_verdict = str(cell).strip().lower() in ("correct", "fail")
    return {"_value": "", "result": str(cell).strip()} if is_verdict else {"_value": cell}


def facets(problem: Problem) -> dict[str, Any]:
    """Return the subject, the level and the authors' name for the type of answer."""
    published_type = next(name for name, kind in _TYPES.items() if kind == problem.answer_type)
    return {
        "subject": problem.category,
        "level": problem.meta.get("level", ""),
        "answer_type": published_type,
    }


def official_rule(problem: Problem, response: Response) -> Judgement:
    """Compare the short answer with the gold; where a file holds only a verdict, take that."""
    if response.published is not None and not response.text and response.extraction is None:
        verdict = "correct" if response.published else "wrong"
        return Judgement(verdict, None, "the file holds this verdict, and no answer", "published verdict")
    short = response.extraction if response.extraction is not None else short_answer(response.text)
    gold, note = authors_gold(problem), ""
    if problem.answer_type == "float":
        value, gold_value = _number(short), _number(gold)
        right = value is not None and gold_value is not None and abs(value - gold_value) <= TOLERANCE
        reason = f"{value} against {gold}, within {TOLERANCE}"
    elif problem.answer_type == "choice":
        right = short == gold if len(short) == 1 else gold in short[:3]
        reason = f"{short[:3]!r} holds {gold}: {right}"
    else:
        right = gold in short
        note = "free point" if right and short.strip() != gold.strip() else ""
        reason = f"the text contains {gold!r:.60}: {right}"
    return Judgement("correct" if right else "wrong", short, reason, note)


def short_answer(response: str) -> str:
    """Return the JSON reply's "short answer"; without JSON, the last line less its last character, as published."""
    start, end = response.find("{"), response.rfind("}")
    body = response[start : end + 1].replace("\\", "") if 0 <= start < end else response
    try:
        tree = json.loads(body, strict=False)
    except (ValueError, RecursionError):
        return body.split("\n")[-1][:-1]
    return str(tree.get(_SHORT_ANSWER)) if isinstance(tree, dict) else ""


def _number(text: str) -> float | None:
    """Read a number as published: the first word, "2π" as two times pi."""
    word = text if text.isdigit() else text.split(" ")[0]
    head, pi, _ = word.partition("π")
    try:
        return float(head) * (math.pi if pi else 1.0)
    except ValueError:
        return None


def scores(judged: Sequence[JudgedResponse]) -> dict[str, Any]:
    """Return the average, the worst case, and the reasoning robustness, which is their quotient."""
    average = with_interval(accuracy_by_problem(judged).values(), clusters_of(judged))
    values: dict[str, Any] = {"average": average, "worst_case": with_interval(worst_cases(judged).values())}
    variants: dict[str, set[str]] = defaultdict(set)
    for item in judged:
        variants[str(item.problem.meta["seed"])].add(str(item.problem.meta["variant"]))
    values["num_variants"] = sorted({len(numbers) for numbers in variants.values()})
    share = values["worst_case"]["score"]
    values["reasoning_robustness"] = share / average["score"] if average["score"] else None
    return values


def worst_cases(judged: Sequence[JudgedResponse]) -> dict[str, float]:
    """Return seed -> 1 if every sample of each of its variants is right, else 0."""
    accuracy = accuracy_by_problem(judged)
    seeds = {item.problem.id: str(item.problem.meta["seed"]) for item in judged}
    by_seed: dict[str, list[float]] = defaultdict(list)
    for problem_id, seed in seeds.items():
        by_seed[seed].append(float(accuracy[problem_id] == 1))
    return {seed: min(verdicts) for seed, verdicts in by_seed.items()}


_INSTRUCTION = """
## Answer Instruction Please provide an answer to the question outlined above. Your response should adhere \
to the following JSON format, which includes two keys: 'solution' and 'short answer'. The 'solution' key can contain \
detailed steps needed to solve the question, and the 'short answer' key should provide a concise response. \
If the problem is a multiple choice problem, just provide the corresponing choice option, \
such as 'A', 'B', 'C', or 'D'. If the answer is a numerical value, format it as a three-digit floating-point number.

Example of expected JSON response format:

{
    "solution": "[Detailed step-by-step explanation]",
    "short answer": "[Concise Answer]"
}"""

BENCHMARK = Benchmark(
    name="dynamath",
    license="Apache-2.0",
    protocol=replace(VISION, split=Stated("", "all ten variants, as its authors' worst case needs")),
    files=BenchmarkFiles(
        hub="DynaMath/DynaMath_Sample",
        tables=("trial*/dataset.json", "**/sample_variant*.parquet"),
        num_rows=(5010,),
        has_trials=True,
    ),
    rows=BenchmarkRows(
        read_row=read_row,
        saved_rows=saved_rows,
        response_ids=(
            "{ID}-v{key}",
            *(f"{{{name}}}-v{{trial}}" for name in ("_key", "id", "ID", "key", "question_id")),
        ),
        short_answer=_SHORT_ANSWER,
    ),
    rule=PublishedRule(judgement=official_rule, needs_judge_model=False),
    report=BenchmarkReport(
        facets=facets, cluster_key="seed", scores=scores, headline="worst_case", headline_parts=worst_cases
    ),
    prompt=PublishedPrompt(
        "dynamath",
        "DynaMath/DynaMath, its script for open models, Apache-2.0",
        before="## Question\n",
        after=_INSTRUCTION,
        after_by_kind={"float": "Please answer in a floating-point number."},
    ),
)
