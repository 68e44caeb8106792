"""What scoring works on: a benchmark's questions, somebody's answers to them, and the verdicts.

Light on purpose: no torch, no model, no images. A question's `facets` are what its benchmark reports by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vlm_rl.types import AnswerType, Verdict

Mode = Literal["strict", "official"]


@dataclass(frozen=True, slots=True)
class Question:
    """One annotated row of a benchmark."""

    id: str  # the authors' own, unique in the benchmark
    gold: str
    answer_type: AnswerType
    choices: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)  # precision, tolerance, unit: as the grader reads them
    facets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # "task" -> values; several for skills
    problem: str = ""  # rows of one problem are scored together (We-Math's steps, DynaMath's variants)
    part: str = ""  # which step or variant this is
    other_golds: tuple[str, ...] = ()  # alternatives that are as right as `gold`


@dataclass(frozen=True, slots=True)
class Answer:
    """One response to a question, with whatever its file says about it."""

    id: str
    text: str
    sample: int = 0  # 0 .. k-1
    extraction: str | None = None  # what the authors' judge model took out of the response, where it is shipped
    published: bool | None = None  # the file's own verdict
    gold: str | None = None  # what the file says is right, to notice answers to other questions
    length: int | None = None  # tokens
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """A rule's opinion on one answer."""

    verdict: Verdict
    extracted: str | None
    reason: str
    note: str = ""  # "free point", or why the authors' own code may judge this row otherwise


@dataclass(frozen=True, slots=True)
class Row:
    """A judged answer: what every number is computed from."""

    question: Question
    answer: Answer
    judgement: Judgement
    has_box: bool

    @property
    def right(self) -> bool:
        return self.judgement.verdict == "correct"
