r"""The official rules against second implementations of them, on thousands of responses to annotated problems.

Each oracle below is written from the published description alone, step after step. It shares nothing with
vlm_rl.evaluation.benchmarks but MathVision's values. tests/evaluation/latex_values.jsonl holds those to what
latex2sympy2 1.9.1 and Python make of the same texts: [text, value rounded to two digits], null where that raises.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_rl.evaluation.benchmarks import dynamath, mathvision, mathvista, wemath
from vlm_rl.evaluation.benchmarks.benchmark import Response, authors_gold
from vlm_rl.evaluation.benchmarks.mathvision_values import is_beyond, value_of
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.types import Problem

VALUES = [json.loads(line) for line in (Path(__file__).parent / "latex_values.jsonl").open(encoding="utf-8")]
WORDS = [
    "",
    " ",
    "x",
    "7",
    "12",
    "-3",
    "0.5",
    "2.50",
    "1,000",
    "1/2",
    "None",
    "five",
    "B",
    "(C)",
    "e",
    "no",
    "π",
    "2π",
]
TIES = {r"35.1\%5"}  # 1.755, which two orders of multiplication round differently


Annotated = Callable[[str], list[Problem]]


# -- MathVision ------------------------------------------------------------------------------------------


def test_texts_have_the_values_that_the_published_reader_gave() -> None:
    """Where they have not, the row is marked; type and rounded value, since tuples are compared as texts."""
    differ = set()
    for text, value in VALUES:
        ours = value_of(text)
        ours = None if ours is None else round(ours, 2)
        if (ours, type(ours)) != (value, type(value)):
            differ.add(text)
    assert len(VALUES) > 1000 and len(differ) < 0.03 * len(VALUES)
    assert {text for text in differ if not is_beyond(text)} <= TIES


def number_like(text: str) -> bool:
    try:
        return float(text) is not None
    except ValueError:
        return False


def oracle_extract(response: str) -> str:
    """The steps of the authors' evaluate.py and of find_math_answer, in their order."""
    answer = response.strip()
    for c in "ABCDE":
        if re.search(rf" (\({c}\)|{c})\.\Z", answer) or re.match(rf"({c}|\({c}\)|\({c}\) {c})\n", answer):
            answer = c
    last = re.split("is ", answer)[-1].rstrip(".")
    answer = last if number_like(last) else answer
    if "oxed{" not in answer:
        for middle in ("the final answer is", "the answer is", "the correct answer is", "the answer should be"):
            for flag in (middle, "T" + middle[1:]):
                pieces = answer.split(flag)
                answer = pieces[-1].strip()
                if len(pieces) > 1:
                    answer = answer.split("\n")[0].split(". ")[0]
    elif len(answer.split("oxed{")) > 2:
        answer = r"\boxed{" + answer.split("oxed{")[-1]
    answer = answer.lower().replace("{}", "")
    if box := re.search(r"oxed\{(.*)\}", answer, flags=re.DOTALL):
        answer = box[1]
    if match := re.match(r"([^{}]*)\}", answer):
        answer = match[1]
    answer = re.split("=", answer)[-1].split("\\approx")[-1]
    for gone in (" ", "\\,"):
        answer = answer.replace(gone, "")
    answer = answer.replace("∞", "\\infty").replace("+\\infty", "\\infty").replace("\\\\", "\\")
    for gone in ("\n", "\\text", "\\mbox"):
        answer = answer.replace(gone, "")
    answer = answer.replace("bmatrix", "pmatrix")
    for gone in (
        "\\left",
        "\\right",
        "^{\\circ}",
        "^\\circ",
        "{m}^3",
        "m^3",
        "{units}",
        "units",
        "{km}",
        "km",
        "\\!",
    ):
        answer = answer.replace(gone, "")
    answer = answer.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for gone in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$"):
        answer = answer.replace(gone, "")
    answer = answer.split("\\text{ ")[0].replace("\\%", "").replace("{.", "{0.")
    answer = oracle_dress("0" + answer if answer.startswith(".") else answer)
    for letter in "abcde":
        answer = answer.replace(f"({letter})", letter)
    for letter in "abcde":
        answer = answer.replace(f"{{{letter}}}", letter)
    return answer.rstrip(".").lstrip(":").strip()


