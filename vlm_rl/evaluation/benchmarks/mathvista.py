"""MathVista (AI4Math/MathVista, CC BY-SA 4.0): by task, skill, source, question and answer type, and more.

The published rule: a judge model extracts. The extraction is normalised (a letter becomes its option, any other
text the option with the smallest edit distance; numbers are truncated or rounded to the stated decimals) and must
equal the gold's text. An empty extraction thus gets the shortest option, right or not: a free point, which is
marked.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from vlm_rl.data.golds import LETTERS, with_choices
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
    authors_gold,
    question_text,
)
from vlm_rl.evaluation.benchmarks.final_answers import final_answer, final_letters, final_number, without_markup
from vlm_rl.evaluation.benchmarks.protocols import LUSPO, VISION, Stated
from vlm_rl.evaluation.benchmarks.raw_rows import (
    UnusableRowError,
    first_of,
    gold_text,
    id_text,
    mapping,
    problem_of,
    text,
    texts,
    unwrapped,
)
from vlm_rl.types import AnswerType, Problem

_REPORTED_BY = ("language", "source", "category", "context", "grade")
# A list is a sequence, whose order counts, which the grader calls an expression.
_TYPES: dict[str, AnswerType] = {"text": "text", "integer": "integer", "float": "float", "list": "expression"}
_LETTER = re.compile(r"\(([a-zA-Z])\)")
_QUOTED = re.compile(r'The answer is "(.*)"\.')
_MAX_EDIT = 2_000  # characters of an extraction whose edit distance is computed


def read_row(row: RawRow) -> Problem:
    """Return the problem of a row of testmini.json or of the hub's table.

    The gold of a multiple choice is the option's text; the grader compares its letter. Of options that occur twice
    (pids 587, 740, 781) the first one's letter is taken; a gold that is not an option (168, 849) stays text.
    """
    gold, choices = gold_text(row, "answer"), texts(row, "choices")
    published_type, question_type = str(first_of(row, "answer_type")), first_of(row, "question_type")
    if published_type not in _TYPES:
        raise UnusableRowError("bad_type", f"answer_type is {published_type!r}; known: {', '.join(_TYPES)}")
    if question_type is None:
        raise UnusableRowError("bad_type", f"no question_type; the row has {sorted(row)[:12]}")
    if question_type == "multi_choice" and not choices:
        raise UnusableRowError("options", "question_type is multi_choice, and there are no choices")
    choices = choices if question_type == "multi_choice" else ()
    answer, kind = unwrapped(gold), _TYPES[published_type]
    options = [choice.strip() for choice in choices]
    if choices:
        answer, kind = (LETTERS[options.index(answer)], "choice") if answer in options else (answer, "text")
    question, unit, decimals = text(row, "question"), text(row, "unit") or None, _decimals(row)
    about = mapping(row, "metadata")
    asked = question + (f" (Unit: {unit})" if unit else "")
    return problem_of(
        "mathvista",
        id_text(row, "pid", "_key"),
        (with_choices(asked, choices) if choices else asked) if question else "",
        gold=gold,
        answer=answer,
        answer_type=kind,
        choices=choices,
        category=about.get("task"),
        meta={
            "unit": unit,
            "skills": about.get("skills"),
            "answer_type": published_type,
            "reported_by": {name: about[name] for name in _REPORTED_BY if about.get(name)},
            "precision": decimals if kind == "float" else None,
        },
    )


def _decimals(row: RawRow) -> int | None:
    """Return the decimals of a float gold, which one of the two publications stores as 1.0; None if not stated."""
    stated = first_of(row, "precision")
    if stated is None:
        return None
    try:
        decimals = int(float(stated))
    except (TypeError, ValueError, OverflowError):
        decimals = -1
    if not 0 <= decimals <= 30:
        raise UnusableRowError("bad_type", f"precision must be a whole number from 0 to 30, not {stated!r:.40}")
    return decimals


def facets(problem: Problem) -> dict[str, Any]:
    """Return the types of question and answer, and the facets in the row's metadata, without those that it lacks."""
    reported = problem.meta.get("reported_by", {})
    values = {
        "question_type": "multi_choice" if problem.choices else "free_form",
        "answer_type": problem.meta.get("answer_type"),
        **{name: reported.get(name) for name in ("language", "source", "category")},
        "task": problem.category or None,
        **{name: reported.get(name) for name in ("context", "grade")},
        "skills": problem.meta.get("skills"),
    }
    return {name: value for name, value in values.items() if value is not None}


