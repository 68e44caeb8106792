"""Word problems: their arithmetic, the held-out split, the traces and their styles."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.word_problems import (
    KINDS,
    LARGE,
    RIGHT_SHARE,
    SMALL,
    STUDY_SHARE,
    STYLES,
    TRACE_SHARE,
    NumberRanges,
    Style,
    make_problems,
    make_traces,
    style_of,
    trace,
)

TEMPLATE = TEMPLATES["think_answer"]
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def value(left: str, sign: str, right: str) -> Fraction:
    a, b = Fraction(left), Fraction(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign]


@pytest.mark.parametrize("numbers", [SMALL, LARGE])
def test_every_equation_is_true_and_the_last_gives_the_answer(numbers: NumberRanges) -> None:
    problems = make_problems(600, numbers, seed=1, split="train")
    for problem in problems:
        for text in (*problem.equations, *problem.check.split(", ")):
            match = EQUATION.fullmatch(text)
            assert match and value(*match.groups()[:3]) == int(match[4]), (problem, text)
        assert problem.equations[-1].endswith(f" = {problem.answer}")
        assert problem.answer >= 0
        numbers_in_question = set(re.findall(r"\d+", problem.question))
        first = EQUATION.fullmatch(problem.equations[0])
        assert first and {first[1], first[3]} <= numbers_in_question, problem
    assert len({problem.question for problem in problems}) == len({problem.id for problem in problems}) == 600
    forms = {re.sub(r"\d+|[A-Z]\w+", "", problem.reading).split(" of ")[0][:12] for problem in problems}
    assert len(forms) >= len(KINDS) - 1


def test_no_held_out_sum_is_in_another_split() -> None:
    held_out = {p.equations for p in make_problems(200, SMALL, seed=0, split="heldout")}
    for seed, split in ((0, "train"), (0, "traces"), (5, "train")):
        assert not held_out & {p.equations for p in make_problems(800, SMALL, seed=seed, split=split)}


def test_problems_and_traces_are_functions_of_their_seed() -> None:
    problems = make_problems(50, SMALL, seed=3, split="train")
    assert problems == make_problems(60, SMALL, seed=3, split="train")[:50]
    assert problems != make_problems(50, SMALL, seed=4, split="train")
    assert make_traces(problems, seed=3) == make_traces(problems, seed=3) != make_traces(problems, seed=4)


@pytest.mark.parametrize("style", STYLES)
def test_traces_have_the_form_their_style_and_its_share_of_right_answers(style: Style) -> None:
    rng = np.random.default_rng(0)
    problems = make_problems(1500, SMALL, seed=0, split="train")
    right = 0
    for problem in problems:
        text = trace(problem, style, rng)
        assert TEMPLATE.is_well_formed(text) and style_of(text) == style
        (answer,) = TEMPLATE.answers(TEMPLATE.answer_region(text) or "") or [""]
        assert text.count(answer) >= 2  # the reasoning ends with what the box holds
        right += answer == str(problem.answer)
    share = RIGHT_SHARE[style]  # a wrong answer below zero becomes zero, which may be right: under 1 %
    assert abs(right / 1500 - share) < 4 * (share * (1 - share) / 1500) ** 0.5 + 0.01


@pytest.mark.parametrize("shares", [TRACE_SHARE, STUDY_SHARE])
def test_styles_come_in_their_shares(shares: dict[Style, float]) -> None:
    texts = make_traces(make_problems(2000, SMALL, seed=0, split="train"), seed=0, shares=shares)
    for style in STYLES:
        share = sum(style_of(text) == style for text in texts) / len(texts)
        assert abs(share - shares.get(style, 0)) < 4 * (0.25 / 2000) ** 0.5


@pytest.mark.parametrize("numbers", [SMALL, LARGE])
def test_the_control_is_as_long_as_a_check_and_as_often_right_as_the_equations(numbers: NumberRanges) -> None:
    problems, rng = make_problems(400, numbers, seed=2, split="train"), np.random.default_rng(1)
    checked, retold = (
        np.mean([len(trace(problem, style, rng).split()) for problem in problems]) for style in ("checked", "retold")
    )
    assert 0.85 < retold / checked < 1.15
    assert RIGHT_SHARE["retold"] == RIGHT_SHARE["equations"] < RIGHT_SHARE["checked"]


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("", "guess"),
        ("<think>That must be 7.</think>", "guess"),
        ("<think>Let me check. It is 7.</think>", "guess"),
        ("<think>3 + 4 = 7. So it is 7.", "equations"),
        ("<think>3 + 4 = 7. I CHECK it: 7 - 4 = 3.</think>", "checked"),
    ],
)
def test_the_style_of_any_response_is_told(text: str, style: Style) -> None:
    assert style_of(text) == style
