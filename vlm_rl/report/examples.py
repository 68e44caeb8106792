"""One problem and what several checkpoints said to it: the records side by side, and their HTML.

Used by the report and the demo, which therefore cannot disagree. Everything that a model or a data
set wrote goes through `escape`; images become data: addresses after our own decoder has opened them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlm_rl.report.html import VERDICT_MARKS, data_uri, escape, name_images, split_response
from vlm_rl.run.directory import EvalResult

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
]


@dataclass(frozen=True, slots=True)
class Sample:
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

    @property
    def correct(self) -> bool:
        return self.verdict == "correct"


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One problem with the samples of several checkpoints, in the order they were asked for."""

    problem_id: str
    question: str
    gold: str
    category: str
    images: tuple[bytes, ...]
    samples: tuple[Sample, ...]


def side_by_side(results: Sequence[EvalResult]) -> list[Example]:
    """The problems that all these evaluations hold, in the first one's order."""
    records = [_by_problem(result) for result in results]
    shared = [key for key in records[0] if all(key in others for others in records[1:])]
    return [_example(key, [one[key] for one in records]) for key in shared]


def choose(examples: Sequence[Example], count: int) -> list[Example]:
    """A fair handful from the first sample to the last: mended, spoilt, still wrong and still right ones.

    Half are problems that became right; the rest shows what went wrong too and the longest change.
    """
    kinds: dict[tuple[bool, bool], list[Example]] = defaultdict(list)
    for example in examples:
        kinds[example.samples[0].correct, example.samples[-1].correct].append(example)
    for kind in kinds.values():
        kind.sort(key=lambda e: -abs(e.samples[-1].length - e.samples[0].length))
    mended = kinds[False, True][: (count + 1) // 2]
    others = [kinds[True, False], kinds[False, False], kinds[True, True], kinds[False, True][len(mended) :]]
    rest = [kind[i] for i in range(count) for kind in others if i < len(kind)]
    return (mended + rest)[:count]


def problem_html(example: Example) -> str:
    """The problem's card: images, question, right answer."""
    pictures = "".join(_picture(image, number) for number, image in enumerate(example.images, 1))
    if not example.images:
        pictures = '<p class="quiet">no image stored with this record</p>'
    question = name_images(example.question, len(example.images))
    category = f"<span class='quiet'> · {escape(example.category)}</span>" if example.category else ""
    return (
        f"<div class='card problem'><div class='pictures'>{pictures}</div>"
        f"<p class='question'>{escape(question.strip())}</p>"
        f"<p class='gold'>right answer <b>{escape(example.gold)}</b></p>"
        f"<p class='quiet id'>{escape(example.problem_id)}{category}</p></div>"
    )


def sample_html(sample: Sample, title: str) -> str:
    """One checkpoint's card: verdict, length, reasoning, answer."""
    kind = sample.verdict if sample.verdict in VERDICT_MARKS else "wrong"
    mark = VERDICT_MARKS.get(sample.verdict, f"! {sample.verdict}")
    many = f"<span class='chip'>{sample.num_correct} of {sample.num_samples} samples right</span>"
    tokens = f"{sample.length:,} token{'' if sample.length == 1 else 's'}"
    cut = "<span class='chip cut'>cut at the limit</span>" if sample.truncated else ""
    reasoning = (
        "<p class='quiet'>no reasoning block</p>"
        if sample.reasoning is None
        else f"<div class='text reasoning' tabindex='0'>{escape(sample.reasoning) or '&nbsp;'}</div>"
    )
    answer = escape(sample.answer) or "<span class='quiet'>nothing after the reasoning</span>"
    found = "no answer found" if sample.extracted is None else f"graded as <b>{escape(sample.extracted)}</b>"
    return (
        f"<div class='card sample {kind}'><div class='head'><span class='title'>{escape(title)}</span>"
        f"<span class='chip {kind}'>{escape(mark)}</span><span class='chip'>{tokens}</span>"
        f"{cut}{many if sample.num_samples > 1 else ''}</div>"
        f"<p class='label'>reasoning</p>{reasoning}<p class='label'>answer</p>"
        f"<div class='text answer' tabindex='0'>{answer}</div>"
        f"<p class='quiet'>{found}: {escape(sample.reason)}</p></div>"
    )


def example_html(example: Example, titles: Sequence[str]) -> str:
    """The problem and its samples in one row."""
    samples = "".join(sample_html(sample, title) for sample, title in zip(example.samples, titles, strict=True))
    return f"<div class='example'>{problem_html(example)}<div class='samples'>{samples}</div></div>"


def _picture(image: bytes, number: int) -> str:
    address = data_uri(image)
    if address is None:
        return f"<p class='quiet'>image {number} does not open</p>"
    return f"<img src='{address}' alt='image {number} of the problem'>"


def _by_problem(result: EvalResult) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in result.rows(_COLUMNS).to_pylist():
        found[record["problem_id"]].append(record)
    for records in found.values():
        records.sort(key=lambda record: record["sample_index"])
    return found


def _example(problem_id: str, records: Sequence[Sequence[dict[str, Any]]]) -> Example:
    first = records[0][0]
    return Example(
        problem_id=problem_id,
        question=first["question"] or "",
        gold=first["gold"] or "",
        category=first["category"] or "",
        images=tuple(first["image"] or ()),
        samples=tuple(_sample(samples) for samples in records),
    )


def _sample(records: Sequence[dict[str, Any]]) -> Sample:
    first = records[0]
    reasoning, answer = split_response(first["response"])
    return Sample(
        reasoning=reasoning,
        answer=answer,
        extracted=first["extracted"],
        verdict=first["verdict"],
        reason=first["reason"] or "",
        length=first["length"],
        truncated=first["stop_reason"] == "length",
        num_correct=sum(record["verdict"] == "correct" for record in records),
        num_samples=len(records),
    )