def option_gold(problem: Problem) -> str:
    """Return the authors' gold: the option's text, which older prepared sets hold as its letter alone."""
    if "gold" not in problem.meta and problem.answer_type == "choice":
        return problem.choices[LETTERS.index(problem.answer)]
    return authors_gold(problem)


def official_rule(problem: Problem, response: Response) -> Judgement:
    """Normalise the shipped extraction, or one made by rules where none is shipped, and compare with the gold."""
    shipped = response.extraction is not None
    extraction = extraction_by_rules(problem, response.text) if response.extraction is None else response.extraction
    normal = normalised(problem, extraction)
    right = normal == option_gold(problem)
    how = "given extraction" if shipped else "extraction by rules"
    note = "free point" if right and problem.choices and not extraction.strip() else ""
    return Judgement(
        "correct" if right else "wrong", extraction, f"{how} {extraction!r:.60} is read as {normal!r:.60}", note
    )


def judge_dialogue(problem: Problem, response: Response) -> Generator[str, str, Judgement]:
    """Ask for the extraction, unless the file ships it or the authors' script needs no model for it."""
    extraction = response.extraction
    if extraction is None:
        extraction = extraction_without_model(problem, response.text)
    if extraction is None:
        query = _PROMPT.applied(replace(problem, question=question_text(problem))).question
        extraction = yield f"{_EXTRACT}\n\n{query}\n\n{response.text}\n\nExtracted answer: "
    return official_rule(problem, replace(response, extraction=extraction.strip()))


def extraction_without_model(problem: Problem, response: str) -> str | None:
    """Extract as the authors' script does without a model: nothing, an option, or a number; else None."""
    if not response or response in problem.choices:
        return response
    try:
        if problem.answer_type == "integer":
            return str(int(response))
        if problem.answer_type == "float":
            return str(float(response))
    except ValueError:
        pass
    return None


def extraction_by_rules(problem: Problem, response: str) -> str:
    """Extract as the authors' script does without a model, and by our rules where it would ask one."""
    answer_type = problem.answer_type
    response = response.strip()
    taken = extraction_without_model(problem, response)
    if taken is not None:
        return taken
    if quoted := _QUOTED.search(response):
        return quoted[1]
    if problem.choices:
        letters = final_letters(response)
        return letters[0] if len(letters) == 1 else without_markup(final_answer(response))
    answer = final_answer(response)
    if answer_type in ("integer", "float"):
        number = final_number(answer)
        # The script cuts 1.5 to 1, but 3/2 is no integer.
        is_cut = answer_type == "integer" and "." in number and number not in answer
        return answer if is_cut else number
    return without_markup(answer)


def normalised(problem: Problem, extraction: str) -> str | None:
    """Normalise an extraction as the published script does; None if it gives up."""
    if problem.choices:
        return _as_choice(problem.choices, extraction.strip())
    try:
        if problem.answer_type == "integer":
            return str(int(float(extraction)))
        if problem.answer_type == "float":
            return str(round(float(extraction), problem.meta.get("precision")))
    except (ValueError, OverflowError):
        return None
    return extraction


def _as_choice(choices: Sequence[str], extraction: str) -> str:
    if letter := _LETTER.search(extraction):
        extraction = letter[1].upper()
    place = ord(extraction) - ord("A") if len(extraction) == 1 else -1
    if 0 <= place < len(choices):
        return choices[place]
    cut = extraction[:_MAX_EDIT]
    return min(choices, key=lambda choice: edit_distance(cut, choice))  # the first of the nearest


def edit_distance(a: str, b: str) -> int:
    """Return Levenshtein's distance: the fewest insertions, deletions and replacements that turn `a` into `b`."""
    previous = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        current = [i]
        for j, right in enumerate(b, start=1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (left != right)))
        previous = current
    return previous[-1]


