"""Judge answers to a benchmark's questions by one of two rules, and sum up.

strict: the final box after the reasoning, compared by this project's grader; no box is wrong. official: the
benchmark's published rule; where that needs a judge model, rules stand in for it and the label says emulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.items import Answer, Judgement, Mode, Question, Row
from vlm_rl.evaluation.benchmarks.metrics import facet_tables, headline_parts, health, scores
from vlm_rl.evaluation.benchmarks.registry import Benchmark
from vlm_rl.grading.grader import GRADER_VERSION, Grader, GradeTask
from vlm_rl.templates import TEMPLATES, Template, boxes


def matched(
    benchmark: Benchmark, questions: Sequence[Question], answers: Sequence[Answer]
) -> tuple[list[Answer], list[str]]:
    """The answers that belong to a question, and the ids of the others. Raises UserError where none belongs.

    So it does for files that say themselves that they answer other questions.
    """
    known = {question.id: question for question in questions}
    kept = [answer for answer in answers if answer.id in known]
    if not kept:
        raise UserError(
            f"none of the {len(answers)} responses belongs to one of the {len(known)} annotated questions of "
            f"{benchmark.name}: the responses' ids begin {', '.join(answer.id for answer in answers[:3])}, "
            f"the annotations' {', '.join(question.id for question in questions[:3])}: do the files fit each other?"
        )
    other = [answer for answer in kept if answer.gold not in (None, known[answer.id].gold)]
    if 10 * len(other) > len(kept):
        first = other[0]
        raise UserError(
            f"{len(other)} of {len(kept)} responses name another right answer than the annotations, as {first.id}: "
            f"{first.gold!r} and {known[first.id].gold!r}: they answer other questions. Is a file taken for another "
            "trial's? Name each by its trial (trial3.json), or give its rows a column trial"
        )
    return kept, sorted({answer.id for answer in answers if answer.id not in known})


def judge_all(
    benchmark: Benchmark,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    *,
    mode: Mode,
    grader: Grader,
    template: Template,
) -> list[Row]:
    """The answers in their order, each with its question and verdict; all of them belong to one (see `matched`)."""
    known = {question.id: question for question in questions}
    pairs = [(known[answer.id], answer) for answer in answers]
    if mode == "official":
        opinions = [benchmark.judge(question, answer) for question, answer in pairs]
        texts = [(i, opinion) for i, opinion in enumerate(opinions) if isinstance(opinion, str)]
        wrapped = [(pairs[i][0], rf"\boxed{{{text}}}") for i, text in texts]
        graded = dict(zip((i for i, _ in texts), _grade(wrapped, grader, TEMPLATES["plain"]), strict=True))
        judged = [opinion if isinstance(opinion, Judgement) else graded[i] for i, opinion in enumerate(opinions)]
    else:
        judged = _grade([(question, answer.text) for question, answer in pairs], grader, template)
    return [
        Row(question, answer, judgement, bool(boxes(answer.text)))
        for (question, answer), judgement in zip(pairs, judged, strict=True)
    ]


def _grade(pairs: Sequence[tuple[Question, str]], grader: Grader, template: Template) -> list[Judgement]:
    """The grader's verdicts; a question with alternative golds is right if one of them is met."""
    tasks = [
        GradeTask(text, gold, question.answer_type, template, question.choices, question.meta)
        for question, text in pairs
        for gold in (question.gold, *question.other_golds)
    ]
    grades = iter(grader.grade_many(tasks))
    found = []
    for question, _ in pairs:
        options = [next(grades) for _ in range(1 + len(question.other_golds))]
        best = next((grade for grade in options if grade.correct), options[0])
        found.append(Judgement(best.verdict, best.extracted, best.reason))
    return found


def summarise_rows(
    benchmark: Benchmark,
    rows: Sequence[Row],
    *,
    mode: Mode,
    num_questions: int,
    template: str,
    left_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything that is reported about judged rows, as plain JSON; `left_out`: ids that no question has."""
    official = mode == "official"
    shipped = sum(row.answer.extraction is not None for row in rows) if official else 0
    emulated = official and benchmark.emulated and shipped < len(rows)
    found = {
        "benchmark": benchmark.name,
        "mode": mode,
        "rule": "strict" if not official else "emulated" if emulated else "official",
        "grader_version": GRADER_VERSION,
        "template": template if not official else None,  # where the strict rule looks for the answer
        "headline": benchmark.headline,
        "num_questions": num_questions,
        "missing": num_questions - len({row.question.id for row in rows}),
        "left_out": list(left_out),
        "shipped_extractions": shipped,
        **health(rows),
        "scores": scores(benchmark.name, rows),
        "headline_parts": headline_parts(benchmark.name, rows),
        "by": facet_tables(rows),
        "may_differ": [row.answer.id for row in rows if row.judgement.note.startswith("may differ")],
    }
    return found | _published(rows)


def _published(rows: Sequence[Row]) -> dict[str, Any]:
    """The accuracy by the file's own verdicts, where every row has one, and the rows judged otherwise here."""
    verdicts = [row.answer.published for row in rows]
    if not rows or None in verdicts:
        return {}
    return {
        "published_accuracy": sum(map(bool, verdicts)) / len(rows),
        "judged_otherwise": [row.answer.id for row in rows if row.answer.published != row.right],
    }


def row_record(row: Row) -> dict[str, Any]:
    """One judged answer as plain JSON: a score can be traced to these."""
    return {
        "id": row.answer.id,
        "sample": row.answer.sample,
        "gold": row.question.gold,
        "extracted": row.judgement.extracted,
        "verdict": row.judgement.verdict,
        "reason": row.judgement.reason,
        "note": row.judgement.note,
        "has_box": row.has_box,
        "published": row.answer.published,
        "length": row.answer.length,
        "category": next((value for values in row.question.facets.values() for value in values), ""),
    }
