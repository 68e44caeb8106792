"""MathVerse (AI4Math/MathVerse, MIT): by version of the problem, subject, subfield and question type.

The published rule asks one judge model to extract and another to compare. Here a letter is named by rules, and the
grader compares a free-form answer: an emulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_rl.data.golds import infer_answer_type, parse_choices
from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, Judgement, PublishedPrompt, RawRow, Response
from vlm_rl.evaluation.benchmarks.final_answers import final_answer, final_letters
from vlm_rl.evaluation.benchmarks.raw_rows import first_of, gold_text, id_text, mapping, problem_of, text, unwrapped
from vlm_rl.types import Problem

VISION_ONLY = "Answer the question that is written in the image."


def read_row(row: RawRow) -> Problem:
    """Return the problem of a row of testmini.json, of the hub's table, or of a file of results.

    A Vision Only row has its question in the image alone; one sentence takes its place.
    """
    version, answer = text(row, "problem_version"), unwrapped(gold_text(row, "answer"))
    about = mapping(row, "metadata" if row.get("metadata") else "category")
    is_choice = row.get("question_type") == "multi-choice"
    question = text(row, "question") or (VISION_ONLY if version == "Vision Only" else "")
    answer = answer.strip("()") if is_choice else answer  # a few letters are published in brackets
    return problem_of(
        "mathverse",
        id_text(row, "sample_index", "problem_id"),
        question,
        gold=answer,
        answer=answer,
        answer_type="choice" if is_choice else infer_answer_type(answer),
        choices=parse_choices(question) if is_choice else (),
        category=about.get("subject"),
        meta={"version": version, "problem": first_of(row, "problem_index"), "subfield": about.get("subfield")},
    )


def facets(problem: Problem) -> dict[str, Any]:
    """Return the version, the question's type, the subject and the subfield."""
    return {
        "version": problem.meta.get("version", ""),
        "question_type": "multi-choice" if problem.answer_type == "choice" or problem.choices else "free-form",
        "subject": problem.category,
        "subfield": problem.meta.get("subfield", ""),
    }


def images(row: RawRow) -> Sequence[Any]:
    """Return the row's image; a Text Only row needs none."""
    if row.get("problem_version") in ("Text Only", "Text_Only"):
        return []
    return [first_of(row, "image", "decoded_image")]


def official_rule(problem: Problem, response: Response) -> Judgement | str:
    """Return a verdict on a letter; for everything else the extracted text, which the grader compares."""
    extraction = response.text if response.extraction is None else response.extraction
    if problem.answer_type != "choice":
        return final_answer(extraction)
    letters = final_letters(extraction)
    right = letters == (problem.answer,)
    return Judgement("correct" if right else "wrong", ", ".join(letters), f"names {letters} for {problem.answer}")


_REASON_FIRST = "Please first conduct reasoning, and then answer the question and "

BENCHMARK = Benchmark(
    name="mathverse",
    license="MIT",
    hub="AI4Math/MathVerse",
    hub_files=("*.parquet", "*.json", "images.zip"),
    tables=("{split}.json", "**/{split}-*.parquet", "{split}*.parquet", "{split}*.json"),
    splits=("testmini", "testmini_text_only"),
    num_rows=(3940, 788),
    images=images,
    image_folder="images",
    read_row=read_row,
    facets=facets,
    official_rule=official_rule,
    needs_judge_model=True,
    response_ids=("sample_index", "problem_id", "_key", "id"),
    carries_annotations=True,
    prompt=PublishedPrompt(
        "mathverse",
        "AI4Math/MathVerse, column query_cot, MIT",
        before=f"{_REASON_FIRST}provide the final value, e.g., 1, 2.5, 300, at the end.\nQuestion: ",
        by_kind={
            "choice": f"{_REASON_FIRST}provide the correct option letter, e.g., A, B, C, D, at the end.\nQuestion: "
        },
    ),
)
