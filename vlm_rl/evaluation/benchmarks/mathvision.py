r"""MathVision (MathLLMs/MathVision, MIT): by subject and level; its published rule without running text as code.

The authors' evaluate.py takes a letter or a number from the usual closing phrases, else what follows "the answer is",
else the last \boxed{}. It strips LaTeX formatting and accepts the gold letter or its option's value if the texts, or
the values rounded to two digits, are equal. There the text becomes code; here it is parsed
(vlm_rl.evaluation.benchmarks.mathvision_values). Responses that the two may judge differently are marked.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vlm_rl.data.golds import infer_answer_type, with_choices
from vlm_rl.evaluation.benchmarks.benchmark import (
    Benchmark,
    BenchmarkFiles,
    BenchmarkReport,
    BenchmarkRows,
    Judgement,
    PublishedPrompt,
    PublishedRule,
    RawRow,
    Response,
    authors_gold,
)
from vlm_rl.evaluation.benchmarks.mathvision_values import is_beyond, value_of
from vlm_rl.evaluation.benchmarks.protocols import VISION, Stated
from vlm_rl.evaluation.benchmarks.raw_rows import gold_text, id_text, problem_of, text, texts, unwrapped
from vlm_rl.types import IMAGE_MARKER, Problem

_LETTERS = "ABCDE"
_PHRASES = ("the final answer is", "the answer is", "the correct answer is", "the answer should be")
_TEXT_LIMIT = 200_000

# What is taken out of an extracted answer, in this order.
_REMOVED: tuple[tuple[str, str], ...] = (
    *((" ", ""), ("\\,", ""), ("∞", "\\infty"), ("+\\infty", "\\infty"), ("\\\\", "\\"), ("\n", "")),
    *(("\\text", ""), ("\\mbox", ""), ("bmatrix", "pmatrix"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("{m}^3", ""), ("m^3", ""), ("{units}", ""), ("units", "")),
    *(("{km}", ""), ("km", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""), ("$", "")),
)
_PERCENT: tuple[tuple[str, str], ...] = (("\\%", ""), (" .", " 0."), ("{.", "{0."))
_BRACED_LETTERS = tuple((form.format(letter), letter) for form in ("({})", "{{{}}}") for letter in "abcde")
_WHOLE = re.compile(r"0|-?[1-9][0-9]*")


_NUMBERED_IMAGE = re.compile(r"<image\d+>")


def read_row(row: RawRow) -> Problem:
    """Return the problem of a row of test.jsonl, testmini.jsonl or the hub's table.

    There is one merged image per problem even where the text names several: the first `<imageN>` becomes the image,
    the others stay text.
    """
    options = texts(row, "options")
    gold = gold_text(row, "answer")
    gold = gold.strip() if options else gold
    question = _NUMBERED_IMAGE.sub(IMAGE_MARKER, text(row, "question"), count=1)
    if question and options:
        are_drawn = list(options) == list("ABCDE"[: len(options)])
        question = f"{question}\nChoices: {', '.join(options)}" if are_drawn else with_choices(question, options)
    answer = unwrapped(gold)
    return problem_of(
        "mathvision",
        id_text(row, "id"),
        question,
        gold=gold,
        answer=answer,
        answer_type="choice" if options else infer_answer_type(answer),
        choices=options,
        category=row.get("subject"),
        meta={"level": row.get("level")},
    )


def facets(problem: Problem) -> dict[str, Any]:
    """Return the subject and the level."""
    return {"subject": problem.category, "level": problem.meta.get("level", "")}


def official_rule(problem: Problem, response: Response) -> Judgement:
    """Compare the extracted answer with the gold letter, and with the value of its option."""
    extracted = published_extraction(response.text[:_TEXT_LIMIT])
    gold = authors_gold(problem)
    golds = [gold]
    place = ord(gold[0]) - ord("A") if problem.choices and gold else -1
    if 0 <= place < len(problem.choices):
        golds.append(problem.choices[place])
    for gold in golds:
        if is_equal(gold, extracted):
            reason = f"{extracted[:60]!r} equals {gold[:60]!r}"
            return Judgement("correct", extracted, reason, _doubt(golds, extracted))
    reason = f"{extracted[:60]!r} equals none of {golds!r:.120}"
    return Judgement("wrong", extracted, reason, _doubt(golds, extracted))


def _doubt(golds: list[str], extracted: str) -> str:
    """Say why the authors' symbolic reader may see a different value than ours; "" in the plain cases."""
    if any(extracted.strip().lower() == gold.strip().lower() for gold in golds):
        return ""
    odd = [text for text in (extracted, *golds) if is_beyond(text)]
    has_digit = re.search(r"\d", extracted) is not None
    return f"may differ: the value of {odd[0]!r:.60} depends on the reader" if odd and has_digit else ""


def published_extraction(response: str) -> str:
    """Return the answer that the published rule takes out of a response: lower case, without spaces."""
    text = _phrase(response.strip())
    text = _bare(text.lower().replace("{}", ""))
    for old, new in _BRACED_LETTERS:
        text = text.replace(old, new)
    return text.rstrip(".").lstrip(":").strip()


