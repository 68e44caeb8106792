r"""The only grader: find the final answer of a response, and say whether it is the gold.

    with Grader(workers=2, timeout=5.0) as grader:
        grade = grader.grade(response, gold="1/2", answer_type="expression", template=TEMPLATES["think_answer"])

The answer is the last \boxed{} of the template's answer region. Exact paths decide first
(vlm_rl.equality, vlm_rl.choices); what they leave open goes to math-verify in killable processes
(vlm_rl.symbolic), which start only when first needed. A timeout or an error is a verdict of its own,
never a silent "wrong". Training, evaluation and demo all use this class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vlm_rl.choices import judge_choice
from vlm_rl.equality import Comparison, Job
from vlm_rl.mathtext import canonical, clean
from vlm_rl.prefilter import Undecided, refuse_long
from vlm_rl.symbolic import Outcome, SymbolicJudge
from vlm_rl.templates import TEMPLATES, Template, boxes
from vlm_rl.verdicts import AnswerType, Grade

if TYPE_CHECKING:
    from vlm_rl.types import Problem  # imports torch, which grading does not need

GRADER_VERSION = "1"
MAX_BOXES = 8  # different texts among one response's boxes
_MAX_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class GradeTask:
    """One response to grade."""

    response: str  # prefill included
    gold: str
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

    def close(self) -> None:
        """Stop the workers; a later call starts them again."""
        self._judge.close()

    def grade(
        self,
        response: str,
        *,
        gold: str,
        answer_type: AnswerType,
        template: Template,
        choices: Sequence[str] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> Grade:
        """The grade of one response, which includes the template's prefill."""
        return self.grade_many([GradeTask(response, gold, answer_type, template, tuple(choices), meta or {})])[0]

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
    return GradeTask(response, problem.answer, problem.answer_type, template, tuple(problem.choices), problem.meta)


def extract(response: str, template: Template) -> tuple[list[str], str]:
    """(texts of the boxes that count, why there are none): the last box is the answer if all are equal."""
    region = template.answer_region(response)
    if region is None:
        return [], "no answer region: the reasoning block, or the answer block after it, is not closed"
    found = boxes(region)
    if found is None:
        return [], "a \\boxed{ is never closed"
    found = [box.strip() for box in found if box.strip()]
    return found, "" if found else "no \\boxed{} with content where the answer belongs"


def _grade(task: GradeTask, known: Mapping[Job, Outcome], wanted: dict[Job, None]) -> Grade | None:
    """The grade, or None after adding to `wanted` what has to be decided first."""

    def ask(job: Job) -> Any:
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
    answer = texts[-1]
    try:
        agreed = _agree(texts, ask)
        if agreed is None:
            return None
        if not agreed:
            shown = " | ".join(dict.fromkeys(_short(text) for text in texts[-MAX_BOXES:]))
            return Grade("no_answer", None, "several_boxes", f"the boxes are not all equal: {shown}")
        if task.answer_type == "choice":
            equal, path = judge_choice(task.gold, answer, task.choices, ask)
        else:
            comparison = Comparison(task.answer_type, ask, task.meta)
            equal = comparison.equal(task.gold, answer)
            path = comparison.path
    except Undecided as undecided:
        return Grade(undecided.verdict, answer, undecided.path, undecided.reason)
    if equal is None:
        return None
    relation = "is" if equal else "is not"
    return Grade("correct" if equal else "wrong", answer, path, f"{_short(answer)} {relation} {_short(task.gold)}")


def _agree(texts: list[str], ask: Any) -> bool | None:
    """Whether all boxes hold the same answer; exact equality, whatever margin the problem allows."""
    for text in texts:
        refuse_long(text)
    distinct = list({canonical(clean(text)): text for text in reversed(texts)}.values())
    if len(distinct) > MAX_BOXES:
        return False
    verdicts = [Comparison("expression", ask).equal(distinct[0], other) for other in distinct[1:]]
    return False if False in verdicts else None if None in verdicts else True


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
