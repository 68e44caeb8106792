"""Word problems in plain language, and traces that solve them in three styles.

    Tom has 3 boxes with 7 pens each and loses 4 pens. How many pens are left?

There are six kinds of one or two sums. A trace is a guess, the equations, or the equations with a check of the first
one. The styles are right in different shares, so a policy that has learned all three has something to choose. SMALL
numbers are meant to make a check worth its length; with LARGE ones every further sum is a further chance to err. A
study adds a control: the question told again twice before the equations, as long as a check and no more often right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_task import keyed_rng

NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Eva", "Leo", "Zoe", "Ivan", "Nora")
THINGS = ("apples", "marbles", "cards", "stickers", "books", "pens", "coins", "shells", "stamps", "beads")
ERRORS = (-10, -3, -2, -1, 1, 2, 3, 10)  # what a wrong trace adds to the right answer

Style = Literal["guess", "equations", "checked", "retold"]
STYLES: tuple[Style, ...] = ("guess", "equations", "checked", "retold")
RIGHT_SHARE: dict[Style, float] = {"guess": 0.2, "equations": 0.85, "checked": 0.97, "retold": 0.85}
TRACE_SHARE: dict[Style, float] = {"guess": 0.5, "equations": 0.25, "checked": 0.25}
"""Style -> its share of the traces that a policy starts from."""
STUDY_SHARE: dict[Style, float] = {"guess": 0.4, "equations": 0.2, "checked": 0.2, "retold": 0.2}
"""The same with the control, for a study of length."""


@dataclass(frozen=True, slots=True)
class NumberRanges:
    """The ranges of a problem's numbers, both ends included."""

    total: tuple[int, int]  # what somebody has, or finds
    part: tuple[int, int]  # what is given away, or is in a box
    groups: tuple[int, int]  # boxes, bags or friends

    def sample(self, rng: np.random.Generator) -> tuple[int, int, int]:
        """Sample a total, a part and a number of groups."""
        a, b, c = (int(rng.integers(low, high, endpoint=True)) for low, high in (self.total, self.part, self.groups))
        return a, b, c


