r"""The only grader: find the final answer of a response, and say whether it is the gold.

    with Grader(workers=2, timeout=5.0) as grader:
        grade = grader.grade(response, gold="1/2", answer_type="expression", template=TEMPLATES["think_answer"])

The answer is the last \boxed{} of the template's answer region. Exact paths decide first
(vlm_rl.grading.equality, vlm_rl.grading.choices); what they leave open goes to math-verify in killable processes
(vlm_rl.grading.symbolic_client), which start only when first needed. A timeout or an error is a verdict of its own,
never a silent "wrong". Training, evaluation and demo all use this class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from vlm_rl.grading.choices import judge_choice
from vlm_rl.grading.equality import Ask, Comparison, Job
from vlm_rl.grading.latex import canonical, clean
from vlm_rl.grading.limits import Undecided, refuse_long, refused
from vlm_rl.grading.symbolic_client import Outcome, SymbolicJudge
from vlm_rl.grading.unicode_text import fold
from vlm_rl.templates import TEMPLATES, Template, boxes
from vlm_rl.types import AnswerType, Grade, Problem

GRADER_VERSION = "6"  # of the policy: another version may give another verdict
MAX_BOXES = 8  # different answers among one response's boxes
MAX_SPELLINGS = 64  # different texts among them
MAX_ASKED = 40  # symbolic comparisons for one response
_MAX_ROUNDS = 4
_TAG = re.compile(r"< {0,2}(/?) {0,2}(think|answer) {0,2}>", re.IGNORECASE)
_WHY = {  # a refusal in words, by the rule that decided
    "text": "another text",
    "ratio": "another ratio",
    "number": "another number",
    "closed_form": "another value, exactly",
    "math_verify": "not the same for math-verify",
    "unit": "another unit",
    "approximate": "only about that",
    "guess_list": "several values where one is asked for, or one where several are",
    "equation": "an equation that says something else",
    "relation": "another range",
    "number_base": "a number in another base",
    "family": "other numbers, or a parameter that runs through something else",
    "outcome": "a value where there is none, none where there is one, or another kind of none",
    "figure": "another figure, or its corners in another order",
    "rounded": "another number after rounding",
    "matrix": "another shape, or other entries",
    "union": "other parts, or another number of them",
    "set": "other elements, or no set",
    "tuple": "other entries, another order, or no tuple",
    "bracket": "other entries or ends",
    "interval": "another interval, or other ends",
    "bare": "other items, another order, or another number of them",
    "choice_letter": "another option, or a letter beside another option's text",
    "choice_letters": "not the same options",
    "choice_text": "another option's text",
    "choice_value": "no option, or several",
}


@dataclass(frozen=True, slots=True)
class GradeTask:
    """One response to grade."""

    response: str  # prefill included
    gold: str | tuple[str, ...]  # several: alternatives, any of which is right
    answer_type: AnswerType
    template: Template
    choices: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)  # precision (digits), tolerance, unit


class Grader:
    """Grades responses; a context manager, since it may own worker processes."""

    def __init__(self, *, workers: int = 2, timeout: float = 5.0) -> None:
        """`timeout`: CPU seconds of one symbolic comparison."""
        self._judge = SymbolicJudge(workers=workers, timeout=timeout)

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Launch the workers ahead of the first answer that needs them, without waiting for them."""
        self._judge.start()

    def close(self) -> None:
        """Stop the workers; a later call starts them again."""
        self._judge.close()

    def grade(
        self,
        response: str,
        *,
        gold: str | Sequence[str],
        answer_type: AnswerType,
        template: Template,
        choices: Sequence[str] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> Grade:
        """The grade of one response, which includes the template's prefill."""
        golds = gold if isinstance(gold, str) else tuple(gold)
        return self.grade_many([GradeTask(response, golds, answer_type, template, tuple(choices), meta or {})])[0]

    def grade_problem(self, problem: Problem, response: str, template: Template) -> Grade:
        """`grade` with everything else taken from the problem."""
        return self.grade_many([task_of(problem, response, template)])[0]

    def verifies_itself(self, problem: Problem) -> bool:
        """Whether the gold, given as a perfect answer, is graded correct: if not, nothing can be."""
        template = TEMPLATES["think_answer"]
        try:
            response = template.wrap("The gold itself.", problem.answer)
        except ValueError:
            return False
        return self.grade_problem(problem, response, template).correct

    def grade_many(self, tasks: Sequence[GradeTask]) -> list[Grade]:
        """Grades in the order of `tasks`. Equal comparisons are made once, and symbolic ones in batches."""
        grades: list[Grade | None] = [None] * len(tasks)
        known: dict[Job, Outcome] = {}
        for _ in range(_MAX_ROUNDS):
            wanted: dict[Job, None] = {}
            for index, task in enumerate(tasks):
                if grades[index] is None:
                    grades[index] = _grade(task, known, wanted)
            if not wanted:
                break
            known.update(zip(wanted, self._judge.decide(list(wanted)), strict=True))
        return [grade or Grade("error", None, "rounds", "the comparison did not settle") for grade in grades]


def task_of(problem: Problem, response: str, template: Template) -> GradeTask:
    """The grading task of a problem's response."""
    golds = (problem.answer, *problem.meta.get("alternatives", ()))
    return GradeTask(response, golds, problem.answer_type, template, tuple(problem.choices), problem.meta)


def extract(response: str, template: Template) -> tuple[list[str], str]:
    """(texts of the boxes that count, why there are none): the last box is the answer if all are equal."""
    region = template.answer_region(_TAG.sub(lambda tag: f"<{tag[1]}{tag[2].lower()}>", fold(response)))
    if region is None:
        return [], "no answer region: the reasoning block, or the answer block after it, is missing or not closed"
    found = boxes(region)
    if found is None:
        return [], "a \\boxed{ is never closed"
    found = [box.strip() for box in found if box.strip()]
    return found, "" if found else "no \\boxed{} with content where the answer belongs"


def _grade(task: GradeTask, known: Mapping[Job, Outcome], wanted: dict[Job, None]) -> Grade | None:
    """The grade, or None after adding to `wanted` what has to be decided first."""
    asked: set[Job] = set()

    def ask(job: Job) -> Any:
        asked.add(job)
        if len(asked) > MAX_ASKED:
            raise refused(f"more than {MAX_ASKED} symbolic comparisons")
        if job not in known:
            wanted[job] = None
            return None
        outcome, value = known[job]
        if outcome != "ok":
            raise Undecided(outcome, "math_verify", value)
        return "" if value is None else value

    texts, why = extract(task.response, task.template)
    if not texts:
        return Grade("no_answer", None, "extraction", why)
    try:
        agreed = _agree(texts, task, ask)
        if agreed:
            return _compare(texts[-1], task, ask)
    except Undecided as undecided:
        return Grade(undecided.verdict, texts[-1], undecided.path, undecided.reason)
    except Exception as fault:  # ours; it must not take the batch with it, and it is counted
        return Grade("error", texts[-1], "fault", f"{type(fault).__name__} in the grader: {_short(str(fault))}")
    if agreed is None:
        return None
    shown = " | ".join(dict.fromkeys(_short(text) for text in texts[-MAX_BOXES:]))
    return Grade("no_answer", None, "several_boxes", f"the boxes are not all equal: {shown}")


def _compare(answer: str, task: GradeTask, ask: Ask) -> Grade | None:
    """The grade of one answer against all alternatives of the gold; None while the judge has not spoken.

    Raises Undecided if no alternative is met and one could not be judged.
    """
    golds = (task.gold,) if isinstance(task.gold, str) else task.gold
    pending, undecided, path = False, None, ""
    for gold in golds:
        try:
            equal, path = _equal(gold, answer, task, ask)
        except Undecided as caught:
            undecided = caught
            continue
        if equal:
            return Grade("correct", answer, path, f"{_short(answer)} is {_short(gold)}")
        pending |= equal is None
    if pending:
        return None
    if undecided is not None:
        raise undecided
    return Grade(
        "wrong", answer, path, f"{_short(answer)} is not {_short(' or '.join(golds))}: {_WHY.get(path, path)}"
    )


def _equal(gold: str, answer: str, task: GradeTask, ask: Ask) -> tuple[bool | None, str]:
    """(verdict, path): None while the judge has not spoken."""
    if task.answer_type == "choice":
        return judge_choice(gold, answer, task.choices, ask)
    comparison = Comparison(task.answer_type, ask, task.meta)
    return comparison.equal(gold, answer), comparison.path


def _agree(texts: list[str], task: GradeTask, ask: Ask) -> bool | None:
    """Whether all boxes hold the same answer; exact equality, whatever margin the problem allows."""
    for text in texts:
        refuse_long(text)
    exact = replace(task, meta={})
    distinct: dict[str, str] = {}
    spellings = dict.fromkeys(reversed(texts))
    if len(spellings) > MAX_SPELLINGS:
        return False
    for text in spellings:
        distinct.setdefault(canonical(clean(text)), text)
        if len(distinct) > MAX_BOXES:
            return False
    last, *others = distinct.values()
    # Either may be the fuller spelling: "B" and "B. 5 cm".
    both_ways = [{_equal(last, other, exact, ask)[0], _equal(other, last, exact, ask)[0]} for other in others]
    verdicts = [True if True in pair else None if None in pair else False for pair in both_ways]
    return False if False in verdicts else None if None in verdicts else True


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
