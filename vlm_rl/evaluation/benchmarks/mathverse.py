"""MathVerse (AI4Math/MathVerse, MIT): by version of the problem, subject, subfield and question type.

The published rule asks a judge model to extract an answer, and again to compare it with the gold. Without a judge
model a letter is named by rules, and the grader compares a free-form answer: an emulation.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from vlm_rl.data.golds import infer_answer_type, parse_choices
from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkReport,
    BenchmarkRows,
    Judgement,
    PublishedJudge,
    PublishedPrompt,
    PublishedRule,
    RawRow,
    Response,
    UnreadableReplyError,
    authors_gold,
    question_text,
)
from vlm_rl.evaluation.benchmarks.final_answers import final_answer, final_letters, stated_value
from vlm_rl.evaluation.benchmarks.protocols import LUSPO, VISION, Stated
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
        meta={
            "version": version,
            "problem": first_of(row, "problem_index"),
            "subfield": about.get("subfield"),
            # What a judge model is told that was asked: the question column of a Vision Only row is empty.
            "question_for_eval": None if row.get("question") else row.get("question_for_eval"),
        },
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
        answer = final_answer(extraction)
        return stated_value(answer) if response.extraction is None else answer
    letters = final_letters(extraction)
    right = letters == (problem.answer,)
    return Judgement("correct" if right else "wrong", ", ".join(letters), f"names {letters} for {problem.answer}")


def judge_dialogue(problem: Problem, response: Response) -> Generator[str, str, Judgement]:
    """Ask for the answer of a response, unless the file ships it, then whether it is that of the gold."""
    extraction = response.extraction
    if extraction is None:
        reply = yield f"{_EXTRACT}\n\nModel response: '{response.text}'\nExtracted Answer: "
        extraction = reply.replace("Extracted Answer: ", "").strip()
    texts = {
        "question": problem.meta.get("question_for_eval", question_text(problem)),
        "gt": authors_gold(problem),
        "extraction": extraction,
    }
    reply = yield re.sub(r"\{(question|gt|extraction)\}", lambda match: texts[match[1]], _COMPARE)
    verdict = reply.replace("Judgement:", "").strip()
    if verdict not in ("0", "1"):
        raise UnreadableReplyError("neither 0 nor 1")
    return Judgement("correct" if verdict == "1" else "wrong", extraction, f"the judge says {verdict}")


# Both prompts are the authors', word for word; the second has {question}, {gt} and {extraction} put in.
_EXTRACT = r"""
I am providing you a response from a model to a math problem, termed 'Model Response'. You should extract the answer from the response as 'Extracted Answer'. Directly output the extracted answer with no explanation.

1.
Model response: 'Rounded to two decimal places, the perimeter of the sector is approximately:

(-2, 1)'
Extracted Answer: (-2, 1)

2.
Model response: 'at those points.

Therefore, the correct option that represents the meaning of the intersection points of the graphs is:

D. They give the solutions to the equation $f(t)=g(t)$.",'
Extracted Answer: D

3.
Model response: ' at 1 (there's a closed circle at y = 1), the range in interval notation is \((-4, 1]\).

Final values:
Domain: \((-3, 3]\)
Range: \((-4, 1]\)'
Extracted Answer: Domain: \((-3, 3]\)
Range: \((-4, 1]\)

4.
Model response: 'As it stands, I cannot provide the correct option letter because there isn't enough information to solve for 'y'.'
Extracted Answer: null

5.
Model response: 'Given that AB = 17.6 meters, we can now substitute into the equation:

d = 17.6 / cos(38°)

Therefore, to one decimal place, the distance d between Ned and Bart is approximately 22.3 meters.'
Extracted answer: 22.3

6.
Model response:  have all the coefficients for the quadratic function:
\( f(x) = ax^2 + bx + c \)
\( f(x) = -1x^2 - 2x + 1 \)

Therefore, the equation for the graphed function \( f \) is:
\( f(x) = -x^2 - 2x + 1 \)"'
Extracted answer: f(x) = -x^2 - 2x + 1

7.
""".strip()  # noqa: E501
_COMPARE = r"""
Below are two answers to a math question. Question is [Question], [Standard Answer] is the standard answer to the question, and [Model_answer] is the answer extracted from a model's output to this question.  Determine whether these two answers are consistent.
Please note that only when the [Model_answer] completely matches the [Standard Answer] means they are consistent. For non-multiple-choice questions, if the meaning is expressed in the same way, it is also considered consistent, for example, 0.5m and 50cm.
If they are consistent, Judement is 1; if they are different, Judement is 0.

[Question]: Write the set of numbers represented on the number line in interval notation.
[Standard Answer]: (-2,1]
[Model_answer] : Extracted Answer: \((-2, 1)\)
Judgement: 0

[Question]: Find the domain and range of the function f using interval notation.
[Standard Answer]: domain: [-4, 0) and range: (-3, 1]
[Model_answer] : Range: \((-4, 1]\)
Judgement: 0


[Question]: Two curves are symmetrical about the x-axis. Use the vertical line test to determine if this relation is a function.
Choices:
A:This is a function
B:This is not a function
[Standard Answer]: B
[Model_answer] : This is not a function
Judgement: 1

[Question]: Given the graph of the ellipse that intersects with x-axis at 9 and -9 and with y-axis at 3 and -3, determine its equation.A. \frac{x^2}{81} + \frac{y^2}{9} = 1 B. Can not determine.

[Standard Answer]: A
[Model_answer] : \frac{x^2}{81} + \frac{y^2}{9} = 1
Judgement: 1

[Question]: {question}
[Standard Answer]: {gt}
[Model_answer] : {extraction}
Judgement: """.strip()  # noqa: E501

_REASON_FIRST = "Please first conduct reasoning, and then answer the question and "

BENCHMARK = Benchmark(
    name="mathverse",
    license="MIT",
    protocol=replace(VISION, split=Stated("testmini", f"{LUSPO}, Table 3, reports its Vision Only rows")),
    files=BenchmarkFiles(
        hub="AI4Math/MathVerse",
        hub_files=("*.parquet", "*.json", "images.zip"),
        tables=("{split}.json", "**/{split}-*.parquet", "{split}*.parquet", "{split}*.json"),
        splits=("testmini", "testmini_text_only"),
        num_rows=(3940, 788),
        image_folder="images",
    ),
    rows=BenchmarkRows(
        read_row=read_row,
        images=images,
        response_ids=("sample_index", "problem_id", "_key", "id"),
        carries_annotations=True,
    ),
    rule=PublishedRule(
        judgement=official_rule,
        needs_judge_model=True,
        judge=PublishedJudge("gpt-3.5-turbo", "ZrrSkywalker/MathVerse, evaluation/prompts.py, MIT", judge_dialogue),
        emulation="never compared: the authors publish no file of responses with verdicts",
    ),
    report=BenchmarkReport(facets=facets, cluster_key="problem"),
    prompt=PublishedPrompt(
        "mathverse",
        "AI4Math/MathVerse, column query_cot, MIT",
        before=f"{_REASON_FIRST}provide the final value, e.g., 1, 2.5, 300, at the end.\nQuestion: ",
        by_kind={
            "choice": f"{_REASON_FIRST}provide the correct option letter, e.g., A, B, C, D, at the end.\nQuestion: "
        },
    ),
)