_HINT = "Hint: Please answer the question "
_VALUE = "provide the final value, e.g., {}, at the end.\nQuestion: "

_PROMPT = PublishedPrompt(
    "mathvista",
    "AI4Math/MathVista, column query, CC BY-SA 4.0",
    before=f"{_HINT}and {_VALUE.format('1, 2, 3')}",
    by_kind={
        "choice": f"{_HINT}and provide the correct option letter, e.g., A, B, C, D, at the end.\nQuestion: ",
        "integer": f"{_HINT}requiring an integer answer and {_VALUE.format('1, 2, 3')}",
        "float 1": f"{_HINT}requiring a floating-point number with one decimal place and "
        + _VALUE.format("1.2, 1.3, 1.4"),
        "float 2": f"{_HINT}requiring a floating-point number with two decimal places and "
        + _VALUE.format("1.23, 1.34, 1.45"),
        "list": f"{_HINT}requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], "
        "[1.2, 1.3, 1.4], at the end.\nQuestion: ",
    },
)

# The authors' words; their script puts the query, the response and "Extracted answer: " after them.
_EXTRACT = """
Please read the following example. Then extract the answer from the model response and type it at the end of the prompt.

Hint: Please answer the question requiring an integer answer and provide the final value, e.g., 1, 2, 3, at the end.
Question: Which number is missing?

Model response: The number missing in the sequence is 14.

Extracted answer: 14

Hint: Please answer the question requiring a floating-point number with one decimal place and provide the final value, e.g., 1.2, 1.3, 1.4, at the end.
Question: What is the fraction of females facing the camera?

Model response: The fraction of females facing the camera is 0.6, which means that six out of ten females in the group are facing the camera.

Extracted answer: 0.6

Hint: Please answer the question requiring a floating-point number with two decimal places and provide the final value, e.g., 1.23, 1.34, 1.45, at the end.
Question: How much money does Luca need to buy a sour apple candy and a butterscotch candy? (Unit: $)

Model response: Luca needs $1.45 to buy a sour apple candy and a butterscotch candy.

Extracted answer: 1.45

Hint: Please answer the question requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], [1.2, 1.3, 1.4], at the end.
Question: Between which two years does the line  graph saw its maximum peak?

Model response: The line graph saw its maximum peak between 2007 and 2008.

Extracted answer: [2007, 2008]

Hint: Please answer the question and provide the correct option letter, e.g., A, B, C, D, at the end.
Question: What fraction of the shape is blue?
Choices:
(A) 3/11
(B) 8/11
(C) 6/11
(D) 3/5

Model response: The correct answer is (B) 8/11.

Extracted answer: B
""".strip()  # noqa: E501

BENCHMARK = Benchmark(
    name="mathvista",
    license="CC BY-SA 4.0",
    protocol=replace(VISION, split=Stated("testmini", f"{LUSPO}, Table 3: MathVista-mini")),
    files=BenchmarkFiles(
        hub="AI4Math/MathVista",
        hub_files=("data/*.parquet",),
        tables=("{split}.json", "data/{split}.json", "**/{split}-*.parquet", "{split}*.json"),
        splits=("testmini", "test"),
        num_rows=(1000, 5141),
    ),
    rows=BenchmarkRows(read_row=read_row, response_ids=("pid", "_key", "id"), carries_annotations=True),
    rule=PublishedRule(
        judgement=official_rule,
        needs_judge_model=True,
        judge=PublishedJudge(
            "gpt-4-0613",
            "lupantech/MathVista, prompts/ext_ans.py, CC BY-SA 4.0, as lmms-eval's mathvista_evals.py keeps it",
            judge_dialogue,
            takes_extractions=True,
        ),
        emulation="a plainer extractor by rules differed from the authors' judge model on 1.6 to 20.7 % of the rows "
        "of their files of responses, and this one has not been compared",
    ),
    report=BenchmarkReport(facets=facets),
    prompt=_PROMPT,
)
