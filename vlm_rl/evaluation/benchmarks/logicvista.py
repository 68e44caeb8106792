"""LogicVista (lscpku/LogicVista, Apache-2.0): by skill and capability.

The published rule asks a judge model to name letters. The sets of named and of right letters must be equal; three
rows have two right ones. Without a judge model rules name the letters: an emulation.
"""

from __future__ import annotations

import re
from collections.abc import Generator
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
    PublishedRule,
    RawRow,
    Response,
    UnreadableReplyError,
    one_image,
    question_text,
)
from vlm_rl.evaluation.benchmarks.final_answers import final_answer, final_letters
from vlm_rl.evaluation.benchmarks.protocols import VISION, Stated
from vlm_rl.evaluation.benchmarks.raw_rows import UnusableRowError, first_of, problem_of, text, unwrapped
from vlm_rl.types import Problem
from vlm_rl.untrusted.json_object import read_object

_LETTERS = re.compile(r"[A-I](\s*,\s*[A-I])*")


def read_row(row: RawRow) -> Problem:
    """Return the problem of a row of dataset.json or of the hub's table, whose rows have no id but their place.

    A gold may name two letters ("A, C"). Raises UnusableRowError for the row without an answer (v1_382).
    """
    gold, question = str(row.get("answer") or "").strip(), text(row, "question")
    if not gold:
        raise UnusableRowError("answer_missing", "published without an answer", known=True)
    answer = unwrapped(gold)
    are_letters = _LETTERS.fullmatch(answer) is not None
    skills = first_of(row, "skill") or []
    skills = [skills] if isinstance(skills, str) else skills
    capability = first_of(row, "broad_capability", "capability")
    named = first_of(row, "key", "id", "index", "question_id", "_key")
    return problem_of(
        "logicvista",
        str(f"v1_{row.get('_number')}" if named is None else named),
        question,
        gold=answer,
        answer=answer,
        answer_type="choice" if are_letters else infer_answer_type(answer),
        choices=parse_choices(question) if are_letters else (),
        category=skills[0] if skills else "",
        meta={
            "reported_by": {"capability": capability} if capability else None,
            "skills": skills if len(skills) > 1 else None,
        },
    )


def facets(problem: Problem) -> dict[str, Any]:
    """Return the skills, which include the category where the row lists none, and the capabilities."""
    skills = problem.meta.get("skills") or ([problem.category] if problem.category else [])
    return {"skill": skills, "capability": problem.meta.get("reported_by", {}).get("capability", [])}


def official_rule(problem: Problem, response: Response) -> Judgement:
    """Compare the sets of letters."""
    text = _entry(response)
    if len(text) == 1:
        named = [text.lower()] if text.isnumeric() or text.lower() in "abcde" else []
    else:
        named = [letter.lower() for letter in final_letters(text)] or [final_answer(text).lower()]
    return _compared(problem, named)


def judge_dialogue(problem: Problem, response: Response) -> Generator[str, str, Judgement]:
    """Ask for the letters of a response; one that is empty, or a single sign but A to E or a digit, has none."""
    text = _entry(response)
    if not text or (len(text) == 1 and not text.isnumeric() and text.lower() not in "abcde"):
        return _compared(problem, [])
    # Not str.format: a brace in the question or in the response stays what it is.
    texts = {"question": question_text(problem), "entry": text}
    reply = yield re.sub(r"\{(question|entry)\}", lambda match: texts[match[1]], _JUDGE_PROMPT)
    return _compared(problem, sorted(letter.lower() for letter in _choices_in(reply)))


def _entry(response: Response) -> str:
    """Return the text that the authors' script judges: behind the mark of the assistant's turn, if there is one.

    An extraction that the file ships takes the place of the response.
    """
    text = response.text if response.extraction is None else response.extraction
    return (text.split("ASSISTANT:")[1] if "ASSISTANT:" in text else text).strip()


def _compared(problem: Problem, named: list[str]) -> Judgement:
    wanted = sorted(letter.lower() for letter in re.split(r"\s*,\s*", problem.answer))
    shown = ", ".join(named)
    return Judgement("correct" if named == wanted else "wrong", shown, f"{shown!r:.60} for {', '.join(wanted)}")


def _choices_in(reply: str) -> list[str]:
    """Return the list "choices" of the reply's JSON. Raises UnreadableReplyError if there is none."""
    match = re.search(r"\{.*\}", reply, re.DOTALL)
    try:
        choices = read_object(match[0])["choices"] if match else None
    except (ValueError, KeyError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise UnreadableReplyError('no JSON with a list of texts "choices"')
    return choices


# The prompt of the authors' eval/extract_accuracy.py, word for word, with LangChain's PydanticOutputParser's format
# instructions for their class Answer, which it appends. {question} and {entry} are put in.
_JUDGE_PROMPT = """
            You are a information extractor that extracts multiple choice letter answer choices
                from a paragraph that contains the answer choice and sometimes and explaination of why that choice is correct to the following question: "{question}"

                What letter did the following answer choose? If the answer did not select a letter answer choice, first try to infer the answer based off the given choices.
                If it does not seem like the given answer corresponds to an answer choice OR if there is no selected answer, please just respond with the string ZZZZZ.
                Make sure you answer with ONLY the letters chosen.
Here is what I need you to extract from:
The answer is "{entry}"
The output should be formatted as a JSON instance that conforms to the JSON schema below.

As an example, for the schema {"properties": {"foo": {"title": "Foo", "description": "a list of strings", "type": "array", "items": {"type": "string"}}}, "required": ["foo"]}
the object {"foo": ["bar", "baz"]} is a well-formatted instance of the schema. The object {"properties": {"foo": ["bar", "baz"]}} is not well-formatted.

Here is the output schema:
```
{"properties": {"choices": {"description": "multiple choice answer of a list of letters or numbers chosen by the given text", "items": {"type": "string"}, "title": "Choices", "type": "array"}}, "required": ["choices"]}
```
            Helpful Answer:
            """  # noqa: E501

BENCHMARK = Benchmark(
    name="logicvista",
    license="Apache-2.0",
    protocol=replace(VISION, split=Stated("test", "there is one")),
    files=BenchmarkFiles(
        hub="lscpku/LogicVista",
        tables=("dataset.json", "data/dataset.json", "**/{split}-*.parquet", "dataset*.json"),
        splits=("test",),
        num_rows=(448,),
        image_folder="images",
    ),
    rows=BenchmarkRows(read_row=read_row, images=one_image("image", "imagename"), response_ids=("_key", "key", "id")),
    rule=PublishedRule(
        judgement=official_rule,
        needs_judge_model=True,
        judge=PublishedJudge(
            "gpt-4",
            "Yijia-Xiao/LogicVista, eval/extract_accuracy.py, Apache-2.0; "
            "its format instructions are LangChain's, MIT",
            judge_dialogue,
            temperature=0.2,
            max_tokens=512,
        ),
        emulation="three of the authors' files of responses scored 32.7, 25.1 and 26.0 by rules, 32.6, 29.2 and 23.7 "
        "as published; that was before a letter that opens a response was read, and has not been measured again",
    ),
    report=BenchmarkReport(facets=facets),
)
