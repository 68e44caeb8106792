r"""Grade responses: find the final answer and decide whether it is the gold.

    with Grader(workers=2, timeout=5.0) as grader:
        grade = grader.grade(response, gold="1/2", answer_type="expression", template=TEMPLATES["think_answer"])

Training, evaluation, data preparation and the demo all use this class. A timeout or an error is a verdict of its own,
never a silent "wrong".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from vlm_rl.grading.choices import compare_choice
from vlm_rl.grading.code_grader import CodeGrader
from vlm_rl.grading.decision import (
    AskSymbolic,
    Decision,
    SymbolicQuery,
    UndecidedError,
    all_equal,
    any_equal,
    refusal,
)
from vlm_rl.grading.equality import AnswerComparison, without_introduction
from vlm_rl.grading.extraction import extract_boxes
from vlm_rl.grading.latex import canonical, clean
from vlm_rl.grading.limits import refuse_long
from vlm_rl.grading.quantities import margin_of
from vlm_rl.grading.reasons import explain, shorten
from vlm_rl.grading.spellings import other_spellings
from vlm_rl.grading.symbolic_client import SymbolicClient, SymbolicReply
from vlm_rl.grading.undone import unfinished
from vlm_rl.templates import TEMPLATES, Template, last_program
from vlm_rl.types import AnswerType, Grade, Problem, Verdict

GRADER_VERSION = "13"  # of the rules: a different version may give different verdicts
MAX_BOXES = 8  # different answers in the boxes of a response
MAX_SPELLINGS = 64  # different texts in them
MAX_QUERIES = 40  # symbolic queries for a response
_MAX_ROUNDS = 4  # batches of symbolic queries, each of which may lead to further ones


@dataclass(frozen=True, slots=True)
class GradeTask:
    """A response to grade, and what it is graded against."""

    response: str  # prefill included
    gold: str | tuple[str, ...]  # of several golds any is right
    answer_type: AnswerType
    template: Template
    choices: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)  # precision (digits), tolerance, unit
    question: str = ""  # where it asks for a percentage, 50% is 50
    allows_undone: bool = False  # 37*43 is right for 1591, as published rules have it


class Grader:
    """Grade responses, with worker processes for symbolic comparisons; a context manager that stops them."""

    def __init__(self, *, workers: int = 2, timeout: float = 5.0, waits: Callable[[], object] = lambda: None) -> None:
        """Set the number of workers and the CPU seconds of one symbolic comparison; no worker is started yet.

        As many programs are run at a time, where answers are programs. `waits` is called again and again while
        answers are waited for, all of which have limits.
        """
        self._symbolic = SymbolicClient(workers=workers, timeout=timeout, waits=waits)
        self._programs = CodeGrader(workers=workers, waits=waits)

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers ahead of the first answer that needs them, without waiting for them."""
        self._symbolic.start()

    def close(self) -> None:
        """Stop the workers; a later call starts them again."""
        self._symbolic.close()
        self._programs.close()

    def stop_programs(self) -> None:
        """End the programs that are being judged, as errors; a `grade_many` that waits for them ends."""
        self._programs.close()

    def check_programs(self, problems: Iterable[Problem]) -> None:
        """Prove the sandbox if the answer of one of the problems is a program. Raises UserError if it fails."""
        if any(problem.answer_type == "code" for problem in problems):
            self._programs.check()

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
        r"""Return the grade of a response.

        Args:
            response: The whole text, the template's prefill included.
            gold: The right answer without \boxed{}; of several golds any is right.
            answer_type: Kind of the answer, which decides which rules apply.
            template: Says where in the response the answer is looked for.
            choices: Texts of options A, B, ... for the answer type `choice`.
            meta: precision (decimal places), tolerance, unit, as in Problem.meta.
        """
        golds = gold if isinstance(gold, str) else tuple(gold)
        return self.grade_many([GradeTask(response, golds, answer_type, template, tuple(choices), meta or {})])[0]

    def verifies_itself(self, problem: Problem) -> bool:
        """Return whether the gold, given as an answer, is graded correct, and so is a number in other spellings.

        A program has no gold, and its tests are believed.
        """
        if problem.answer_type == "code":
            return True
        template = TEMPLATES["think_answer"]
        answers = [problem.answer, *other_spellings(problem.answer, problem.answer_type)]
        try:
            responses = [template.wrap("The gold itself.", answer) for answer in answers]
        except ValueError:
            return False
        return all(
            grade.correct for grade in self.grade_many([task_of(problem, text, template) for text in responses])
        )

    def grade_many(self, tasks: Sequence[GradeTask]) -> list[Grade]:
        """Return the grades in the order of the tasks. Equal symbolic queries are answered once, and in batches."""
        grades: list[Grade | None] = [None] * len(tasks)
        for index, grade in self._grade_programs(tasks).items():
            grades[index] = grade
        replies: dict[SymbolicQuery, SymbolicReply] = {}
        for _ in range(_MAX_ROUNDS):
            wanted: dict[SymbolicQuery, None] = {}
            for index, task in enumerate(tasks):
                if grades[index] is None:
                    grades[index] = try_grade(task, replies, wanted)
            if not wanted:
                break
            replies.update(zip(wanted, self._symbolic.answer(list(wanted)), strict=True))
        return [grade or Grade("error", None, "rounds", f"no result after {_MAX_ROUNDS} rounds") for grade in grades]

    def _grade_programs(self, tasks: Sequence[GradeTask]) -> dict[int, Grade]:
        """Return the grades of the tasks whose answers are programs, by their place among all."""
        grades, programs = {}, {}
        for index, task in enumerate(tasks):
            if task.answer_type != "code":
                continue
            region = task.template.answer_region(task.response)
            program = None if region is None else last_program(region)
            if program is None:
                grades[index] = Grade("no_answer", None, "code", "no fenced block (```) where the answer belongs")
            else:
                programs[index] = program
        if programs:
            judged = self._programs.judge([(program, tasks[index].meta) for index, program in programs.items()])
            for (index, program), (verdict, reason) in zip(programs.items(), judged, strict=True):
                grades[index] = Grade(verdict, program, "code", reason)
        return grades


