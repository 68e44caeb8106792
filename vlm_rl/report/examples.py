"""One problem and what several checkpoints answered: the records side by side, and a fair choice of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from vlm_rl.report.html import VERDICT_MARKS, data_uri, macros, name_images, split_response
from vlm_rl.run.eval_result import EvalResult
from vlm_rl.run.turn_record import StoredTurn, read_turns

_PARTS = macros("vlm_rl.report", "parts.html")

_COLUMNS = [
    "problem_id",
    "sample_index",
    "response",
    "length",
    "stop_reason",
    "extracted",
    "gold",
    "verdict",
    "reason",
    "category",
    "image",
    "question",
    "turns",
]


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """What one checkpoint answered; of several samples the first, with the count of right ones."""

    reasoning: str | None  # None: no reasoning block
    answer: str  # the response after the reasoning
    extracted: str | None
    verdict: str
    reason: str
    length: int
    truncated: bool
    num_correct: int
    num_samples: int
    earlier: tuple[StoredTurn, ...] = ()  # of an episode, each with the environment's answer

    @property
    def correct(self) -> bool:
        """Tell whether the verdict is `correct`; all others count as wrong."""
        return self.verdict == "correct"

    @property
    def kind(self) -> str:
        """Return the style class of the verdict; an unknown one counts as wrong."""
        return self.verdict if self.verdict in VERDICT_MARKS else "wrong"

    @property
    def mark(self) -> str:
        """Return the sign and words of the verdict; an unknown one is named as it is."""
        return VERDICT_MARKS.get(self.verdict, f"! {self.verdict}")


@dataclass(frozen=True, slots=True, eq=False)
class ProblemExample:
    """One problem with the answers of several checkpoints, in the order they were asked for."""

    problem_id: str
    question: str
    gold: str
    category: str
    images: tuple[bytes, ...] | None  # None: too many were evaluated to store them
    samples: tuple[SampleAnswer, ...]

    @property
    def addresses(self) -> list[str | None]:
        """Return the images as data: addresses; None for one that does not open."""
        return [data_uri(image) for image in self.images or ()]

    @property
    def readable_question(self) -> str:
        """Return the question with its image markers numbered, or without the only one."""
        return name_images(self.question, len(self.images or ())).strip()


def side_by_side(results: Sequence[EvalResult]) -> list[ProblemExample]:
    """Return the problems that all these evaluations hold, in the first one's order."""
    records = [_by_problem(result) for result in results]
    shared = [key for key in records[0] if all(key in others for others in records[1:])]
    return [_example(key, [by_problem[key] for by_problem in records]) for key in shared]


def choose(examples: Sequence[ProblemExample], count: int) -> list[ProblemExample]:
    """Return a fair handful: problems that became right, became wrong, stayed wrong and stayed right.

    Half are problems that became right between the first answer and the last. Within a kind the largest changes in
    length come first.
    """
    kinds: dict[tuple[bool, bool], list[ProblemExample]] = defaultdict(list)
    for example in examples:
        kinds[example.samples[0].correct, example.samples[-1].correct].append(example)
    for kind in kinds.values():
        kind.sort(key=lambda e: -abs(e.samples[-1].length - e.samples[0].length))
    gained = kinds[False, True][: (count + 1) // 2]
    others = [kinds[True, False], kinds[False, False], kinds[True, True], kinds[False, True][len(gained) :]]
    rest = [kind[i] for i in range(count) for kind in others if i < len(kind)]
    return (gained + rest)[:count]


def example_html(example: ProblemExample, titles: Sequence[str]) -> Markup:
    """Return the problem's card and its answers' cards in one row, one title per answer."""
    assert len(titles) == len(example.samples)
    return _PARTS.example(example, titles)


def _by_problem(result: EvalResult) -> dict[str, list[dict[str, Any]]]:
    problems: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in result.rows(_COLUMNS).to_pylist():
        problems[record["problem_id"]].append(record)
    for records in problems.values():
        records.sort(key=lambda record: record["sample_index"])
    return problems


def _example(problem_id: str, records: Sequence[Sequence[dict[str, Any]]]) -> ProblemExample:
    first = records[0][0]
    return ProblemExample(
        problem_id=problem_id,
        question=first["question"] or "",
        gold=first["gold"] or "",
        category=first["category"] or "",
        images=None if first["image"] is None else tuple(first["image"]),
        samples=tuple(_sample(samples) for samples in records),
    )


def _sample(records: Sequence[dict[str, Any]]) -> SampleAnswer:
    first = records[0]
    reasoning, answer = split_response(first["response"])
    return SampleAnswer(
        reasoning=reasoning,
        answer=answer,
        extracted=first["extracted"],
        verdict=first["verdict"],
        reason=first["reason"] or "",
        length=first["length"],
        truncated=first["stop_reason"] == "length",
        num_correct=sum(record["verdict"] == "correct" for record in records),
        num_samples=len(records),
        earlier=tuple(read_turns(first.get("turns"))[:-1]),
    )