def oracle_dress(text: str) -> str:
    """Braces for what is bare behind a root or, in texts with a root, a fraction; one half; a/b."""
    if text.count("\\approx") == 1:
        text = text[text.index("\\approx") + 7 :]
    if "sqrt" in text:
        pieces = text.split("\\sqrt")
        text = pieces[0]
        for piece in pieces[1:]:
            text += "\\sqrt" + ("{" + piece[:1] + "}" + piece[1:] if piece and piece[0] != "{" else piece)
        pieces = text.split("\\frac")
        if all(piece[:1] == "{" or len(piece) >= 2 for piece in pieces[1:]):
            for i, piece in enumerate(pieces[1:], start=1):
                if piece[0] != "{":
                    bottom = piece[1:] if piece[1] == "{" else "{" + piece[1] + "}" + piece[2:]
                    pieces[i] = "{" + piece[0] + "}" + bottom
            text = "\\frac".join(pieces)
    if text == "0.5":
        return "\\frac{1}{2}"
    parts = text.split("/")
    if len(parts) == 2 and all(re.fullmatch("[+-]?[0-9]+", part) and str(int(part)) == part for part in parts):
        return "\\frac{" + parts[0] + "}{" + parts[1] + "}"
    return text


def oracle_equal(gold: str, found: str) -> bool:
    gold, found = gold.lower(), found.lower()
    if not gold.strip(" ") or not found.strip(" "):
        return False
    if gold.strip() == found.strip():
        return True
    shown = []
    for text in (gold, found):
        parts = text[1:-1].split(",")
        if len(parts) > 1 and text[0] + text[-1] in ("()", "[]"):
            values = [part if "infty" in part or part in ("a", "-a") else value_of(part) for part in parts]
            if None not in values:
                texts = [value if isinstance(value, str) else str(round(value, 2)) for value in values]  # type: ignore[arg-type]
                text = text[0] + ",".join(texts) + text[-1]
        shown.append(text)
    values = [value_of(text) for text in shown]
    return shown[0] == shown[1] or (None not in values and round(values[0], 2) == round(values[1], 2))  # type: ignore[arg-type]


FORMS = (
    *(
        "{0}",
        "{0}.",
        "The answer is {0}.",
        "So the final answer is: {0}\nI hope",
        "\\boxed{{{0}}}",
        "$\\boxed{{{0}}}$.",
    ),
    *("\\boxed{{{1}}} no, \\boxed{{{0}}}", "({0})", "({0})\nsince {1}", "{0}\nsince {1}", "it is ({0}).", "x = {0}"),
    *(
        "The correct answer is ({0}). Not {1}. ",
        "\\boxed{{\\text{{{0}}}}}",
        "area is {0} km",
        "{0}\\%",
        "\\boxed{{({0})}}",
    ),
    *(
        "\\[ \\boxed{{{1} = {0}^{{\\circ}}}} \\]",
        "the answer should be ${0}$. Or {1}",
        "\\approx {0}",
        "\\boxed{{{0}",
    ),
    *(
        "({0}) {0}\nor {1}",
        "The answer is \\frac{{{0}}}2 \\sqrt{0}",
        "({0},{1})",
        "({0}, {1}/1)",
        "{0}:{1}",
        "\\boxed{{}} {0}",
    ),
)


def test_mathvision_decides_as_its_published_rule(annotated: Annotated) -> None:
    draw = random.Random(0)
    problems = annotated("mathvision")
    golds = [text for problem in problems for text in (authors_gold(problem), *problem.choices)]
    golds += [text for text, _ in VALUES[:400]] + WORDS
    num_right = 0
    for number in range(3000):
        problem = problems[number % len(problems)]
        gold = authors_gold(problem)
        own = [gold, *problem.choices, draw.choice("ABCDE")]
        response = draw.choice(FORMS).format(draw.choice([*own, draw.choice(golds)]), draw.choice([*own, *WORDS]))
        extracted = oracle_extract(response)
        assert mathvision.published_extraction(response) == extracted, response
        accepted = [gold] + ([problem.choices[ord(gold) - 65]] if problem.choices else [])
        right = any(oracle_equal(text, extracted) for text in accepted)
        judged = mathvision.official_rule(problem, Response(problem.id, response))
        assert (judged.verdict == "correct") is right, (response, accepted)
        num_right += right
    assert 400 < num_right < 2600  # both verdicts are tried


@given(
    st.lists(
        st.sampled_from([*"ABC {}()=.,:/\n$", "\\boxed{", "}", "The answer is", "is ", "\\frac", "\\sqrt", "12"])
    )
)
@settings(max_examples=200)
def test_mathvision_extracts_from_any_text_as_its_published_rule(pieces: list[str]) -> None:
    assert mathvision.published_extraction("".join(pieces)) == oracle_extract("".join(pieces))


# -- MathVista -------------------------------------------------------------------------------------------


@cache
def distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))