SMALL = NumberRanges((3, 30), (2, 12), (2, 5))
LARGE = NumberRanges((12, 80), (6, 29), (3, 9))


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A problem and what its traces say."""

    id: str
    question: str
    answer: int
    equations: tuple[str, ...]  # one or two, in order
    reading: str  # the question, told again
    check: str  # the first equation, computed in a different way


@dataclass(frozen=True, slots=True)
class _Scene:
    """Who has how many of what; `lost` is below part * groups."""

    name: str
    friend: str
    things: str
    total: int
    part: int
    groups: int
    lost: int


_Told = tuple[str, int, tuple[str, ...], str, str]  # question, answer, equations, reading, check


def _buys(s: _Scene) -> _Told:
    a, b = s.total, s.part
    question = f"{s.name} has {a} {s.things} and buys {b} more. How many {s.things} does {s.name} have now?"
    reading = f"{s.name} starts with {a} {s.things} and gets {b} more"
    return question, a + b, (f"{a} + {b} = {a + b}",), reading, f"{a + b} - {b} = {a}"


def _gives(s: _Scene) -> _Told:
    left, b = s.total, s.part
    a = left + b
    question = (
        f"{s.name} has {a} {s.things} and gives {b} to {s.friend}. How many {s.things} does {s.name} have left?"
    )
    reading = f"{s.name} has {a} {s.things} and {b} of them go to {s.friend}"
    return question, left, (f"{a} - {b} = {left}",), reading, f"{left} + {b} = {a}"


def _bags(s: _Scene) -> _Told:
    b, c = s.part, s.groups
    question = (
        f"{s.name} has {c} bags with {b} {s.things} in each bag. How many {s.things} does {s.name} have in total?"
    )
    return (
        question,
        b * c,
        (f"{c} * {b} = {b * c}",),
        f"there are {c} bags and each holds {b} {s.things}",
        added(c, b),
    )


def _finds(s: _Scene) -> _Told:
    a, b, c = s.total, s.part, s.groups
    question = (
        f"{s.name} has {c} boxes with {b} {s.things} each and finds {a} more {s.things}. "
        f"How many {s.things} does {s.name} have altogether?"
    )
    reading = f"there are {c} boxes with {b} {s.things} each and {a} more {s.things}"
    return question, b * c + a, (f"{c} * {b} = {b * c}", f"{b * c} + {a} = {b * c + a}"), reading, added(c, b)


def _shares(s: _Scene) -> _Told:
    b, c = s.part, s.groups
    question = (
        f"{s.name} shares {b * c} {s.things} equally among {c} friends. How many {s.things} does each friend get?"
    )
    return question, b, (f"{b * c} / {c} = {b}",), f"{b * c} {s.things} go to {c} friends", f"{c} * {b} = {b * c}"


def _loses(s: _Scene) -> _Told:
    b, c, d = s.part, s.groups, s.lost
    question = (
        f"{s.name} has {c} boxes with {b} {s.things} each and loses {d} {s.things}. How many {s.things} are left?"
    )
    reading = f"there are {c} boxes with {b} {s.things} each and {d} {s.things} are lost"
    return question, b * c - d, (f"{c} * {b} = {b * c}", f"{b * c} - {d} = {b * c - d}"), reading, added(c, b)


KINDS: tuple[Callable[[_Scene], _Told], ...] = (_buys, _gives, _bags, _finds, _shares, _loses)


def added(count: int, number: int) -> str:
    """Write count * number as sums: 3 * 7 is "7 + 7 = 14, 14 + 7 = 21"."""
    return ", ".join(f"{number * n} + {number} = {number * (n + 1)}" for n in range(1, count))


def make_problems(count: int, numbers: NumberRanges, *, seed: int, split: str) -> list[WordProblem]:
    """Return `count` different problems, a function of the arguments.

    The equations of the split "heldout" are in no other split, whatever the seeds and sizes.
    """
    problems: dict[str, WordProblem] = {}
    rng = keyed_rng(seed, "words", split)
    while len(problems) < count:
        problem = _make_problem(rng, numbers, f"words-{split}-{len(problems)}")
        if _is_held_out(problem) == (split == "heldout"):
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def _make_problem(rng: np.random.Generator, numbers: NumberRanges, name: str) -> WordProblem:
    tell = KINDS[int(rng.integers(len(KINDS)))]
    first, second = (NAMES[int(i)] for i in rng.choice(len(NAMES), size=2, replace=False))
    total, part, groups = numbers.sample(rng)
    lost = int(rng.integers(1, part * groups))
    things = THINGS[int(rng.integers(len(THINGS)))]
    return WordProblem(name, *tell(_Scene(first, second, things, total, part, groups, lost)))


def _is_held_out(problem: WordProblem) -> bool:
    """Assign an eighth of all lists of equations to the held-out split."""
    return int(keyed_rng(0, "words", *problem.equations).integers(8)) == 0


def trace(problem: WordProblem, style: Style, rng: np.random.Generator) -> str:
    """Return a response of this style in the template think_answer; it is right with probability RIGHT_SHARE."""
    answer = problem.answer
    if rng.random() >= RIGHT_SHARE[style]:
        answer = max(0, answer + ERRORS[int(rng.integers(len(ERRORS)))])
    if style == "guess":
        guesses = f"It looks like about {answer}.", f"I think it is {answer}.", f"That must be {answer}."
        text = guesses[int(rng.integers(len(guesses)))]
    elif style == "equations":
        text = f"{'. Then '.join(problem.equations)}. So it is {answer}."
    elif style == "retold":
        text = (
            f"Let me read the question again: {problem.reading}. I read it once more, slowly, so no word is lost: "
            f"{problem.reading}. That is all that the question says. Now {'. Then '.join(problem.equations)}. "
            f"So it is {answer}."
        )
    else:
        first, *then = problem.equations
        text = (
            f"Let me read the question again: {problem.reading}. First I compute {first}. Let me check that step: "
            f"{problem.check}. That is right. {''.join(f'Next, {equation}. ' for equation in then)}"
            f"I check the whole once more, and it fits the question. So the answer is {answer}."
        )
    return TEMPLATES["think_answer"].wrap(text, str(answer))


def make_traces(problems: list[WordProblem], *, seed: int, shares: Mapping[Style, float] = TRACE_SHARE) -> list[str]:
    """Return a response to each problem, its style sampled with the probabilities of `shares`, which sum to 1."""
    rng = keyed_rng(seed, "word traces")
    styles = list(shares)
    chosen = rng.choice(len(styles), size=len(problems), p=list(shares.values()))
    return [trace(problem, styles[int(style)], rng) for problem, style in zip(problems, chosen, strict=True)]


def style_of(response: str) -> Style:
    """Tell the style of a response, that of a model too: without an equation it is a guess."""
    text = response.lower()
    if " = " not in text:
        return "guess"
    if "check" in text:
        return "checked"
    return "retold" if "read the question again" in text else "equations"