def _phrase(text: str) -> str:
    """Return the part of a response that holds its answer: a closing letter, a number, a phrase or the last box."""
    for letter in _LETTERS:
        starts = (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        if text.endswith((f" {letter}.", f" ({letter}).")) or text.startswith(starts):
            text = letter
    tail = text.split("is ")[-1].rstrip(".")
    if _is_float(tail):
        text = tail
    if "oxed{" in text:
        return "\\boxed{" + text.split("oxed{")[-1] if text.count("oxed{") > 1 else text
    for phrase in _PHRASES:
        for form in (phrase, phrase.replace("the", "The")):
            is_there = form in text
            text = text.split(form)[-1].strip()
            text = text.split("\n")[0].split(". ")[0] if is_there else text
    return text


def _bare(text: str) -> str:
    """Return the last side of the equation in the box (or in everything), without formatting and units."""
    start, end = text.find("oxed{"), text.rfind("}")
    if start >= 0 and start + 5 <= end:
        text = text[start + 5 : end]
    close, opening = text.find("}"), text.find("{")
    if close != -1 and (opening == -1 or close < opening):
        text = text.split("}")[0]
    text = text.split("=")[-1].split("\\approx")[-1]
    for old, new in _REMOVED:
        text = text.replace(old, new)
    text = text.split("\\text{ ")[0]
    for old, new in _PERCENT:
        text = text.replace(old, new)
    if text.startswith("."):
        text = f"0{text}"
    if text.count("\\approx") == 1:  # one that the removals above have put together
        text = text.split("\\approx")[1]
    if "sqrt" in text:
        text = _braced_fractions(_braced_roots(text).replace(" ", ""))
    text = text.replace(" ", "")
    if text == "0.5":
        return r"\frac{1}{2}"
    top, slash, bottom = text.partition("/")
    is_fraction = slash and _WHOLE.fullmatch(top) and _WHOLE.fullmatch(bottom)
    return rf"\frac{{{top}}}{{{bottom}}}" if is_fraction else text


def _braced_roots(text: str) -> str:
    r"""Write \sqrt3 as \sqrt{3}: the first character after each root, whatever it is."""
    first, *parts = text.split("\\sqrt")
    return first + "".join(
        rf"\sqrt{part}" if not part or part[0] == "{" else rf"\sqrt{{{part[0]}}}{part[1:]}" for part in parts
    )


def _braced_fractions(text: str) -> str:
    r"""Write \frac12 as \frac{1}{2}. A text in which fewer than two characters follow a \frac stays as it is."""
    braced, *parts = text.split("\\frac")
    for part in parts:
        if part.startswith("{"):
            braced += rf"\frac{part}"
        elif len(part) < 2:
            return text
        else:
            bottom = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            braced += rf"\frac{{{part[0]}}}{bottom}"
    return braced


def is_equal(gold: str, extracted: str) -> bool:
    """Compare as lower-case texts, as tuples of rounded values, and as values rounded to two digits."""
    gold, extracted = gold.lower(), extracted.lower()
    if not gold.replace(" ", "") or not extracted.replace(" ", ""):
        return False
    if gold.strip() == extracted.strip():
        return True
    gold, extracted = _evaluated_tuple(gold), _evaluated_tuple(extracted)
    if gold == extracted:
        return True
    values = value_of(gold), value_of(extracted)
    return values[0] is not None and values[1] is not None and round(values[0], 2) == round(values[1], 2)


def _evaluated_tuple(text: str) -> str:
    """Write `(2*3,1/2)` as `(6,0.5)` and `(6/2,1)` as `(3.0,1)`; other texts, or parts without a value, stay."""
    parts = text[1:-1].split(",")
    if len(parts) < 2 or (text[0], text[-1]) not in (("(", ")"), ("[", "]")):
        return text
    shown = []
    for part in parts:
        if "infty" in part or part in ("a", "-a"):
            shown.append(part)
            continue
        value = value_of(part)
        if value is None:
            return text
        shown.append(str(round(value, 2)))
    return f"{text[0]}{','.join(shown)}{text[-1]}"


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


BENCHMARK = Benchmark(
    name="mathvision",
    license="MIT",
    protocol=replace(VISION, split=Stated("test", "ours: the full 3,040; testmini is a tenth of them")),
    files=BenchmarkFiles(
        hub="MathLLMs/MathVision",
        hub_files=("data/*.parquet",),
        tables=("{split}.jsonl", "data/{split}.jsonl", "**/{split}-*.parquet", "*.jsonl"),
        splits=("testmini", "test"),
        num_rows=(304, 3040),
    ),
    rows=BenchmarkRows(read_row=read_row, response_ids=("id", "_key")),
    rule=PublishedRule(judgement=official_rule, needs_judge_model=False),
    report=BenchmarkReport(facets=facets),
    prompt=PublishedPrompt(
        "mathvision",
        "mathllm/MATH-V, MIT",
        before='Please solve the problem step by step and put your answer in one "\\boxed{}". If it is a multiple '
        'choice question, only one letter is allowed in the "\\boxed{}".\n',
    ),
)