def oracle_mathvista(problem: Problem, extraction: str) -> bool:
    gold = authors_gold(problem)
    if problem.choices:
        text = extraction.strip()
        text = next((letter.upper() for letter in re.findall(r"\(([A-Za-z])\)", text)), text)
        letters = {chr(65 + place): choice for place, choice in enumerate(problem.choices)}
        near = sorted(range(len(problem.choices)), key=lambda i: (distance(text, problem.choices[i]), i))
        return letters.get(text, problem.choices[near[0]]) == gold
    try:
        if problem.answer_type == "integer":
            return f"{math.trunc(float(extraction))}" == gold
        if problem.answer_type == "float":
            return str(round(float(extraction), problem.meta["precision"])) == gold
    except (ValueError, OverflowError):
        return False
    return extraction == gold


def test_mathvista_normalises_as_its_published_rule(annotated: Annotated) -> None:
    draw = random.Random(1)
    problems = annotated("mathvista")
    num_right = 0
    for number in range(3000):
        problem = problems[number % len(problems)]
        gold = authors_gold(problem)
        texts = [gold, gold[:-1], *problem.choices, "B", "(b)", "d", "Z", "(Z) x", "A.", *WORDS]
        texts += [f"{gold}{tail}" for tail in ("1", ".4", " cm", "e2")]
        extraction = draw.choice(texts)[:12]
        judged = mathvista.official_rule(problem, Response(problem.id, "?", extraction=extraction))
        right = judged.verdict == "correct"
        assert right is oracle_mathvista(problem, extraction), (gold, problem.choices, extraction)
        num_right += right
    assert 600 < num_right < 2400


# -- We-Math, DynaMath -----------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["Answer", "answer", ":", "<", ">", ".", " ", "\n", *"ABHIa(", "**"])))
def test_wemath_reads_the_letter_as_its_published_rule(pieces: list[str]) -> None:
    response = "".join(pieces)
    tail = re.sub("[<>:.]", "", re.split("Answer", response)[-1].strip()).strip()
    letter = tail[:1] if re.match("[A-H]", tail) else None
    for gold in "ABH":
        judged = wemath.official_rule(Problem("x", "?", (), gold, "choice"), Response("x", response))
        assert (judged.extracted, judged.verdict == "correct") == (letter, letter == gold)


def oracle_dynamath(kind: str, gold: str, response: str) -> bool:
    """The evaluation script for open models: JSON from the first to the last brace, else the last line."""
    body = response
    if match := re.search(r"\{.*\}", response, flags=re.DOTALL):
        body = match[0].replace("\\", "")
    try:
        reply = json.loads(body, strict=False)
        short = str(reply.get("short answer"))
    except ValueError:
        short = re.split("\n", body)[-1][:-1]
    except AttributeError:  # JSON that is not an object fails as a whole
        return False
    if kind == "multiple choice":
        return short == gold if len(short) == 1 else gold in short[:3]
    if kind == "text":
        return gold in short
    word = short if short.isdigit() else short.split(" ")[0]
    try:
        value = float(word.split("π")[0]) * (math.pi if "π" in word else 1)
        return abs(value - float(gold)) <= 0.001
    except ValueError:
        return False


def test_dynamath_decides_as_its_published_rule(annotated: Annotated) -> None:
    draw = random.Random(2)
    problems = annotated("dynamath")
    forms = (
        *(
            '{{"solution": "s", "short answer": "{0}"}}',
            '```json\n{{"solution": "\\frac", "short answer": "{0}"}}\n```',
        ),
        *('{{"short answer": {0}}}', "so\n{0}.", "{0}", '{{"answer": "{0}"}}', '"{0}"', "}}{0}{{", "{{{0}", "{0}\n"),
    )
    num_right = 0
    for number in range(4000):
        problem = problems[number % len(problems)]
        gold, (kind,) = authors_gold(problem), BENCHMARKS["dynamath"].facet_values(problem)["answer_type"]
        texts = [gold, f"{gold} cm", f"({gold})", f"not {gold}", f"{gold}1", draw.choice(WORDS)]
        if kind == "float":
            texts += [str(float(gold) + by) for by in (0.0009, 0.0011, -0.0009)]
        response = draw.choice(forms).format(draw.choice(texts))
        right = dynamath.official_rule(problem, Response(problem.id, response)).verdict == "correct"
        assert right is oracle_dynamath(kind, gold, response), (kind, gold, response)
        num_right += right
    assert 800 < num_right < 3200


@pytest.mark.parametrize("name", ["mathvision", "dynamath", "wemath"])
def test_a_rule_needs_no_judge_model(name: str) -> None:
    assert not BENCHMARKS[name].rule.needs_judge_model