def task_of(problem: Problem, response: str, template: Template) -> GradeTask:
    """Return the grading task of a response to a problem."""
    golds = (problem.answer, *problem.meta.get("alternatives", ()))
    return GradeTask(
        response,
        golds,
        problem.answer_type,
        template,
        tuple(problem.choices),
        problem.meta,
        problem.meta.get("typeset_text", problem.question),
    )


def try_grade(
    task: GradeTask, replies: Mapping[SymbolicQuery, SymbolicReply], wanted: dict[SymbolicQuery, None]
) -> Grade | None:
    """Return the grade, or None after adding to `wanted` the symbolic queries whose replies it needs first."""
    asked: set[SymbolicQuery] = set()

    def ask(query: SymbolicQuery) -> Any:
        asked.add(query)
        if len(asked) > MAX_QUERIES:
            raise refusal(f"more than {MAX_QUERIES} symbolic comparisons")
        if query not in replies:
            wanted[query] = None
            return None
        status, value = replies[query]
        if status != "ok":
            raise UndecidedError(status, "math_verify", value)
        return "" if value is None else value

    texts, why_none = extract_boxes(task.response, task.template)
    if not texts:
        return Grade("no_answer", None, "extraction", why_none)
    answer = texts[-1]
    try:
        agreed = _boxes_agree(texts, task, ask)
        if agreed:
            return _grade_answer(answer, task, ask)
    except UndecidedError as undecided:
        return Grade(undecided.verdict, answer, undecided.path, undecided.reason)
    except Exception as fault:  # a fault of the grader must not take the whole batch with it; the verdict is counted
        return Grade(
            "error", answer, "fault", f"a fault of the grader: {type(fault).__name__}: {shorten(str(fault))}"
        )
    if agreed is None:
        return None
    shown = " | ".join(dict.fromkeys(shorten(text) for text in texts[-MAX_BOXES:]))
    return Grade("no_answer", None, "several_boxes", f"the boxes hold different answers: {shown}")


def _grade_answer(answer: str, task: GradeTask, ask: AskSymbolic) -> Grade | None:
    """Return the grade of an answer against all alternatives of the gold, or None while that is not known.

    Raises UndecidedError if the answer meets no alternative and could not be compared with one of them.
    """
    golds = (task.gold,) if isinstance(task.gold, str) else task.gold
    decision, undecided = Decision(False, ""), None
    is_pending = False
    for gold in golds:
        try:
            decision = _compare(gold, answer, task, ask)
        except UndecidedError as caught:
            undecided = caught
            continue
        if decision.equal and (rule := _why_unfinished(gold, answer, task)):
            decision = Decision(False, rule)
        if decision.equal:
            return _explained("correct", answer, gold, decision.path, task)
        is_pending |= decision.equal is None
    if is_pending:
        return None
    if undecided is not None:
        raise undecided
    return _explained("wrong", answer, " or ".join(golds), decision.path, task)


def _why_unfinished(gold: str, answer: str, task: GradeTask) -> str | None:
    """Return the rule by which an answer that equals the gold is none, or None if it is one."""
    if task.allows_undone or task.answer_type in ("choice", "text"):
        return None
    return unfinished(gold, without_introduction(answer), task.question)


def _explained(verdict: Verdict, answer: str, gold: str, path: str, task: GradeTask) -> Grade:
    within_margin = path == "number" and task.answer_type != "choice" and margin_of(task.meta)
    reason = explain(answer, gold, "rounded" if within_margin else path, equal=verdict == "correct")
    return Grade(verdict, answer, path, reason)


def _compare(gold: str, answer: str, task: GradeTask, ask: AskSymbolic) -> Decision:
    if task.answer_type == "choice":
        return compare_choice(gold, answer, task.choices, ask)
    return AnswerComparison(task.answer_type, ask, task.meta, task.question).compare(gold, answer)


def _boxes_agree(texts: list[str], task: GradeTask, ask: AskSymbolic) -> bool | None:
    """Return whether all boxes hold the same answer, exactly and without the problem's margin; None while unknown."""
    for text in texts:
        refuse_long(text)
    exact = replace(task, meta={})
    spellings = dict.fromkeys(reversed(texts))
    if len(spellings) > MAX_SPELLINGS:
        return False
    distinct: dict[str, str] = {}
    for text in spellings:
        distinct.setdefault(canonical(clean(text)), text)
        if len(distinct) > MAX_BOXES:
            return False
    last, *others = distinct.values()
    # Either box may hold the fuller spelling, as in "B" and "B. 5 cm".
    both_ways = [(_compare(last, other, exact, ask), _compare(other, last, exact, ask)) for other in others]
    return all_equal([any_equal([decision.equal for decision in pair]) for pair in both_ways])
